# Two commands matter: `make demo` and `make test`. Both set up what is missing.
#
# PYTHON       the Python that makes the environment, 3.11 or later        make demo PYTHON=python3.12
# VENV         where the environment lies                                   make test VENV=/tmp/graphlin
# CONSTRAINTS  the pinned versions in it                                    make test CONSTRAINTS=ci/constraints-triton36.txt VENV=.venv-triton36
# ARGS         more arguments of the command                                make test ARGS="-k conv"
# NPU_VENV     where the emulated Ascend device lies, 2.1 GB                make npu-test NPU_VENV=/tmp/npu
# DEVICE       what `make test-device` runs on, with PYTHON's own packages  make test-device DEVICE=cuda PYTHON=python

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= ci/constraints-triton39.txt
WORKERS ?= 2
DEVICE ?= cuda
ARGS ?=
NPU_VENV ?= .venv-npu

BIN := $(VENV)/bin
READY := $(VENV)/.ready
NPU_PYTHON := $(NPU_VENV)/venv/bin/python
NPU_READY := $(NPU_VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-device cuda-compile npu-compile npu-signature npu-test npu-demo lint clean

help:  ## Lists the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## Makes the CPU environment in VENV.

$(READY): pyproject.toml ci/constraints-cpu.txt $(CONSTRAINTS)
	@echo "Setting up $(VENV) with the versions of $(CONSTRAINTS) (a few minutes on a first run)"
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -e '.[cpu,test,bench,dev]' -c $(CONSTRAINTS) || { echo \
	  "make: the set-up needs the CPU build of torch, which PyPI does not have for Linux. Run this once:" \
	  "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup" >&2; exit 1; }
	@touch $@

demo: $(READY)  ## Trains a small model on text, eager and captured, and compares the two.
	$(BIN)/python -m graphlin demo $(ARGS)

test: $(READY)  ## Runs the test suite on the CPU.
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-device:  ## Runs the test suite on an accelerator, with the packages that PYTHON already has.
	$(PYTHON) -m pytest --device $(DEVICE) --require-device $(ARGS)

cuda-compile: $(READY)  ## Compiles every kernel for NVIDIA devices and checks what it needs; no GPU.
	$(BIN)/python ci/cuda_compile.py $(ARGS)

$(NPU_READY): $(wildcard ci/npu_rig/setup.sh ci/npu_rig/requirements.txt ci/npu_rig/acl/*.c) ci/constraints-cpu.txt
	PYTHON=$(PYTHON) bash ci/npu_rig/setup.sh $(NPU_VENV)
	@touch $@

npu-compile: $(NPU_READY)  ## Compiles every kernel for Ascend 910B3 and checks that it fits; no NPU.
	$(NPU_PYTHON) ci/npu_compile.py $(ARGS)

npu-signature:  ## Binds the npu backend's calls against torch_npu's wheels; no NPU.
	$(PYTHON) ci/npu_signature.py $(ARGS)

npu-test: $(NPU_READY)  ## Runs the test suite on an emulated Ascend device.
	$(NPU_PYTHON) -m pytest -p npu_rig.plugin --device npu --require-device -n $(WORKERS) $(ARGS)

npu-demo: $(NPU_READY)  ## Runs a small demo on an emulated Ascend device.
	$(NPU_PYTHON) -m npu_rig graphlin demo --small $(ARGS)

lint: $(READY)  ## Runs ruff and checks that the CI workflow matches ci/lanes.py.
	$(BIN)/python -m ruff check .
	$(BIN)/python ci/workflow.py --check

clean:  ## Removes the environments and what was built.
	rm -rf .venv .venv-triton36 $(NPU_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
