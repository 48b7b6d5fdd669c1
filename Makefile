# Everything a developer or a first-time user types. `make` alone explains.
SHELL := /bin/bash
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
PYTHON ?= python3.11
PY := $(VENV)/bin/python
SEED ?= 0
BENCH_ARGS ?=
BOX_ROOT ?= /tmp/miles-box-$(shell id -u)
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-hosts test-lifecycle test-sglang test-fast explore lint types bench box-up box-down clean

help: ## show this list
	@echo "miles_hpc: RL post-training of language models as Slurm batch jobs"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## make .venv with everything the demo and the tests need, and Debian packages where possible
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/setup.sh

demo: setup ## a whole RL run on a real Slurm cluster in a private folder, cut once, resumed by itself (SEED=0)
	@$(PY) -m tools.demo --seed $(SEED)

test: setup ## all tests that run without a GPU, the real Slurm box and MPI included
	@$(PY) -m tools.run_tests

test-hosts: setup ## what only root can test: network namespaces as hosts, with cut links; sandboxes as an ordinary user
	@$(PY) -m pytest -m "netns and not gpu"

test-lifecycle: setup ## whole runs that a cluster interrupts: preempted, cancelled, without progress, on spare nodes
	@$(PY) -m pytest -m "lifecycle and not gpu"

test-sglang: setup ## the engine suite and its hazards on real SGLang, without a GPU (makes .venv-sglang, 3.3 GB)
	@PYTHON="$(PYTHON)" SGLANG_VENV="$(SGLANG_VENV)" bash tools/sglang_cpu/setup.sh
	@MILES_HPC_SGLANG_PYTHON="$(abspath $(SGLANG_VENV))/bin/python" $(PY) -m pytest -m "sglang and not gpu"

test-fast: setup ## only the tests without Slurm, MPI and long runs
	@$(PY) -m pytest -q -m "not gpu and not slurm and not mpi and not slow and not sglang"

explore: setup ## property tests with new random examples, twenty times as many
	@MILES_HPC_EXPLORE=20 $(PY) -m pytest -q -m "hypothesis and not gpu" tests

lint: ## ruff and shellcheck
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && shellcheck tools/setup.sh tools/sglang_cpu/setup.sh .ci/run

types: ## strict type check
	@$(VENV)/bin/mypy

bench: ## benchmarks beside their peers, Ray among them (BENCH_ARGS=--quick for less than a minute each)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" EXTRAS=bench bash tools/setup.sh
	@$(PY) -m tools.bench_session.peer || true # an environment of its own for sglang-router; without it, ratios are null
	@for b in tools/bench_*; do $(PY) -m tools.$$(basename "$$b" .py) $(BENCH_ARGS) || exit 1; done

box-up: setup ## bring the private Slurm cluster up
	@$(PY) -m tools.slurm_box up --root $(BOX_ROOT)

box-down: ## end the private Slurm cluster
	@$(PY) -m tools.slurm_box down --root $(BOX_ROOT)

clean: ## remove caches and the virtual environment; runs/ stays
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
