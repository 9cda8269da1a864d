# Trainyard: make demo · make test · make lab · make lint. `make help` lists all.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help
help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# The stamps make each step run once per change of its lock.
$(VENV)/.controller: requirements/controller.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements/controller.txt
	touch $@

$(VENV)/.dev: $(VENV)/.controller requirements/dev.txt requirements/torch.txt
	$(PIP) --require-hashes -r requirements/dev.txt
	$(PIP) -r requirements/torch.txt
	touch $@

.PHONY: venv dev lock
venv: $(VENV)/.controller ## the controller's own environment, in .venv
dev: $(VENV)/.dev ## with what the tests need

lock: $(VENV)/.dev ## resolve requirements/*.in anew, for Python 3.11 to 3.13, with hashes
	for name in controller trainer dev; do \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-annotate --no-header -c requirements/dev.txt requirements/$$name.in -o requirements/$$name.txt; \
	done
