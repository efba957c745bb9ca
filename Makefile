# `make run` opens the console on the demo model, `make test` runs what protects daily work, `make test-all` everything.
PYTHON ?= python3
# Which torch, by a folder of PyTorch's index: `make run TORCH=cpu`, cu126, ... Without, pip's own choice.
TORCH :=
VENV := .venv
TORCH_KIND := $(or $(if $(TORCH),,$(firstword $(wildcard $(VENV)/.torch-*))),$(VENV)/.torch-$(or $(TORCH),any))
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Parts and contracts, HTTP and screens over fakes, and one round each over HTTP and through the terminal.
DAILY := tests/unit tests/contract tests/api tests/ui tests/docs \
	tests/integration/test_headless.py::test_without_a_terminal_it_says_so_serves_and_leaves_nothing_behind \
	tests/integration/test_console_in_a_terminal.py::test_an_operators_round

.PHONY: run test test-all lint format clean wheel bench-peers

run: $(VENV)/.run
	@$(BIN)/ericllm $(ARGS)
	@command -v ericllm >/dev/null || echo "The command is in $(BIN): \`. $(BIN)/activate\`, then \`ericllm --help\`. README.md goes on from there."

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),-m "not long" $(DAILY) -n 3 --dist loadfile --no-loadscope-reorder)

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.lint_words

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Takes the machine for itself, for hours; ARGS limit it: see `python -m tools.benchmarks --help`. The docs are written where
# nothing lacks: --quick, which takes minutes, leaves them as they are.
bench-peers: $(VENV)/.dev
	$(BIN)/python -m tools.benchmarks $(ARGS)

# With the kernels compiled in, for machines without a C++ compiler; `pip wheel .` makes one for any machine.
wheel: $(VENV)/.made
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# Where the system has no C++ compiler, one as a package for the kernels of the CPU, if it has any.
HAS_KERNELS := import sys; from engine.backends.common.native_kernels import *; sys.exit(instruction_set_here() is not None and not kernels_available())
COMPILER = $(BIN)/python -c "$(HAS_KERNELS)" || { echo "Installing a C++ compiler for the CPU's kernels ..."; $(PIP) --editable '.[compiler]'; } || \
	echo "There is no C++ compiler, so the CPU computes with torch's kernels, which are slower: install g++, or run \`$(BIN)/pip install ziglang\`"

# Away at once: of one that is half removed, pip would take for installed what is no longer there.
clean:
	@rm -rf $(VENV).removed
	@if [ -e $(VENV) ]; then mv $(VENV) $(VENV).removed; fi
	rm -rf $(VENV).removed

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("EricLLM Console needs Python 3.11 or newer")'
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@

# Shown as it is fetched, as it is gigabytes where it is for CUDA.
$(VENV)/.torch-%: constraints.txt | $(VENV)/.made
	@echo "Installing torch ..."
	@$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt torch \
		$(if $(filter-out any,$*),--extra-index-url https://download.pytorch.org/whl/$*) \
		$(if $(filter-out $@,$(wildcard $(VENV)/.torch-*)),--force-reinstall)
	@rm -f $(VENV)/.torch-*
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt $(TORCH_KIND)
	@echo "Installing the rest ..."
	@$(PIP) --editable .
	@$(COMPILER)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(TORCH_KIND)
	@echo "Installing with what tests need ..."
	@$(PIP) --editable . --group dev
	@$(COMPILER)
	@$(BIN)/python -m tests.fakes.published_sources
	@touch $@ $(VENV)/.run
