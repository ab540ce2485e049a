# make setup | demo | test | lint.  Variables: PYTHON (interpreter for the environment), VENV (its folder),
# PIP_ARGS (more for pip, such as jax==0.11.2), WORKERS (test processes), PYTEST_ARGS.
VENV ?= .venv
PYTHON ?=
PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format

help:
	@echo 'make setup   create $(VENV) and install everything (CPU); does nothing the second time'
	@echo 'make demo    decode three prompts with the bundled model, plain and speculative'
	@echo 'make test    run the tests'
	@echo 'make lint    ruff (rules and format) and pyrefly (types)'
	@echo 'make format  rewrite the files as ruff formats them'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@set -e; \
	fits() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	if ! fits $(BIN)/python; then \
	  found=; \
	  for python in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14 python); do \
	    if fits "$$python"; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'error: no Python >= 3.11 with the venv module runs (tried: $(or $(PYTHON),python3, python3.11 to python3.14, python)); name one with make setup PYTHON=/path/to/python' >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$found"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo 'installing into $(VENV); the first time this takes some minutes'
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25'
	@$(BIN)/python -m pip install -qq -e '.[dev]' $(PIP_ARGS)
	@touch $@

demo: setup
	$(BIN)/python scripts/demo.py

# One file stays on one worker, so that what a file compiles is compiled once. A worker that crashes ends the run: the
# files it still had would otherwise wait for ever.
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
