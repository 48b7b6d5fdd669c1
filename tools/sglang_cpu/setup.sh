#!/usr/bin/env bash
# Makes an environment in which real SGLang serves on a machine without a GPU. Idempotent: a stamp says what it holds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${SGLANG_VENV:-.venv-sglang}
python=${PYTHON:-python3.11}
stamp=$venv/.setup-stamp
want=$(cat "$here"/setup.sh "$here"/requirements.txt "$here"/plugin/* 2>/dev/null | sha256sum | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then exit 0; fi
command -v "$python" >/dev/null || { echo "sglang: no $python on PATH; set PYTHON=python3.11" >&2; exit 2; }
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
echo "sglang: installing into $venv (some minutes, 3.3 GB)"
pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" 'setuptools>=77'
"${pip[@]}" --no-deps -r "$here/requirements.txt"
"${pip[@]}" --no-deps --no-build-isolation "$here/plugin"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo 'import miles_hpc_sglang_cpu; miles_hpc_sglang_cpu.install_stand_ins()' >"$site/zz_miles_hpc_sglang_cpu.pth"
"$venv/bin/python" -c 'import importlib.metadata as m; print("sglang: ready:", *(f"{n} {m.version(n)}" for n in ("sglang", "torch", "transformers")))'
echo "$want" >"$stamp"
