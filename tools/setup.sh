#!/usr/bin/env bash
# Makes the virtual environment that the demo and the tests use, and installs Debian packages where we may.
# Idempotent: a stamp remembers what was installed; nothing is done twice. Says what it chose.
# EXTRAS="bench ..." adds extras of pyproject.toml; those of earlier calls stay.
set -euo pipefail

venv=${VENV:-.venv}
python=${PYTHON:-python3.11}
debian=(slurmctld slurmd slurm-client munge bubblewrap shellcheck iproute2)
stamp=$venv/.setup-stamp
want=$(cat pyproject.toml tools/setup.sh | sha256sum | cut -d' ' -f1)
installed='' extras_installed=''
if [[ -f $stamp ]]; then { read -r installed; read -r extras_installed; } <"$stamp" || true; fi
extras=$(tr ' ' '\n' <<<"$extras_installed ${EXTRAS:-}" | sort -u | xargs)

missing=()
for package in "${debian[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    if ! command -v apt-get >/dev/null; then
        echo "setup: missing and not installable here (no apt-get): ${missing[*]}" >&2
        echo "setup: without them there is no private Slurm cluster; a machine with Slurm needs none" >&2
    else
        become=()
        if [[ $(id -u) != 0 ]]; then
            if sudo -n true 2>/dev/null; then become=(sudo -n); else become=(false); fi
        fi
        if [[ ${become[*]-} == false ]]; then
            echo "setup: missing Debian packages; ask an administrator for: apt-get install ${missing[*]}" >&2
        else
            echo "setup: installing Debian packages: ${missing[*]}"
            "${become[@]}" apt-get update -qq
            "${become[@]}" env DEBIAN_FRONTEND=noninteractive \
                apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
        fi
    fi
fi

if [[ $installed == "$want" && $extras_installed == "$extras" ]]; then
    exit 0
fi
command -v "$python" >/dev/null || { echo "setup: no $python on PATH; set PYTHON=python3.x (3.11 to 3.13)" >&2; exit 2; }
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# torch 2.13.0 is what this was tested with; on Python 3.11 without a GPU it may resolve to a CPU build.
torch="torch==2.13.0"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    torch="torch>=2.6"
    echo "setup: Python $version, GPU found: $torch (CUDA build)"
else
    echo "setup: Python $version, no GPU: $torch"
fi
"$venv/bin/python" -m pip install -q --disable-pip-version-check "$torch" 2> >(grep -v WARNING >&2)
"$venv/bin/python" -m pip install -q --disable-pip-version-check \
    -e ".[train,mpich,gguf,ucx,dev${extras:+,${extras// /,}}]" 2> >(grep -v WARNING >&2)
"$venv/bin/python" - <<'PY'
import importlib.metadata as m
names = ("torch", "transformers", "mpi4py", "mpich", "zarr", "msgspec", "numpy")
print("setup: ready:", ", ".join(f"{n} {m.version(n)}" for n in names))
PY
printf '%s\n' "$want" "$extras" >"$stamp"
