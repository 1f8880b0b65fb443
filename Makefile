# Everything runs in .venv; `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint bench

PYTHON ?= python3.11
PROFILE ?= quick
REPEATS ?= 1
BIN := .venv/bin
STAMP := .venv/.installed

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install everything at the tested versions (skipped when up to date)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or set PYTHON=" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: setup ## train a small model, kill a worker, watch the run recover (two minutes)
	@for old in runs/quickstart runs/quickstart-model runs/quickstart.html; do \
	  if [ -e $$old ]; then echo "removing $$old of an earlier quickstart"; rm -r $$old; fi; done
	$(BIN)/python -m app run jobs/quickstart.yaml
	$(BIN)/python -m app report runs/quickstart -o runs/quickstart.html

test: setup ## run all tests (those marked gpu only where there is one)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup ## format check, ruff, mypy, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## checkpoints against none, DCP, Ray Train, side by side (PROFILE=full MODEL=... DATA=... for SmolLM2; REPEATS=3)
	$(BIN)/python -m benchmarks --profile $(PROFILE) --repeats $(REPEATS) $(if $(MODEL),--model $(MODEL) --data $(DATA))
