# make setup | demo | test | slow | lint | format | native | aot | bench | clean (CONTRIBUTING.md)
# Variables: PYTHON (3.11 or newer), CXX, JOBS (test processes), TORCH and TRITON (what to install),
# EXTRAS (of the package: without "cuda" the tests of NVRTC and NVSHMEM skip),
# TRITON_PATH and AOT_OUT (aot: folder of another Triton, file of results),
# and the build options RELIBRA_CUDA, RELIBRA_NVSHMEM, RELIBRA_CUDA_ARCHS.

PYTHON ?= python3
JOBS ?= 2
# torch goes first and pinned: a package that pulls it in by itself would take any build of it.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
EXTRAS ?= dev,demo

VENV := .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
PIP := $(PY) -m pip --disable-pip-version-check install -qq
NATIVE := build/native
CPP := $(wildcard $(foreach kind,cpp hpp h cu cuh,cuda/*/*.$(kind) cuda/*/*/*.$(kind)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test slow lint format native aot bench clean

help:
	@sed -n 's/^# *make/make/p' Makefile

setup: $(NATIVE)/.installed

# Environment: torch, then Triton, then the build tools, then the package with its extras.
$(VENV)/.tools:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found. Remedy: make PYTHON=<a Python 3.11 or newer>" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: need Python 3.11 or newer, got $$($(PYTHON) --version 2>&1)." \
	    "Remedy: make PYTHON=<a newer Python>" >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { \
	  echo "error: no C++ compiler: $(CXX) not found. Remedy: install g++ or set CXX" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { \
	  echo "error: python -m venv failed. Remedy: install the venv package of this Python" >&2; \
	  exit 1; }
	@echo "setup: installing $(TORCH), $(TRITON) and the tools into $(VENV)"
	@$(PIP) '$(TORCH)'
	@$(PIP) '$(TRITON)' numpy
	@$(PIP) 'setuptools>=77' wheel 'cmake>=3.25' ninja 'pybind11>=2.13'
	@touch $@

$(VENV)/.ready-$(EXTRAS): $(VENV)/.tools pyproject.toml setup.py CMakeLists.txt
	@echo "setup: installing the package (editable) with its extras $(EXTRAS)"
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

# Only what changed is compiled; the library goes into the source tree, where the install finds it.
$(NATIVE)/.installed: $(VENV)/.ready-$(EXTRAS) $(CPP)
	@$(BIN)/cmake --build $(NATIVE) --parallel $(JOBS) -- --quiet
	@$(BIN)/cmake --install $(NATIVE) --prefix python >/dev/null
	@echo "setup: $$(cat $(NATIVE)/_build_info.json)"
	@touch $@

native: setup

demo: setup
	@$(BIN)/relibra demo

test: lint
	@$(PY) -m pytest -q -n $(JOBS) --dist loadgroup

# Tests that are too long for every run: the whole fault matrix, 10,000 uses a schedule, inductor.
slow: setup
	@$(PY) -m pytest -q -n $(JOBS) --dist loadgroup -m slow

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { \
	  echo "error: not formatted. Remedy: make format" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))
	@$(BIN)/codespell .

format: setup
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@$(if $(CPP),$(BIN)/clang-format -i $(CPP))

# Compiles every kernel for sm_80, sm_90 and sm_100 and judges the binaries; needs no GPU.
aot: setup
	@$(PY) perf/aot_gate.py --jobs $(JOBS) --cache build/triton-cache \
	  $(if $(TRITON_PATH),--triton-path $(TRITON_PATH)) $(if $(AOT_OUT),--out $(AOT_OUT))

bench: setup
	@set -e; for bench in $(wildcard perf/bench_*.py); do \
	  echo "== $$bench --smoke"; $(PY) $$bench --smoke; done

clean:
	rm -rf build dist $(VENV) python/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f relibra_kernels/*.so relibra_kernels/*.fatbin relibra_kernels/_build_info.json
	find cuda perf python relibra_kernels tests triton_ops -name __pycache__ -prune \
	  -exec rm -rf {} + 2>/dev/null || true
