# make demo   install everything and run the main example on this machine
# make test   linters, types and all tests; what this machine lacks is skipped by name
# make check  linters, types and the fast tests, in about two minutes
# make docs   the documentation site in build/site; broken links and references are errors
# make ci     constraints, test, docs and the oldest Python, as in continuous integration
# make constraints  resolve the versions of constraints.txt anew, from the package registry alone
# make pairs  checkpoint conversion between every pair of datacenter layouts
# make chaos  ten minutes of faults for each of SEEDS, by default "1 2 3 4 5"; MINUTES changes the time
# make crash-sweep  kill each process before and after each of its durable steps
# make networks  a fleet behind proxies and balancers, on slow and broken links; takes about an hour
# make bases     runs over bases of 20 and 200 MB from each kind of source; takes about half an hour
# make ray       datacenters and simulations on a cluster of Ray; installs it
# make corruption  200 damages to each file of runs, devices and servers; takes about half an hour
# make benchmarks  every script of benchmarks/ with --quick, as one table with targets; takes about half an hour
# make coverage  the tests under coverage; at least 90 % of the product's code

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The oldest Python of this machine that Isthmus supports, which may be older than PYTHON.
OLDEST ?= $(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3))
# Real data sets for tests and benchmarks, if they are next to the checkout.
DATA := $(realpath $(wildcard ../shared/data))
ifneq ($(DATA),)
export ISTHMUS_TEST_DATA ?= $(DATA)
endif
# Debian packages that a virtual environment and some tests need, by a program of each.
PACKAGES := chromium:chromium ip:iproute2 systemd-analyze:systemd unshare:util-linux
# Tests mostly wait for processes. A file stays on one worker, since its tests share warm ranks.
TOGETHER := --numprocesses 2 --max-worker-restart 2 --dist loadfile --no-loadscope-reorder
# The tests start some two hundred Python processes: the first writes bytecode, the others read it.
# pip does not compile (--no-compile): most modules are never imported.
unexport PYTHONDONTWRITEBYTECODE
# Processes of tests share two cores: threads that wait for work leave them to others.
test check test-jobs coverage: export OMP_WAIT_POLICY = passive

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check packages docs ci oldest test-jobs constraints constraints-check pairs chaos crash-sweep networks bases ray corruption coverage benchmarks lint format proto clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The examples need scikit-learn; everything that a user's installation needs comes from pyproject.toml.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "isthmus needs Python 3.11 or newer as $(PYTHON); set PYTHON=/path/to/it"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || $(call install,python3-venv) \
	  || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (the first time this takes some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[server,datacenter,examples]' $(OR_SAY_WHY)
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready
	@$(INSTALL) -e '.[dev]' $(OR_SAY_WHY)
	@touch $@

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
OR_SAY_WHY = 2>$(VENV)/install.log \
  || { tail -n 3 $(VENV)/install.log; echo "installation failed: is the package registry reachable?"; exit 1; }

# Root may install packages of Debian; for others, tests that need them are skipped by name.
install = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(1); } >/dev/null 2>&1; }

packages:
	@missing=; for each in $(PACKAGES); do \
	  command -v $${each%%:*} >/dev/null || missing="$$missing $${each#*:}"; done; \
	  for each in $$missing; do $(call install,$$each) \
	  || echo "$$each is not installed: tests that need it are skipped"; done

demo: $(VENV)/ready
	@$(BIN)/isthmus run examples/digits/job.toml
	@echo
	@$(BIN)/isthmus compare examples/digits/job.toml

test: $(VENV)/ready-dev packages lint
	@$(BIN)/pytest -q $(TOGETHER)

# What fails first after most changes.
FAST := core privacy server clients datacenter simulation chaos flower $(addprefix tests/,core clients/training \
  privacy/compression privacy/crypto privacy/dp_sgd privacy/secagg flower/hosted flower/test_messages.py \
  server/model server/regimes server/storage server/strategy server/transport server/test_commands.py \
  docs/test_language.py docs/test_site.py test_deployment.py test_repository.py test_setup.py)
# Processes, whole jobs, rounds with secure sums, what waits, and statistics of noise are no fast tests.
SLOW := $(addprefix core/,integrations projects system/test_private_files.py task/test_packed_text.py \
    start/test_distributed_checkpoint.py start/test_loading.py) \
  $(addprefix clients/training/,test_frozen_form.py test_local_run.py test_examples_account.py \
    test_private_steps.py) \
  $(addprefix privacy/,crypto/test_refusal.py dp_sgd/test_renyi.py dp_sgd/test_kept_state.py \
    secagg/test_rounds.py secagg/test_opened_sums.py secagg/test_known_attacks.py) \
  $(addprefix server/regimes/,secure_sums test_slow_transfers.py test_lying_about_vectors.py \
    test_lying_server.py test_buffered.py test_withholding.py test_encoded_updates.py \
    aggregation/test_rule_extension.py) \
  $(addprefix server/storage/,test_signed_sums_check.py test_fence.py test_audit.py test_recovery.py) \
  $(addprefix server/,strategy/test_limits.py transport/test_leases.py transport/test_check_ins.py)
check: $(VENV)/ready-dev lint
	@$(BIN)/pytest -q $(TOGETHER) $(FAST) $(addprefix --ignore=tests/,$(SLOW))

# Works offline and sends no telemetry; the variable turns the theme's banner off.
docs: $(VENV)/ready-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean
	@echo "the site is in build/site; open build/site/index.html"

ci: constraints-check test docs oldest

# Failed attempts at a round, and ports that are passed on, depend on the patch release of Python.
oldest:
	@if [ -z "$(OLDEST)" ] || ! $(OLDEST) -c \
	  'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then \
	  echo "no Python 3.11 to 3.14 with venv as OLDEST=$(OLDEST): whole jobs are tested with $(PYTHON) only"; \
	else $(MAKE) --no-print-directory test-jobs PYTHON=$(OLDEST) VENV=.venv-oldest; fi

# Whole jobs, their failures and their recovery, for example with another Python.
test-jobs: $(VENV)/ready-dev
	@$(BIN)/python -c 'import sys; print("Python", *sys.version.split()[:1])'
	@$(BIN)/pytest -q $(TOGETHER) tests/server/rounds tests/server/regimes \
	  tests/server/transport/test_fair_port.py tests/server/service/test_joining.py \
	  tests/end_to_end/test_main_job.py

# A pip without configuration, as of somebody who has just installed Python.
BARE_PIP := env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null
RESOLVED := build/constraints

# PyTorch is left out, whose build for CUDA pip would download.
constraints-check: $(VENV)/ready
	@grep -v '^torch==' constraints.txt | $(BARE_PIP) $(BIN)/pip install --quiet --dry-run \
	  --ignore-installed --no-deps -r /dev/stdin 2>$(VENV)/constraints.log \
	  || { tail -n 3 $(VENV)/constraints.log; \
	  echo "if the registry lacks versions of constraints.txt: make constraints"; exit 1; }

# PyTorch keeps its version, and the packages of its build for CUDA are not pinned.
constraints:
	@$(PYTHON) -m venv --clear $(RESOLVED)
	@$(BARE_PIP) $(RESOLVED)/bin/pip install --quiet --no-compile "$$(grep ^torch== constraints.txt)" '.[dev,float8,ray]'
	@{ head -n 1 constraints.txt; $(RESOLVED)/bin/pip freeze --exclude isthmus \
	  | grep -Ev '^(nvidia-|cuda-|triton)'; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt

# `make test` tries a few pairs for each layout; this tries and prints all.
pairs: $(VENV)/ready-dev
	@ISTHMUS_TEST_PAIRS=all $(BIN)/pytest -q -s tests/datacenter/parallel/test_parallelize.py -k other_layouts

# `make test` runs a short plan. Failed attempts spend budget: with enough of it all jobs have the same rounds.
SEEDS ?= 1 2 3 4 5
MINUTES ?= 10
CHAOS := $(BIN)/isthmus chaos examples/digits/job.toml
chaos: $(VENV)/ready
	@failed=0; for seed in $(SEEDS); do echo "seed $$seed"; \
	  $(CHAOS) --clients 4 --set federated.cohort=4 --set federated.quorum=4 \
	    --set rounds=12 --set budget=1e6 \
	    --seed $$seed --minutes $(MINUTES) || failed=1; done; exit $$failed

# `make test` tries a sample. In turn: plain sums, secure aggregation, two datacenters with devices.
SWEEP := $(CHAOS) --crash-sweep --clients 3 --set federated.cohort=3 --set federated.quorum=3 --set rounds=2
FEDERATED := --set strategy.policy=federated --set datacenter.ranks=0
crash-sweep: $(VENV)/ready
	@$(SWEEP) $(FEDERATED) --set federated.secure_aggregation=false
	@$(SWEEP) $(FEDERATED)
	@$(SWEEP) --datacenters 2 --set datacenter.ranks=1 --set datacenter.steps=5 \
	  --set 'strategy.schedule=[{regime="datacenter",rounds=1},{regime="hybrid",rounds=1}]'

# `make test` tries two of the networks, and what the files below have; this tries all, with a model of 20 MB
# at 1 Mbit/s, and prints a line for each. Proxies and balancers have tests of their own.
NETWORKS := tests/end_to_end/test_networks.py
ROADS := $(addprefix tests/end_to_end/test_,proxies.py balancer.py addresses.py several_hosts.py) \
  $(addprefix tests/server/service/test_,proxies.py balancers.py ending_balancers.py faulty_balancers.py)
NETWORK_PACKAGES := nginx:nginx-light nginx:libnginx-mod-stream squid:squid tinyproxy:tinyproxy
networks: $(VENV)/ready-dev packages
	@$(BIN)/pytest -q $(ROADS)
	@ISTHMUS_TEST_NETWORKS=all $(BIN)/pytest -q -s $(NETWORKS)
networks: PACKAGES += $(NETWORK_PACKAGES)

# `make test` tries a small base from a store of S3; this prints a line for each.
bases: $(VENV)/ready-dev
	@ISTHMUS_TEST_BASES=all $(BIN)/pytest -q -s tests/end_to_end/test_base_sources.py

# Ray's nodes take a minute to start, and it is a large package.
ray: $(VENV)/ready-dev
	@$(INSTALL) -e '.[ray]' $(OR_SAY_WHY)
	@$(BIN)/pytest -q $(TOGETHER) tests/datacenter/launch tests/simulation/test_cluster_launch.py

# `make test` damages each file a few times; this damages it 200 times and prints the outcomes.
corruption: $(VENV)/ready-dev
	@ISTHMUS_TEST_CORRUPTION=200 $(BIN)/pytest -q -s tests/end_to_end/test_corruption.py

# Takes about twice as long as `make test`.
coverage: $(VENV)/ready-dev
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q $(TOGETHER)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report --fail-under=90

# The peers of benchmarks/simulation.py need other versions than this project. Without them its script
# measures Isthmus alone and says so.
PEERS := .venv-peers
$(PEERS)/ready: benchmarks/peers.txt
	@$(PYTHON) -m venv --clear $(PEERS)
	@$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r $< 2>$(PEERS)/install.log && touch $@ \
	  || echo "the packages of benchmarks/peers.txt cannot be installed: see $(PEERS)/install.log"

# Figures go to build/benchmarks.json; `run_all.py --record` writes them into docs/measurements.md.
benchmarks: $(VENV)/ready-dev $(PEERS)/ready
	@$(BIN)/python benchmarks/run_all.py --json build/benchmarks.json

lint: $(VENV)/ready-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(VENV)/ready-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

proto: $(VENV)/ready-dev
	@$(BIN)/python -m grpc_tools.protoc -I core --python_out=core --pyi_out=core $(wildcard core/isthmus/wire/*.proto)

clean:
	@rm -rf .venv .venv-oldest .venv-peers build runs .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis
