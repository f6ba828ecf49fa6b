# make train   set up, then train a small GPT on 4 processes (2 partitions x 2 replicas)
# make test    set up, then run the tests; this is what CI runs
# make bench   print the benchmark tables
# make lint    check style and formatting
#
# The first of them creates .venv from pinned versions (constraints.txt); later ones find it ready.
# pip's own environment variables work as always: on Linux, where PyPI's torch is a large CUDA
# build, PIP_EXTRA_INDEX_URL can point at an index with the CPU build of the same version.

# The first of these that is at least 3.11 and really starts; PYTHON=... overrules.
PYTHON ?= $(firstword $(foreach candidate,python3.11 python3,$(shell \
	$(candidate) -c 'import sys; sys.version_info >= (3, 11) and print("$(candidate)")' 2>/dev/null)))

VENV := .venv
BIN := $(VENV)/bin
PARAMETERS := {"partitions": 2, "microbatches": 4, "ddp": true}

.PHONY: train test bench lint
.DELETE_ON_ERROR:

train: $(VENV)/train.stamp
	$(BIN)/smp-lite run --processes 4 --parameters '$(PARAMETERS)' notebooks/train_gpt.py

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests --ignore=tests/benchmarks

bench: $(VENV)/test.stamp
	$(BIN)/python -m tests.benchmarks

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'smp-lite needs Python 3.11 or later; name one with: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp: extras := mpi,plot
$(VENV)/test.stamp: extras := mpi,plot,test
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(extras)]'
	@touch $@
