# hybridpar: `make help` lists the targets. Each says what it does; all may be interrupted and repeated.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := envs/lock.txt
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SNAKEMAKE := $(BIN)/snakemake --workflow-profile envs/profiles/local --quiet rules
export HF_HUB_OFFLINE := 1

.PHONY: help env study smoke replot test test-slow lint bench lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1 \t\2/' | expand -t 20

env: $(READY) ## build .venv from the lock (2 to 4 minutes once), with the hybridpar command in it

$(READY): $(LOCK) envs/build.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "hybridpar needs Python 3.11 or newer, and there is no $(PYTHON). Name one: make env PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hybridpar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Name one: make env PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "set-up 1/4: $(VENV), from $(LOCK); 2 to 4 minutes in all, about 2 GB"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) -r envs/build.txt
	@echo "set-up 2/4: torch"; $(PIP) "$$(grep -E '^torch==' $(LOCK))"
	@echo "set-up 3/4: everything else, 1 to 3 minutes"; $(PIP) --no-build-isolation -r $(LOCK)
	@echo "set-up 4/4: hybridpar"; $(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "set-up: done; try $(BIN)/hybridpar --help"

study: $(READY) ## the default CPU study, to figures, notebooks, report.html and paper/paper.pdf (under an hour on 2 cores)
	@echo "study: real jobs on this machine; progress below, results in data/runs, safe to interrupt and repeat"
	@$(BIN)/hybridpar preflight data/studies/study.yaml
	@$(SNAKEMAKE) --config study=study
	@echo "study: done: report.html, paper/paper.pdf, figures/study, notebooks/executed/study, data/tables/study"

smoke: $(READY) ## the short version: every strategy and family once (a few minutes)
	@echo "smoke: real jobs on toy models; progress below, safe to interrupt and repeat"
	@$(BIN)/hybridpar preflight data/studies/smoke.yaml
	@$(SNAKEMAKE) --config study=smoke
	@echo "smoke: done: report.html, paper/paper.pdf, figures/smoke, notebooks/executed/smoke, data/tables/smoke"

replot: $(READY) ## notebooks, figures, report and paper again from the runs of the study that are there
	@$(SNAKEMAKE) --config study=$${STUDY:-study} --forcerun tables

test: $(READY) ## the tests (several minutes on 2 cores)
	@echo "test: specifications of every module, real forked ranks included"
	@$(BIN)/pytest -m "not slow"

test-slow: $(READY) ## the tests that `make test` leaves out
	@$(BIN)/pytest -m slow --timeout 1800

lint: $(READY) ## ruff, mypy, snakefmt, snakemake's lint
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/snakefmt --check Snakefile src/rules
	@$(BIN)/snakemake --lint

bench: $(READY) ## one-device tokens/s beside transformers' Llama and Mamba-2 (not a test)
	@$(BIN)/python tests/bench/bench_one_device.py --out data/bench/one-device.json

lock: $(READY) ## write envs/lock.txt and envs/conda.yml anew from pyproject.toml
	@$(BIN)/pip-compile --quiet --extra dev --output-file $(LOCK) --strip-extras --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --no-emit-options --no-build-isolation --no-header pyproject.toml
	@sed -i -E 's/^(torch==[0-9.]+)\+.*/\1/' $(LOCK)  # the index decides between the CPU and the CUDA build
	@{ sed '/- pip:/q' envs/conda.yml; grep -E '^[a-z0-9]' $(LOCK) | sed -E 's/ *[;#].*//; s/^/      - /'; } > envs/conda.yml.part
	@mv envs/conda.yml.part envs/conda.yml

clean: ## remove results of studies and caches; keeps .venv and the corpus
	@rm -rf data/runs data/batches data/tables data/bench data/logs figures/*/ notebooks/executed paper/generated \
	  paper/paper.pdf report.html .snakemake
