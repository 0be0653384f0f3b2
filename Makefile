# One command each; every one of them makes .venv first if it has to.
#   make demo [SEED=3]   train on arithmetic and watch the reward rise
#   make test            the whole suite, with coverage
#   make check           formatter, linter, mypy, pyright, import directions
#   make bench           the benchmarks
#   make setup           only the environment
#   make clean           remove what the others made, except runs/

PYTHON ?= python3
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test check bench setup clean

demo: $(READY)
	$(BIN)/python examples/arithmetic_grpo.py --seed $(SEED)

test: $(READY)
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m pytest --quiet tests/test_imports.py

bench: $(READY)
	$(BIN)/python -m benchmarks.transport --contestants penstock --producers 4 --group 8 --tokens 1024

setup: $(READY)

# The environment is as old as its stamp: it is brought up to date when what it is made from changes.
$(READY): pyproject.toml constraints.txt scripts/make_venv.sh
	PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist penstock.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
