# Two commands do everything on a fresh machine: make run, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch threads of the test processes must not fight over the cores
export OMP_NUM_THREADS ?= 1

.PHONY: run test test-slow test-all torture lint bench setup clean lock locked audit sbom

# Where `make lock` finds torch. A GPU's build: LOCK_TORCH=
LOCK_TORCH ?= --torch-backend cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TOOLS := .venv-tools
LOCKED := .venv-locked

run: setup
	$(BIN)/fedhpro run

test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -n 2 -m slow -rs

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

# The supply chain (docs/supply-chain.md): versions and hashes of everything, an environment of them alone, what is known against
# them, and the list of parts.
lock: $(TOOLS)/.ready
	$(TOOLS)/bin/uv pip compile pyproject.toml --extra flower --extra privacy -c constraints.txt --python-version 3.11 --generate-hashes \
		--no-annotate $(LOCK_TORCH) --custom-compile-command "make lock" --quiet --upgrade -o requirements.lock

locked: $(LOCKED)/.ready

audit: $(TOOLS)/.ready
	$(TOOLS)/bin/pip-audit -r requirements.lock --no-deps --disable-pip --strict --vulnerability-service osv

sbom: $(TOOLS)/.ready $(LOCKED)/.ready
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(LOCKED)/bin/python

$(LOCKED)/.ready: requirements.lock
	$(PYTHON) -m venv $(LOCKED)
	$(LOCKED)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--extra-index-url $(TORCH_INDEX) -r requirements.lock
	$(LOCKED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(LOCKED)/bin/python -m pip check
	touch $@

$(TOOLS)/.ready:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv pip-audit cyclonedx-bom
	touch $@

clean:
	rm -rf $(VENV) $(TOOLS) $(LOCKED) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
