# Two commands do everything on a fresh machine: make run, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch threads of the test processes must not fight over the cores
export OMP_NUM_THREADS ?= 1

.PHONY: run test test-all torture lint bench setup clean

run: setup
	$(BIN)/fedhpro run

test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: setup
	$(BIN)/python -m pytest -n 2

# kills, full disks, hostile replies, load: docs/reliability.md. Without atheris, hypothesis alone makes the replies
torture: setup
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	PYTHONPATH=tests $(BIN)/python -m torture

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/fedhpro bench rounds
	$(BIN)/fedhpro bench batches

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,flower]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
