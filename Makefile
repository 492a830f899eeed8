# make help lists the targets. PYTHON makes .venv; ARGS goes to the command that a target runs:
#   make train ARGS='train.steps=20 parallel.pp=4'     make test ARGS='tests/plan -x'
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install train test verify lint matrix cluster chaos gpu kernels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install threed in it, with the exact versions of constraints.txt

# Always with constraints: an unpinned torch may bring gigabytes of CUDA packages of another version.
$(STAMP): pyproject.toml setup.py constraints.txt threed/optim/native.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "threed needs Python 3.11 or newer; try: make install PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into .venv (minutes, the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(STAMP) ## train the toy model on 8 CPU processes, as dp=2 x tp=2 x pp=2
	$(BIN)/threed train configs/toy.yaml $(ARGS)

# A process for each core, since ranks as threads share one. Where ARGS names a path, all of its tests run,
# whatever their tier (tests/tiers.py).
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 --dist worksteal -n logical
TIER = $(if $(filter tests/%,$(ARGS)),,--tier $@)
CASES = $(if $(filter tests/%,$(ARGS)),,--cases $(1))
# The test of times wants the machine for itself: it comes after the others.
TIMES := tests/loopback/test_prediction.py

test: $(if $(ARGS),$(STAMP),lint) ## lint, then the core of the tests: under 5 minutes on 2 cores
	$(PARALLEL) --maxprocesses 4 $(TIER) $(ARGS)

verify: $(STAMP) ## the other tests, some of the cases where there are many; its budget is 35 minutes on 2 cores
	$(PARALLEL) --maxprocesses 4 --ignore $(TIMES) $(call CASES,4) $(TIER) $(ARGS)
	$(if $(filter tests/%,$(ARGS)),,$(PARALLEL) --maxprocesses 4 -p tests.fakecuda.everywhere --ignore $(TIMES) $(call CASES,3) tests/loopback $(ARGS))
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TIMES))

matrix: $(STAMP) ## everything: test, verify, every cell of the contract, full products (hours)
	$(PARALLEL) --maxprocesses 16 --ignore $(TIMES) -m "not cluster" $(TIER) $(ARGS)
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TIMES))

cluster: $(STAMP) ## runs on several hosts: network namespaces, and a Slurm of two nodes (as root; skipped elsewhere)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v slurmctld && command -v nft; } >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    iproute2 nftables util-linux slurmctld slurmd slurm-client munge >/dev/null; fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster -rs tests/cluster $(ARGS)

chaos: $(STAMP) ## a campaign of faults: kills, signals, disks, damaged files (ARGS='--faults 1000 --seed 7', an hour or two)
	$(BIN)/python -m tests.chaos $(ARGS)

gpu: $(STAMP) ## on a GPU: facts, short runs, tests/gpu, models beside torch's (half an hour; small without a GPU)
	PYTHON=$(BIN)/python bench/gpu/first_call.sh --whole $(ARGS)

# Beside .venv's packages and not among them: the other tests run without triton, as for most who have no GPU.
KERNELS := .venv/kernels

kernels: $(KERNELS)/.installed ## kernels of GPUs, without one: compile them for an H100, interpret them (triton: 190 MB)
	PYTHONPATH=$(KERNELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs --durations=3 --dist worksteal -n logical \
	  --maxprocesses 4 tests/loopback/test_kernels.py tests/loopback/test_loss_kernel.py tests/loopback/test_pieces.py $(ARGS)

$(KERNELS)/.installed: $(STAMP) constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade --target $(KERNELS) triton
	@touch $@

lint: $(STAMP) ## check style and types with ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/pyright

.PHONY: docs
docs: .venv/.docs ## build the documentation into build/site; a broken link is an error
	$(BIN)/python docs/reference/generate.py
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site
	@echo "build/site/index.html"

.venv/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

.PHONY: dist lock
dist: .venv/.dist ## build a wheel (manylinux) and an sdist into dist/, and check them for a package index
	rm -rf dist build
	$(BIN)/python -m build
	@# libgomp is not packed into the wheel: a process that computes on two OpenMP libraries has twice the threads.
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/twine check --strict dist/*

.venv/.dist: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	@touch $@

lock: ## write uv.lock anew, with the versions of constraints.txt (needs uv)
	uv lock $$(sed -n '/^[A-Za-z].*==[^;]*$$/s/^/-P /p' constraints.txt)

clean: ## remove build products and caches; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
