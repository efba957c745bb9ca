#!/usr/bin/env bash
# Every check that needs a CUDA device (exllamav3 too, where that Python has it), in one table:
# tests/gpu/run.sh [--quick] [--big] [--only a,b]. See docs/gpu.md.
#   PYTHON=python3   the Python to use; if torch is in it, that torch is kept
#   WHEELS=folder    wheels of what that Python lacks: nothing is downloaded then, nothing is installed for good
#   OUT=folder       where the JSON goes; tests/gpu/results otherwise
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
needed='exllamav2 jinja2 llguidance msgspec numpy PIL platformdirs psutil pynvml rich safetensors tokenizers torch'

has_all() { # has_all PYTHON: whether it finds every package, without importing one
  "$1" - $needed <<'PY'
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print("missing:", *missing) if missing else None
sys.exit(bool(missing))
PY
}

if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  has_all "$python"
elif ! has_all "$python"; then
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
