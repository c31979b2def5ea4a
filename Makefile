# charonia: everything a developer types. `make setup` is idempotent and every other target needs it.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.setup-done
FUZZER := .venv-fuzz
FUZZER_STAMP := $(FUZZER)/.setup-done
KERNELS := $(VENV)/.kernels-done
KERNEL_SOURCES := $(wildcard python_backend/charonia/data/ops/native/*.cpp python_backend/charonia/data/ops/native/*.h)
EXTRAS := server,dev

# Candidates to make the environment with, first come first taken; PYTHON=... is the only one then.
PYTHONS := $(or $(PYTHON),python3 python3.12 python3.11)

# The embedded tritonserver (the wheel nvidia-pytriton) decides what is supported.
SUPPORTED_PYTHON := import sys; sys.exit(sys.implementation.name != "cpython" or sys.version_info[:2] not in ((3, 11), (3, 12)))
MIN_GLIBC_MINOR := 35

# Three processes run the tests, as many of them wait for others more than they compute; each runs whole
# files, so that what a file's tests share is started once.
# A process that dies ends the run: its tests would run again, and xdist may wait for ever.
TESTS := $(BIN)/python tests/run.py --numprocesses 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 8

.PHONY: help setup demo serve test test-long test-page observe-test gateway-clients gateway-fuzz dashboards dashboards-picture check interface bench bench-peers bench-speculation bench-overlap bench-gap bench-observing bench-attention bench-first-token bench-prompt bench-control bench-stall bench-flood bench-simulator bench-policies bench-cache bench-prefix bench-samples bench-kv bench-parallel bench-faults bench-endurance bench-metrics bench-gateway bench-hostile clean

help:
	@echo "make setup   create $(VENV) with everything (pinned by constraints.txt)"
	@echo "make demo    serve the demo model, stream three completions, stop"
	@echo "make serve   serve until interrupted, with OpenAI's API and a page on port 8080; arguments in ARGS=\"--model DIR ...\""
	@echo "make test    all tests but the long ones, with the coverage gate; arguments for pytest in ARGS"
	@echo "make test-long   the long ones: many random cases, repeated faults, stress; arguments for pytest in ARGS"
	@echo "make test-page   the gateway's page in a real Chromium; arguments for pytest in ARGS"
	@echo "make observe-test   dashboards and alerts in a real Prometheus, rules by promtool, the log in a real rsyslog, traces, charonia top, then throughput with all of it on and off; needs these programs; arguments for pytest in ARGS"
	@echo "make dashboards   write docker/grafana/dashboards"
	@echo "make dashboards-picture   draw them in front of a server under load; needs prometheus; ARGS=\"--output FOLDER\""
	@echo "make gateway-clients   official clients against a real gateway, recorded; needs node 20 and npm; arguments in ARGS"
	@echo "make gateway-fuzz   schemathesis against a real gateway, recorded; arguments in ARGS"
	@echo "make check   formatting, lint, types, import rules"
	@echo "make interface   write what config.pbtxt and README.md files repeat of the interface's tables"
	@echo "make bench   measure against vLLM, llama.cpp and transformers; arguments in ARGS; peers: make bench-peers"
	@echo "make bench-speculation   measure what speculative decoding gains and costs; arguments in ARGS"
	@echo "make bench-observing   measure what it costs to read metrics, to trace requests and to log them; arguments in ARGS"
	@echo "make bench-overlap   measure what steps that overlap are worth behind Triton; arguments in ARGS"
	@echo "make bench-gap   measure what lies between the passes of two steps in the engine; arguments in ARGS"
	@echo "make bench-attention  measure attention over pages beside what the machine reads and multiplies; arguments in ARGS"
	@echo "make bench-first-token   measure what a prompt's first token costs beside the engine's step; arguments in ARGS"
	@echo "make bench-prompt   measure what grows with a prompt's length, beside its steps: time and memory; arguments in ARGS"
	@echo "make bench-control   measure what planning a step costs, by policy, by what happens in it and by what waits; arguments in ARGS"
	@echo "make bench-simulator   measure how far the simulator is from a real server; arguments in ARGS"
	@echo "make bench-stall   measure how long a stream stands still beside long prompts; arguments in ARGS"
	@echo "make bench-flood   flood a server from three tenants, and judge what each got; arguments in ARGS"
	@echo "make bench-policies   simulate every policy on traffic of all kinds; arguments in ARGS"
	@echo "make bench-cache   simulate every policy of eviction on recorded traffic; arguments in ARGS"
	@echo "make bench-prefix   measure what cached prefixes are worth on a real server; arguments in ARGS"
	@echo "make bench-samples   measure what several samples of one prompt cost, beside as many requests; arguments in ARGS"
	@echo "make bench-kv   measure what K and V in fewer bits are worth, and what they lose; arguments in ARGS"
	@echo "make bench-parallel   measure what a second rank is worth; arguments in ARGS"
	@echo "make bench-faults   break the server 300 times while clients call, and judge what they got; arguments in ARGS"
	@echo "make bench-endurance   stop a server 100 times and load its models 100 times, and judge each; arguments in ARGS"
	@echo "make bench-metrics   measure what metrics cost a step; arguments in ARGS"
	@echo "make bench-gateway   measure what the gateway costs beside gRPC; arguments in ARGS"
	@echo "make bench-hostile   attack the server beside a neighbour, and judge what that one noticed; arguments in ARGS"
	@echo "make clean   remove caches and build output; $(VENV) stays"

setup: $(KERNELS)

# Without a C++ compiler torch's operations are used; the command says so, and so does every start.
$(KERNELS): $(STAMP) $(KERNEL_SOURCES)
	@$(BIN)/python -m charonia.data.ops.native.build || true
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@case "$$(uname -s) $$(uname -m)" in "Linux x86_64") ;; *) \
	    echo "charonia: the embedded tritonserver needs Linux on x86-64; this is $$(uname -s) on $$(uname -m)" >&2; exit 1;; esac
	@version="$$(getconf GNU_LIBC_VERSION 2>/dev/null)"; minor="$${version#glibc 2.}"; \
	    if [ "$$minor" = "$$version" ] || [ "$${minor%%.*}" -lt $(MIN_GLIBC_MINOR) ]; then \
	    echo "charonia: the embedded tritonserver needs glibc 2.$(MIN_GLIBC_MINOR) or newer; this is $${version:-another C library}" >&2; exit 1; fi
	@found=; for python in $(PYTHONS); do \
	        if "$$python" -c '$(SUPPORTED_PYTHON)' 2>/dev/null; then found="$$python"; break; fi; done; \
	    if [ -z "$$found" ]; then \
	        echo "charonia: CPython 3.11 or 3.12 is needed, and none of these is one: $(PYTHONS); name it with PYTHON=..." >&2; exit 1; fi; \
	    if [ -x $(BIN)/python ] && $(BIN)/python -c '$(SUPPORTED_PYTHON)' 2>/dev/null; then :; \
	    elif ! "$$found" -m venv --clear $(VENV); then \
	        echo "charonia: $$found cannot make a virtual environment (a distribution may need its python3-venv package)" >&2; exit 1; fi
	@echo "charonia: installing into $(VENV) (minutes, the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@$(BIN)/python -m charonia.launch.server.discovery
	@touch $@

demo: $(KERNELS)
	@$(BIN)/charonia demo

serve: $(KERNELS)
	@$(BIN)/charonia serve --gateway $(ARGS)

test: $(KERNELS)
	$(TESTS) -m "not long and not page and not observe" --cov=charonia.control --cov=charonia.text --cov-branch --cov-report= $(ARGS)
	$(BIN)/coverage report --fail-under 100 --show-missing --skip-covered

test-long: $(KERNELS)
	$(TESTS) -m long --timeout 1200 $(ARGS)

# In a browser of the system's, which is installed if that is permitted; CHROMIUM=... names another.
test-page: $(KERNELS)
	@tests/page/find_chromium >/dev/null
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS),page]'
	CHROMIUM="$$(tests/page/find_chromium)" $(BIN)/python tests/run.py -m page tests/page $(ARGS)

# PROMETHEUS=..., PROMTOOL=... and RSYSLOGD=... name other programs than those on PATH. The tests get
# the names anyway: where one is named, tests that need it fail without it, and are not skipped.
OBSERVE_TESTS := tests/observe tests/metrics/test_prometheus_rules.py \
    tests/e2e/test_metrics.py::test_prometheus_own_linter_finds_nothing_of_ours \
    tests/e2e/test_tracing.py tests/e2e/test_top.py tests/e2e/test_log_level.py \
    tests/metrics/test_dashboard_schema.py
observe-test: $(KERNELS)
	@command -v "$${PROMETHEUS:-prometheus}" >/dev/null && command -v "$${PROMTOOL:-promtool}" >/dev/null || { \
	    echo "charonia: prometheus and promtool are needed (Debian: apt-get install prometheus)" >&2; exit 1; }
	@PATH="$$PATH:/usr/sbin" command -v "$${RSYSLOGD:-rsyslogd}" >/dev/null || { \
	    echo "charonia: rsyslogd is needed (Debian: apt-get install rsyslog)" >&2; exit 1; }
	PROMETHEUS="$${PROMETHEUS:-prometheus}" PROMTOOL="$${PROMTOOL:-promtool}" \
	    $(BIN)/python tests/run.py -m "not long" --capture no $(OBSERVE_TESTS) $(ARGS)
	$(BIN)/python loadtests/observing_bench.py --concurrency 8 --repetitions 5 --turn-seconds 5 --output build/observing

dashboards: $(STAMP)
	$(BIN)/python docker/grafana/dashboards.py

# PROMETHEUS=... names another program than that on PATH.
dashboards-picture: $(KERNELS)
	@$(BIN)/python loadtests/dashboards_picture.py $(ARGS)

# An environment of its own, which also sees the packages of $(VENV).
define make_environment
@$(BIN)/python -m venv --clear --without-pip $(1)
@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
@echo "charonia: installing into $(1) (minutes, the first time)"
@$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --requirement $(2)
endef

$(CLIENTS_STAMP): $(STAMP) tests/clients/requirements.txt tests/clients/package.json tests/clients/package-lock.json
	@for program in node npm; do command -v $$program >/dev/null || { \
	    echo "charonia: $$program is needed (Debian: apt-get install nodejs npm)" >&2; exit 1; }; done
	$(call make_environment,$(CLIENTS),tests/clients/requirements.txt)
	@cd tests/clients && npm ci --no-audit --no-fund --silent
	@touch $@

gateway-clients: $(KERNELS) $(CLIENTS_STAMP)
	@$(CLIENTS)/bin/python loadtests/gateway_clients.py $(ARGS)

$(FUZZER_STAMP): $(STAMP) tests/contract/requirements.txt
	$(call make_environment,$(FUZZER),tests/contract/requirements.txt)
	@touch $@

gateway-fuzz: $(KERNELS) $(FUZZER_STAMP)
	@$(FUZZER)/bin/python loadtests/gateway_fuzz.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m charonia.launch.commands.interface_files --check
	$(BIN)/python -m pytest --quiet tests/test_import_rules.py

interface: $(STAMP)
	@$(BIN)/python -m charonia.launch.commands.interface_files

bench: $(STAMP)
	@$(BIN)/python loadtests/bench.py $(ARGS)

bench-peers: $(STAMP)
	@$(BIN)/python loadtests/setup_peers.py $(ARGS)

bench-speculation: $(STAMP)
	@$(BIN)/python loadtests/speculation_bench.py $(ARGS)

bench-observing: $(KERNELS)
	@$(BIN)/python loadtests/observing_bench.py $(ARGS)

bench-overlap: $(KERNELS)
	@$(BIN)/python loadtests/overlap_bench.py $(ARGS)

bench-gap: $(KERNELS)
	@$(BIN)/python loadtests/gap_bench.py $(ARGS)

bench-attention: $(KERNELS)
	@$(BIN)/python loadtests/attention_bench.py $(ARGS)

bench-first-token: $(KERNELS)
	@$(BIN)/python loadtests/first_token_bench.py $(ARGS)

bench-prompt: $(KERNELS)
	@$(BIN)/python loadtests/prompt_bench.py $(ARGS)

bench-control: $(STAMP)
	@$(BIN)/python loadtests/control_bench.py $(ARGS)

bench-simulator: $(KERNELS)
	@$(BIN)/python loadtests/simulator_bench.py $(ARGS)

bench-stall: $(KERNELS)
	@$(BIN)/python loadtests/stall_bench.py $(ARGS)

bench-flood: $(KERNELS)
	@$(BIN)/python loadtests/flood_bench.py $(ARGS)

bench-policies: $(STAMP)
	@$(BIN)/python loadtests/policy_bench.py $(ARGS)

bench-cache: $(STAMP)
	@$(BIN)/python loadtests/cache_bench.py $(ARGS)

bench-prefix: $(KERNELS)
	@$(BIN)/python loadtests/prefix_bench.py $(ARGS)

bench-samples: $(KERNELS)
	@$(BIN)/python loadtests/samples_bench.py $(ARGS)

bench-kv: $(KERNELS)
	@$(BIN)/python loadtests/kv_bench.py $(ARGS)

bench-parallel: $(KERNELS)
	@$(BIN)/python loadtests/parallel_bench.py $(ARGS)

bench-faults: $(KERNELS)
	@$(BIN)/python loadtests/fault_campaign.py $(ARGS)

bench-endurance: $(KERNELS)
	@$(BIN)/python loadtests/endurance_run.py $(ARGS)

bench-metrics: $(KERNELS)
	@$(BIN)/python loadtests/metrics_bench.py $(ARGS)

bench-gateway: $(KERNELS)
	@$(BIN)/python loadtests/gateway_bench.py $(ARGS)

bench-hostile: $(KERNELS)
	@$(BIN)/python loadtests/hostile.py $(ARGS)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -path './.venv*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -print0 | xargs -0 rm -rf
