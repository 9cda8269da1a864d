# Trainyard: make demo · make test · make lab · make lint. `make help` lists all.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
DOCS_VENV := .venv-docs
# What a machine tells pip for all that it installs (pip.conf, NVIDIA's containers) is not for what is locked.
export PIP_USER := 0
export PIP_CONSTRAINT := /dev/null
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Named, so that it holds in a directory that others may write to, too, where Ansible would pass ansible.cfg over.
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
# Ansible starts in no other locale.
ANSIBLE := $(if $(filter UTF-8,$(shell locale charmap 2>/dev/null)),,LC_ALL=C.UTF-8) $(BIN)/ansible-playbook

.PHONY: help
help: ## what there is
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# ---- the environments; the stamps make each step run once per change of its lock ----

$(VENV)/.controller: requirements/controller.txt
	@python=$$(PYTHON="$(PYTHON)" PYTHON_URL="$(PYTHON_URL)" scripts/find-python); \
	  echo "Making .venv for Ansible with $$python (once; about half a minute)"; \
	  "$$python" -m venv $(VENV)
	@$(PIP) --no-deps --require-hashes -r requirements/controller.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.controller requirements/dev.txt requirements/torch.txt
	@echo "Adding to .venv what the tests need, torch too (once; some minutes)"
	@$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	@$(PIP) -r requirements/torch.txt
	@touch $@

.PHONY: venv dev lock
venv: $(VENV)/.controller ## the controller's own environment, in .venv
dev: $(VENV)/.dev ## with what the tests need

# Apart from .venv: what the trainer is compared with must not come near its tests.
$(BENCH_VENV)/.complete: requirements/bench.txt requirements/torch.txt
	@python=$$(PYTHON="$(PYTHON)" PYTHON_URL="$(PYTHON_URL)" scripts/find-python); \
	  echo "Making $(BENCH_VENV) for the benchmarks with $$python (once; some minutes)"; \
	  "$$python" -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements/bench.txt
	@$(BENCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check -r requirements/torch.txt
	@touch $@

# Apart, too: who trains needs none of it.
$(DOCS_VENV)/.complete: requirements/docs.txt
	@python=$$(PYTHON="$(PYTHON)" PYTHON_URL="$(PYTHON_URL)" scripts/find-python); \
	  echo "Making $(DOCS_VENV) for the site with $$python (once; less than a minute)"; \
	  "$$python" -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

lock: $(VENV)/.dev ## resolve requirements/*.in anew, for Python 3.11 to 3.13, with hashes
	for name in controller trainer dev bench docs; do \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-annotate --no-header --override requirements/apart.txt --no-emit-package torch -c requirements/dev.txt requirements/$$name.in -o requirements/$$name.txt; \
	done

# ---- the demo ----

# What a small model learns in two or three minutes on two cores.
DEMO := -e model=tiny -e dataset=austen -e sequence_length=128 -e batch_size=8 -e steps=1000 -e lr=0.002 -e warmup_steps=100

.PHONY: demo show compare
demo: name := $(or $(RUN),demo-$(shell date +%Y%m%d-%H%M%S))
demo: $(VENV)/.controller ## train a small model on this machine, as two nodes, without root, and show it
	$(ANSIBLE) -i inventory/local site.yml
	$(ANSIBLE) -i inventory/local train.yml $(DEMO) -e run=$(name)
	@.trainyard/node1/opt/current/bin/trainer generate runs/$(name) --prompt "Captain Wentworth" > runs/$(name)/sample.txt
	@$(BIN)/python scripts/write_report.py runs/$(name) > /dev/null
	@$(BIN)/python scripts/show_run.py runs/$(name) --below-unigram 1.5

show: $(VENV)/.controller ## show the newest run in runs/, or RUN=name
	@$(BIN)/python scripts/show_run.py $(addprefix runs/,$(RUN))

compare: $(VENV)/.controller ## one page and one table of several runs: RUNS="first second"
	@[[ -n "$(RUNS)" ]] || { echo 'make compare RUNS="first second": which runs of runs/?'; exit 2; }
	@$(BIN)/python scripts/write_report.py $(addprefix runs/,$(RUNS))

# ---- the tests ----

.PHONY: test lint
test: export TRAINYARD_INSTALL := 1
test: export TRAINYARD_FULL := $(filter-out 0,$(FULL))
test: $(VENV)/.dev ## every layer of tests that this machine can run, or LAYERS="unit distributed"; FULL=1: the long ones too
	@$(BIN)/python tests/run.py $(LAYERS)

lint: $(VENV)/.dev ## ruff, yamllint, ansible-lint, bash -n, and the house's own rules
	@$(BIN)/python tests/run.py lint

.PHONY: faults
faults: $(VENV)/.dev ## what happens to machines in a cupboard, on real hosts: the whole matrix, with times; needs root
	@TRAINYARD_INSTALL=1 TRAINYARD_FULL=1 TRAINYARD_LAB_WEIGHT=2 $(BIN)/python -m pytest -q -s tests/distributed/test_recovery.py tests/faults

.PHONY: check
check: ## everything that can be checked, for hours: test FULL=1, faults, docs-site, one short round of bench; as root
	@$(MAKE) --no-print-directory test FULL=1
	@$(MAKE) --no-print-directory faults
	@$(MAKE) --no-print-directory docs-site
	@$(MAKE) --no-print-directory bench QUICK=1

.PHONY: docs docs-site links pictures
docs: $(VENV)/.controller ## write docs/variables.md and the checks in docs/preflight.md anew, from the specs and the code
	@$(BIN)/python scripts/write_variables.py
	@$(BIN)/python scripts/write_checks.py

docs-site: $(DOCS_VENV)/.complete ## the documents as a site, in build/site; a link that leads nowhere fails
	@rm -rf build/site
	@$(DOCS_VENV)/bin/python -m sphinx -q -E --fail-on-warning --keep-going -b html -c docs -d build/site.cache . build/site
	@echo "Site        build/site/index.html"

links: $(DOCS_VENV)/.complete ## whether the documents' links to other sites still lead somewhere; needs the internet, so CI does not
	@$(DOCS_VENV)/bin/python -m sphinx -q -E --keep-going -b linkcheck -c docs -d build/links.cache . build/links
	@echo "Links       build/links/output.txt"

pictures: $(VENV)/.dev ## take the demo's and the report's pictures anew, from a real make demo: some minutes; needs chromium
	@$(BIN)/python scripts/take_pictures.py

# ---- the benchmarks ----

# The tables of the trainer alone unless TABLES names others: those of a lab, and site, slow and simulate.
LAB_TABLES := $(filter balance slowed wire,$(TABLES))
OTHERS := $(filter site slow simulate,$(TABLES))
OWN_TABLES := $(filter-out $(LAB_TABLES) $(OTHERS),$(TABLES))

.PHONY: bench bench-trainer bench-cluster bench-site bench-slow bench-simulate
bench: $(if $(OWN_TABLES)$(if $(TABLES),,all),bench-trainer) $(if $(LAB_TABLES),bench-cluster) $(OTHERS:%=bench-%) ## the trainer beside its peers, and its strategies: a quarter of an hour, or TABLES="equal"; QUICK=1: does it run? TABLES="wire site", too: those of the next four

bench-trainer: $(BENCH_VENV)/.complete
	@$(BENCH_VENV)/bin/python -m bench $(if $(filter-out 0,$(QUICK)),--quick) $(OWN_TABLES)

bench-cluster: $(VENV)/.dev ## mismatched hosts and slow links, on three hosts of a lab: TABLES="balance slowed wire"; QUICK=1; needs root
	@$(BIN)/python -m bench.cluster $(if $(filter-out 0,$(QUICK)),--quick) $(if $(filter bench,$(MAKECMDGOALS)),$(LAB_TABLES),$(TABLES))

bench-site: $(VENV)/.dev ## site.yml's seconds, first and second run, beside a bare shell script: on 3 and 16 lab hosts, or HOSTS=3; needs root
	@$(BIN)/python -m bench.site $(if $(filter command line,$(origin HOSTS)),$(HOSTS))

bench-slow: $(VENV)/.dev ## what lossy ways cost in validation loss, over seeds: hours, goes on where Ctrl-C ended it; TABLE=1: what has ended so far
	@$(BIN)/python -m bench.slow $(if $(filter-out 0,$(TABLE)),--table)

bench-simulate: $(VENV)/.dev ## three unlike machines on gigabit Ethernet, and 1,000 of them, by every way; CHECK=runs/bench-cluster.json: beside what was measured
	@$(BIN)/python -m bench.simulate $(if $(CHECK),--check $(CHECK))

# ---- what watches ----

.PHONY: dashboard
dashboard: $(VENV)/.controller ## the page of the group monitoring, through SSH: INVENTORY=inventory/home; Ctrl-C ends it
	@$(BIN)/python scripts/dashboard.py $(if $(INVENTORY),-i $(INVENTORY)) $(if $(PORT),--port $(PORT))

# ---- the lab ----

# Root builds the lab and its inventory; the name of the variable is the option's.
HOSTS ?= 3
SUITE ?=
LAB ?=
PYTHON3 := $(or $(PYTHON),python3)

.PHONY: lab lab-demo lab-down
lab: ## real systemd hosts here: HOSTS=3 SUITE=trixie LAB="--offline …"; needs root
	@LAB_TYPED="make lab HOSTS=$(HOSTS)" $(PYTHON3) -m lab up --install --hosts $(HOSTS) $(if $(SUITE),--suite $(SUITE)) $(LAB)

# A run of some hours, so that there is one to look at; lab-down ends it.
lab-demo: INVENTORY := $(or $(INVENTORY),inventory/lab)
lab-demo: $(VENV)/.controller ## from make lab to a run that the dashboard shows: site.yml with the group monitoring, and a run left to itself
	@[[ -d "$(INVENTORY)" ]] || { echo "$(INVENTORY): no such directory; expected a lab's inventory. Build one: make lab"; exit 2; }
	@echo 'monitoring: {hosts: {node1: {}}}' > "$(INVENTORY)/monitoring.yml"
	$(ANSIBLE) -i "$(INVENTORY)" site.yml
	$(ANSIBLE) -i "$(INVENTORY)" train.yml $(DEMO) -e steps=50000 -e checkpoint_every=500 -e metrics_port=9200 -e run=demo -e detach=true
	@echo "Look at it: make dashboard INVENTORY=$(INVENTORY)"

lab-down: ## take them down, or those of LAB="--name N"; nothing of them stays
	@LAB_TYPED="make lab-down" $(PYTHON3) -m lab down $(LAB)

# ---- tidying up ----

.PHONY: clean
clean: ## remove what was generated here; runs, those on nodes of this machine too, and labs stay
	rm -rf $(VENV) $(BENCH_VENV) $(DOCS_VENV) .ansible .pytest_cache .ruff_cache build *.egg-info
	[[ ! -d .trainyard ]] || find .trainyard -mindepth 1 -maxdepth 1 ! -name labs -exec find {} \( -not -type d -o -empty \) \
	  -not -path '.trainyard/*/var/runs*' -not -path '.trainyard/*/etc/runs*' -delete \;
	[[ ! -d .trainyard ]] || rmdir --ignore-fail-on-non-empty .trainyard
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
