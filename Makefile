# Two commands: `make serve` talks to the built-in demo model, `make test` proves the tree.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.quire-installed
TORCH_ON_CPU := torch==2.13.0
PYTEST_WORKERS ?= 2

.PHONY: serve test test-all lint types layers format install clean

serve: install
	$(BIN)/quire serve $(ARGS)

test: install lint types layers
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) -m "not exhaustive" tests

test-all: install lint types layers
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

layers: install
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# Without an NVIDIA GPU torch is installed first and alone, so that no CUDA package follows it.
$(STAMP): pyproject.toml setup.py $(wildcard src/quire/kernels/cpu/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || command -v nvidia-smi >/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH_ON_CPU)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache
