# make demo   install everything and run the main example on this machine
# make test   linters, types and all tests
# make docs   the documentation site in build/site; broken links and references are errors
# make ci     test and docs, as in continuous integration
# make pairs  checkpoint conversion between every pair of datacenter layouts
# make chaos  ten minutes of faults for each of SEEDS, by default "1 2 3 4 5"; MINUTES changes the time
# make crash-sweep  kill each process before and after each of its durable steps
# make corruption  200 damages to each file of runs, devices and servers; takes about half an hour
# make coverage  the tests under coverage; at least 90 % of the product's code

PYTHON ?= python3
BIN := .venv/bin
# Tests mostly wait for processes. A file stays on one worker, since its tests share warm ranks.
TOGETHER := --numprocesses 2 --max-worker-restart 2 --dist loadfile --no-loadscope-reorder
# The tests start some two hundred Python processes: the first writes bytecode, the others read it.
# pip does not compile (--no-compile): most modules are never imported.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test docs ci pairs chaos crash-sweep corruption coverage lint format proto clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The examples need scikit-learn; everything that a user's installation needs comes from pyproject.toml.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "isthmus needs Python 3.11 or newer as $(PYTHON); set PYTHON=/path/to/it"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into .venv (the first time this takes a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[server,datacenter,examples]' 2>.venv/install.log \
	  || { tail -n 3 .venv/install.log; echo "installation failed: is the package registry reachable?"; exit 1; }
	@touch $@

.venv/ready-dev: .venv/ready
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]' 2>.venv/install.log \
	  || { tail -n 3 .venv/install.log; echo "installation failed: is the package registry reachable?"; exit 1; }
	@touch $@

demo: .venv/ready
	@$(BIN)/isthmus run examples/digits/job.toml
	@echo
	@$(BIN)/isthmus compare examples/digits/job.toml

test: .venv/ready-dev lint
	@$(BIN)/pytest -q $(TOGETHER)

# Works offline and sends no telemetry; the variable turns the theme's banner off.
docs: .venv/ready-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean
	@echo "the site is in build/site; open build/site/index.html"

ci: test docs

# `make test` tries a few pairs for each layout; this tries and prints all.
pairs: .venv/ready-dev
	@ISTHMUS_TEST_PAIRS=all $(BIN)/pytest -q -s tests/datacenter/parallel/test_parallelize.py -k other_layouts

# `make test` runs a short plan. Failed attempts spend budget: with enough of it all jobs have the same rounds.
SEEDS ?= 1 2 3 4 5
MINUTES ?= 10
CHAOS := $(BIN)/isthmus chaos examples/digits/job.toml
chaos: .venv/ready
	@failed=0; for seed in $(SEEDS); do echo "seed $$seed"; \
	  $(CHAOS) --clients 4 --set federated.cohort=4 --set federated.quorum=4 \
	    --set rounds=12 --set budget=1e6 \
	    --seed $$seed --minutes $(MINUTES) || failed=1; done; exit $$failed

# `make test` tries a sample. In turn: plain sums, secure aggregation, two datacenters with devices.
SWEEP := $(CHAOS) --crash-sweep --clients 3 --set federated.cohort=3 --set federated.quorum=3 --set rounds=2
FEDERATED := --set strategy.policy=federated --set datacenter.ranks=0
crash-sweep: .venv/ready
	@$(SWEEP) $(FEDERATED) --set federated.secure_aggregation=false
	@$(SWEEP) $(FEDERATED)
	@$(SWEEP) --datacenters 2 --set datacenter.ranks=1 --set datacenter.steps=5 \
	  --set 'strategy.schedule=[{regime="datacenter",rounds=1},{regime="hybrid",rounds=1}]'
# `make test` damages each file a few times; this damages it 200 times and prints the outcomes.
corruption: .venv/ready-dev
	@ISTHMUS_TEST_CORRUPTION=200 $(BIN)/pytest -q -s tests/end_to_end/test_corruption.py

# Takes about twice as long as `make test`.
coverage: .venv/ready-dev
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q $(TOGETHER)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report --fail-under=90

lint: .venv/ready-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: .venv/ready-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

proto: .venv/ready-dev
	@$(BIN)/python -m grpc_tools.protoc -I core --python_out=core --pyi_out=core $(wildcard core/isthmus/wire/*.proto)

clean:
	@rm -rf .venv build runs .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis
