# `make run` opens the console on the demo model, `make test` runs the tests, `make test-all` also those that take minutes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-all lint format clean wheel bench-cpu bench-peers

run: $(VENV)/.run
	@$(BIN)/ericllm $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),-m "not long" -n 3 --dist loadfile --no-loadscope-reorder)

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Takes the machine for itself, for most of an hour; ARGS as `python -m benchmarks --help` tells. The docs are written where
# nothing lacks: --quick, which takes minutes, leaves them as they are.
bench-cpu bench-peers: $(VENV)/.dev
	$(BIN)/python -m benchmarks $@ $(ARGS)

# With the kernels compiled in, for machines without a C++ compiler; `pip wheel .` makes one for any machine.
wheel: $(VENV)/.made
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("EricLLM Console needs Python 3.11 or newer")'
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "Installing (once; torch is the large part) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "Installing with the dev extra ..."
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.run
