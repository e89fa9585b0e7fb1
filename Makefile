# Every target sets up what it needs. `make demo` and `make test` are the two to know.
PY      := .venv/bin/python
READY   := .venv/.ready
BENCH   := .venv/.ready-bench
CPU     := "not gpu and not campaign"
# Tests run in a random order. The seed is printed; `make test SEED=123` gives an order again.
ifndef SEED
SEED    := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
endif
PYTEST  := $(PY) -m pytest --randomly-seed=$(SEED)

.PHONY: docs demo test test-here test-cluster check test-quick lint bench bench-gpu test-gpu campaigns cluster cluster-down wheel matrix completion-words wheel-tags clean help

help:           ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

demo:           ## train a toy on two processes and look at it
	@scripts/demo.sh

test: $(READY)  ## everything that runs on a CPU
	@$(MAKE) --no-print-directory -j3 --output-sync=target SEED=$(SEED) lint test-here test-cluster

# Side by side, since all wait as well as compute. One pytest for quick and slow tests: each of its
# processes takes seconds to import and to collect all of them.
test-here: $(READY)
	$(PYTEST) tests --ignore=tests/cluster -n 3 --dist worksteal -m $(CPU) < /dev/null

test-cluster: $(READY)
	$(PYTEST) tests/cluster -n 4 --dist loadgroup -m $(CPU) < /dev/null

check: $(READY) ## lint, types, unit tests: about a minute on two cores
	@$(MAKE) --no-print-directory -j2 --output-sync=target SEED=$(SEED) lint test-quick

test-quick: $(READY)
	$(PYTEST) tests -n auto --dist worksteal -m "not slow and not gpu and not campaign" < /dev/null

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: $(READY)  ## build the documentation into build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --clean

test-gpu:       ## the tests that need an NVIDIA GPU, with this machine's own Python and torch
	python3 -c 'import xdist' 2>/dev/null && beside='-n 6 --dist loadgroup'; \
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/carried:$$PYTHONPATH python3 -m pytest tests/cuda -m gpu $$beside

bench: $(BENCH) ## measure beside the peers; results go to benchmarks/
	$(PY) benchmarks/run.py

bench-gpu:      ## the same on an NVIDIA GPU, with this machine's own Python and torch
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/carried:$$PYTHONPATH python3 benchmarks/run.py --gpu

campaigns: $(READY) ## long fault campaigns: 1,000 kills while saving, 200 restarts, 200 starts, kills in a sweep, random configurations, 200 kills over all kinds of data, 100 ranks replaced, two hours of faults on three hosts, by ssh and by Slurm, and 100 laptops killed while they submit
	$(PY) tests/campaigns/snapshot_kills.py --kills 1000 --flips 1000 --json benchmarks/results/snapshot_kills.json
	$(PY) tests/campaigns/restarts.py --restarts 200 --starts 200 --json benchmarks/results/restarts.json
	$(PY) tests/campaigns/sweep_kills.py --trials 50 --kills 40 --pause-s 5 --json benchmarks/results/sweep_kills.json
	$(PY) tests/campaigns/random_configs.py --configs 28 --json benchmarks/results/random_configs.json
	$(PY) tests/campaigns/data_kills.py --kills 200 --json benchmarks/results/data_kills.json
	$(PY) tests/campaigns/rank_kills.py --kills 100 --pause-s 1 --json benchmarks/results/rank_kills.json
	$(PY) tests/campaigns/soak.py --minutes 120 --json benchmarks/results/soak.json
	$(PY) tests/campaigns/soak.py --minutes 120 --launch slurm --json benchmarks/results/soak_slurm.json
	$(PY) tests/campaigns/login_kills.py --kills 100 --json benchmarks/results/login_kills.json
	$(PY) -m pytest tests -m campaign

cluster:        ## start the test cluster, three hosts on this machine (root, Debian)
	python3 cluster/cluster.py up

cluster-down:   ## remove every trace of it
	python3 cluster/cluster.py down

wheel: $(READY) ## a wheel and an sdist in dist/, checked in empty environments outside of this folder
	scripts/build_wheel.sh
	$(PY) scripts/check_wheel.py dist/echelon-*.whl

matrix: $(READY) ## the tests with other versions of Python, torch and all dependencies; CELLS=oldest chooses
	$(PY) scripts/run_matrix.py $(CELLS)

completion-words: $(READY) ## write what completion of shells knows, after a change of commands or settings
	$(PY) scripts/write_completion_words.py

wheel-tags: $(READY) ## write docs/wheels.md: for which machines all dependencies have wheels
	$(PY) scripts/write_wheel_tags.py

clean:          ## remove the virtual environment and what tests and demos left
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt scripts/setup.sh scripts/create_venv.sh
	scripts/setup.sh dev
	@touch $@

$(BENCH): $(READY)
	scripts/setup.sh bench
	# They ask for a torchvision, which torch's CPU build has none of, and for older numpy and xxhash.
	$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --constraint constraints.txt litdata mosaicml-streaming
	scripts/setup_board_peers.sh
	@touch $@
