# `make run` and `make test` do everything on a fresh machine; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
REPORT := sqrtdk-report.html
RUNS := build/runs.sqlite
# Two test processes on two cores: BLAS threads of their own would only wait for each other.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup run test check lint test-long test-all bench clean

help:
	@echo "make run       set up and write $(REPORT): claims, exercises, ablation"
	@echo "make test      set up and run the tests (minutes)"
	@echo "make check     lint and the fast tests (under a minute)"
	@echo "make test-all  make test, then the long tests (kills, browser, models of transformers)"
	@echo "make lint      ruff, mypy, import contracts"
	@echo "make bench     side-by-side timings against peers, raw JSON in build/"
	@echo "make setup     only set up $(VENV) for development"
	@echo "make clean     remove what the targets made"

# A stamp per set of packages, renewed when what it depends on changes.
$(VENV)/base.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	touch $@

$(VENV)/run.stamp: $(VENV)/base.stamp pyproject.toml
	$(PIP) --no-build-isolation -e ".[torch,report]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) --no-build-isolation -e ".[dev]"
	touch $@

$(VENV)/models.stamp: $(VENV)/dev.stamp
	$(PIP) --no-build-isolation -e ".[hf]"
	touch $@

setup: $(VENV)/dev.stamp

run: $(VENV)/run.stamp
	@mkdir -p build
	$(BIN)/sqrtdk report --output $(REPORT) --store $(RUNS)

test: $(VENV)/dev.stamp
	$(PYTEST) -n 2 -m "not long"

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(PYTEST) -n 2 -m "not slow and not long"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: $(VENV)/models.stamp
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
	$(PYTEST) -m long

test-all: test test-long

bench: $(VENV)/dev.stamp
	@mkdir -p build
	$(BIN)/python benchmarks/attention.py --output build/benchmark.json

clean:
	rm -rf $(VENV) build dist $(REPORT) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
