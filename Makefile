# Every target sets up what it needs. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format golden proto crds docs test-engine test-gpu clean

# Relative paths only: the checkout's own path may hold spaces.
PYTHON := .venv/bin/python
STAMP := .venv/.kvpool-stamp
# The stamp names the folder that it was made in: a checkout that was moved or copied sets itself up anew.
ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(STAMP)
endif
export PYTHONUNBUFFERED := 1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with everything that the other targets use

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	@bash tools/setup.sh

demo: $(STAMP) ## two nodes share a KV cache on this machine, every byte checked, then a fault
	@$(PYTHON) -m kvpool_wire.cli demo

test: $(STAMP) ## all tests that need no GPU and no cluster; ARGS="-k name" picks some
	@$(PYTHON) -m pytest tests/unit tests/property tests/integration $(ARGS)

lint: $(STAMP) ## style, types, import contracts, generated files, spelling
	@$(PYTHON) -m ruff check --output-format concise .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(PYTHON) -c 'from importlinter.cli import lint_imports_command as main; main()' --cache-dir .cache/import-linter
	@$(PYTHON) tools/gen_proto.py --check
	@$(PYTHON) tools/gen_crds.py --check
	@$(PYTHON) -m codespell_lib

format: $(STAMP) ## let ruff mend what it can
	@$(PYTHON) -m ruff check --fix --quiet --exit-zero .
	@$(PYTHON) -m ruff format .

golden: $(STAMP) ## replay coordinator vectors: make golden FILE=path
	@test -n "$(FILE)" || { echo "golden: name the vectors: make golden FILE=path" >&2; exit 2; }
	@$(PYTHON) -m kvpool_agent.golden "$(FILE)"

proto: $(STAMP) ## compile agent.proto into the committed descriptor set and its typed stub
	@$(PYTHON) tools/gen_proto.py

crds: $(STAMP) ## write the custom resource definitions and their reference page from the operator's models
	@$(PYTHON) tools/gen_crds.py

docs: $(STAMP) ## check the documentation: links, indexes, decisions
	@$(PYTHON) -m pytest -q tests/unit/docs

test-engine: $(STAMP) ## two vLLM engines on two agents share KV, with faults; makes .venv-engine
	@bash tools/setup_engine.sh
	@$(PYTHON) -m pytest tests/engine $(ARGS)

test-gpu: $(STAMP) ## try the CUDA pool on this machine's GPU (under five minutes)
	@bash tests/gpu/run.sh

clean: ## remove caches and build results, and .venv with them
	@rm -rf .venv .venv-engine .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist ./*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
