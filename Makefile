# The two commands of a new user are `make demo` and `make test`; every target makes its environment itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready
DOCTORS := .venv-doctors
DOCTORS_READY := $(DOCTORS)/.ready
MUTANTS := .venv-mutants
MUTANTS_READY := $(MUTANTS)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage test-slow test-peers doctors mutants lint format docs pictures bench results peers clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Refreshed whenever the declared dependencies change; the stamp is written last, so a broken install is repeated.
$(READY): pyproject.toml constraints.txt
	@echo "Preparing $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

setup: $(READY) ## create or refresh .venv, nothing else

demo: $(READY) ## the main job: train CartPole-v1 inside an exact trust region
	@start=$$(date +%s); \
	$(BIN)/keel train CartPole-v1 && \
	echo "demo: done in $$(( $$(date +%s) - start )) s; next: $(BIN)/keel --help, $(BIN)/keel explain kl"

test: $(READY) ## the whole suite, under ten minutes on two cores
	@$(BIN)/python -m pytest -n 2 --dist worksteal --durations=30 --durations-min=5 tests

coverage: $(READY) ## the same, with the lines that no test reaches (slower)
	@$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered tests

test-slow: $(READY) ## the long tests, marked `slow`
	@$(BIN)/python -m pytest -m slow tests

test-peers: $(READY) $(PEERS_READY) ## tests beside real trainers: Stable-Baselines3, TRL (minutes)
	@KEEL_PEERS=$(CURDIR)/$(PEERS)/bin/python $(BIN)/python -m pytest tests/peers

mutants: $(READY) $(MUTANTS_READY) ## small changes of the mathematics that no test notices (ONLY=functional/reduce SAMPLE=40)
	@$(BIN)/python tests/mutants/run.py --tool $(MUTANTS)/bin --only "$(ONLY)" $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(AGAIN),--again)

$(MUTANTS_READY): tests/mutants/requirements.txt
	@echo "Preparing $(MUTANTS) ..."
	@test -x $(MUTANTS)/bin/python || $(PYTHON) -m venv $(MUTANTS)
	@$(MUTANTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/mutants/requirements.txt
	@touch $@

lint: $(READY) ## ruff format check, ruff, mypy strict
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## let ruff write the format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(READY) ## build the documentation into site/, strictly
	@out=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$out"; exit 1; } # --quiet would hide warnings from --strict
	@echo "site/index.html"

pictures: $(READY) ## draw the pictures of the README and of a trust region again (needs tmux; minutes)
	@rm -rf build/pictures
	@$(BIN)/keel train HalfCheetah-v5 --seed 2 --runs build/pictures --name five
	@cp build/pictures/five/seed-2/trust-region.png docs/images/halfcheetah-trust-region.png
	@$(BIN)/python -m benchmarks.live_picture

bench: $(READY) $(PEERS_READY) ## side by side with peers, in one run
	@$(PEERS)/bin/python -m benchmarks

results: $(READY) $(PEERS_READY) ## measure every figure of docs/results.md again (hours)
	@$(BIN)/python -m benchmarks.results all

doctors: $(DOCTORS_READY) ## the third environment, with other tools that read symptoms

$(DOCTORS_READY): benchmarks/doctor_peers.txt
	@echo "Preparing $(DOCTORS) ..."
	@test -x $(DOCTORS)/bin/python || $(PYTHON) -m venv $(DOCTORS)
	@$(DOCTORS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/doctor_peers.txt
	@touch $@

peers: $(PEERS_READY) ## the second environment, where the peers live

$(PEERS_READY): benchmarks/peers.txt pyproject.toml
	@echo "Preparing $(PEERS) ..."
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt -e .
	@touch $@

clean: ## remove what can be made again
	rm -rf $(VENV) $(PEERS) $(MUTANTS) $(DOCTORS) site docs/generated build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
