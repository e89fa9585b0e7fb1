# Every target sets up what it needs. `make demo` and `make test` are the two to know.
PY      := .venv/bin/python
READY   := .venv/.ready
BENCH   := .venv/.ready-bench
SLOW    := "slow and not gpu and not campaign"
# Tests run in a random order. The seed is printed; `make test SEED=123` gives an order again.
ifndef SEED
SEED    := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
endif
PYTEST  := $(PY) -m pytest --randomly-seed=$(SEED)

.PHONY: demo test slow-here slow-cluster check bench bench-gpu test-gpu campaigns cluster cluster-down clean help

help:           ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

demo:           ## train a toy on two processes and look at it
	@scripts/demo.sh

test: $(READY)  ## everything that runs on a CPU
	@$(MAKE) --no-print-directory -j2 --output-sync=target SEED=$(SEED) slow-here slow-cluster

# Side by side: all of them wait more than they compute.
slow-here: check
	$(PYTEST) tests --ignore=tests/cluster -n 3 --dist worksteal -m $(SLOW) < /dev/null

slow-cluster: $(READY)
	$(PYTEST) tests/cluster -n 2 --dist loadgroup -m $(SLOW) < /dev/null

check: $(READY) ## lint, types, unit tests: under a minute
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PYTEST) tests -n auto --dist worksteal -m "not slow and not gpu" < /dev/null

test-gpu:       ## the tests that need an NVIDIA GPU, with this machine's own Python and torch
	python3 -c 'import xdist' 2>/dev/null && beside='-n 6 --dist loadgroup'; \
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/carried:$$PYTHONPATH python3 -m pytest tests/cuda -m gpu $$beside

bench: $(BENCH) ## measure beside the peers; results go to benchmarks/
	$(PY) benchmarks/run.py

bench-gpu:      ## the same on an NVIDIA GPU, with this machine's own Python and torch
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/carried:$$PYTHONPATH python3 benchmarks/run.py --gpu

campaigns: $(READY) ## long fault campaigns: 1,000 kills while saving, 200 restarts, 200 starts, kills in a sweep, random configurations
	$(PY) tests/campaigns/snapshot_kills.py --kills 1000 --flips 1000 --json benchmarks/results/snapshot_kills.json
	$(PY) tests/campaigns/restarts.py --restarts 200 --starts 200 --json benchmarks/results/restarts.json
	$(PY) tests/campaigns/sweep_kills.py --trials 50 --kills 40 --pause-s 5 --json benchmarks/results/sweep_kills.json
	$(PY) tests/campaigns/random_configs.py --configs 28 --json benchmarks/results/random_configs.json
	$(PY) -m pytest tests -m campaign

cluster:        ## start the test cluster, three hosts on this machine (root, Debian)
	python3 cluster/cluster.py up

cluster-down:   ## remove every trace of it
	python3 cluster/cluster.py down

clean:          ## remove the virtual environment and what tests and demos left
	rm -rf .venv runs build .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt scripts/setup.sh scripts/create_venv.sh
	scripts/setup.sh dev
	@touch $@

$(BENCH): $(READY)
	scripts/setup.sh bench
	@touch $@
