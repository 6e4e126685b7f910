# `make quickstart` and `make test` do everything from a fresh clone: they find Python 3.12 or 3.13,
# make .venv, install the package into it, and run.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install quickstart test parity lint check clean

help:
	@echo "make quickstart  train a small GPT on the standard library's sources, on 4 CPU processes"
	@echo "make test        run all tests"
	@echo "make lint        ruff, mypy, import contracts, spelling"
	@echo "make check       lint and test"
	@echo "make clean       remove .venv and runs"

install: $(STAMP)

$(STAMP): pyproject.toml requirements/tested.txt scripts/find_python.sh
	@python=$$(sh scripts/find_python.sh) && test -n "$$python" && \
	  echo "Using $$python" && "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]" --constraint requirements/tested.txt
	@touch $@

quickstart: $(STAMP)
	$(BIN)/lightning-dcp fit --config configs/quickstart.yaml

# Two workers: a test of several processes leaves cores idle while its ranks wait for each other.
# Each takes half of the files, so that what a file's tests share is made once.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test: $(STAMP)
	$(PYTEST)

# Every layout against one plain process: docs/parity.md.
parity: $(STAMP)
	$(PYTEST) tests/engine

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

check: lint test

clean:
	rm -rf $(VENV) runs
