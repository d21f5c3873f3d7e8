# `make serve` serves the built-in demo model; `make test` runs every check; `make docs` builds the site; `make dist` builds the packages.
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev
TORCH_ON_CPU := torch==2.13.0
# Tests that start servers wait for them: two workers more than the usual two cores.
PYTEST_WORKERS ?= 4
# Tests start many processes: none compiles the sources anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal
SOURCES := pyproject.toml setup.py $(wildcard src/quire/kernels/cpu/build.py src/quire/kernels/cpu/csrc/*)

# The first Python that is in range; `make PYTHON=… test` chooses another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$python && break; done)

.PHONY: serve test test-all default-tests all-tests test-wheel lint types layers format docs docs-serve dist install install-dev chaos clean

serve: install
	$(BIN)/quire serve $(ARGS)

# Types are checked beside the tests, which often wait. One of the tests is `make layers`.
test: lint
	@$(MAKE) --no-print-directory -j 2 types default-tests

test-all: lint
	@$(MAKE) --no-print-directory -j 2 types all-tests

default-tests: install-dev
	$(PYTEST) -m "not exhaustive" tests

all-tests: install-dev
	$(PYTEST) tests

# Servers under streams whose processes are killed and stopped: about 10 minutes. ARGS=--write keeps the table.
chaos: install-dev
	$(BIN)/python -m bench chaos $(ARGS)

# Builds the wheel, installs it into an empty environment, and generates text with it. Needs the network.
test-wheel: install-dev
	$(BIN)/python -m pytest -q -m exhaustive tests/packaging

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/pyright

layers: install-dev
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "The site is in build/site: open build/site/index.html"

docs-serve: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict

dist: install-dev
	$(BIN)/python -m build --outdir dist .

install: $(INSTALLED)

install-dev: $(DEV_INSTALLED)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Quire needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=/path/to/python3.13 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without an NVIDIA GPU torch is installed first and alone, so that no CUDA package follows it.
$(INSTALLED): $(SOURCES) | $(BIN)/python
	@$(BIN)/python -c "import torch" 2>/dev/null || nvidia-smi -L >/dev/null 2>&1 || \
		{ echo "Installing PyTorch for CPUs (about 200 MB to download) …"; $(BIN)/python -m pip install --quiet "$(TORCH_ON_CPU)"; }
	@echo "Installing Quire and its packages (about 60 MB) and building the CPU kernels (about 2 minutes) …"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@
	@echo "Installed. To have the command quire at hand: source $(BIN)/activate"

# Names the installed distribution, not the folder: pip then adds the packages of the extra and does not build the kernels again.
$(DEV_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet "quire-llm[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache
