#!/usr/bin/env bash
# Every check that needs a CUDA device (exllamav3 too, where that Python has it), in one table:
# tests/gpu/run.sh [--quick] [--big] [--only a,b]. See docs/gpu.md.
#   PYTHON=python3   the Python to use; if torch is in it, that torch is kept
#   WHEELS=folder    wheels of what that Python lacks: nothing is downloaded then, nothing is installed for good
#   OUT=folder       where the JSON goes; tests/gpu/results otherwise
set -euo pipefail
from_here() { [[ $1 == /* ]] && echo "$1" || echo "$PWD/$1"; }
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(from_here "$python")
[[ -z ${WHEELS:-} ]] || WHEELS=$(from_here "$WHEELS")
[[ -z ${OUT:-} ]] || OUT=$(from_here "$OUT")
cd "$(dirname "$0")/../.."
needed='exllamav2 jinja2 llguidance msgspec numpy PIL platformdirs psutil pynvml rich safetensors tokenizers torch'

has_all() { # has_all PYTHON: whether it finds every package, without importing one
  "$1" - $needed <<'PY'
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print("missing:", *missing) if missing else None
sys.exit(bool(missing))
PY
}

has_gpu() { # has_gpu PYTHON: whether the driver shows a CUDA device, without torch
  "$1" - <<'PY'
import ctypes, sys
count = ctypes.c_int()
try:
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
except OSError:
    found = False
sys.exit(None if found else 1)
PY
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"PYTHON: Python 3.11 or newer is needed, this is {sys.version}")'
if [[ -n ${WHEELS:-} ]]; then
  compgen -G "$WHEELS/*.whl" >/dev/null || { echo "WHEELS: there is no wheel in $WHEELS" >&2; exit 1; }
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  has_all "$python"
elif ! has_all "$python"; then
  has_gpu "$python" || { echo "no CUDA device is found; these checks need one, and nothing was installed" >&2; exit 2; }
  venv=.venv/gpu
  [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
  if torch=$("$python" -c 'import importlib.util as u; print(next(iter(u.find_spec("torch").submodule_search_locations)))' 2>/dev/null); then
    dirname "$torch" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/machine.pth"
  fi
  echo "Installing into $venv ..."
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[cuda]' tokenizers ninja setuptools
  python=$venv/bin/python
  has_all "$python"
fi

"$python" -m tests.gpu "$@"
