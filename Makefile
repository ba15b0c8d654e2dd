# The front door: `make help` lists what there is. Everything runs in .venv, which is set up on first use.

RECIPE ?= quickstart
ARGS ?=
PYTHON ?= python3
WORKERS ?= 2

LOCKS := docker/cpu/requirements.lock docker/cpu/requirements-build.lock docker/cpu/requirements-cuda.lock \
	docker/cpu/requirements-torch-cpu.lock pyproject.toml docker/cpu/setup_venv.sh
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev
TUNEBOOK := .venv/bin/tunebook
SCRIPTS := .ci/run docker/cpu/setup_venv.sh

.DEFAULT_GOAL := help
.PHONY: help train data eval sweep report list explain \
	check lint format type test test-system setup lock clean-venv

help:  ## This list
	@printf 'make TARGET [RECIPE=%s] [ARGS="..."]\n\n' '$(RECIPE)'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\n%s\n' 'ARGS are overrides and options: make train ARGS="training.seed=1 optimizer.learning_rate=3e-4"'

# ARGS goes through `value` and unquoted: make expands nothing in it, the shell splits it, and quotes inside it hold.
train: $(RUN_READY)  ## Train RECIPE, evaluate it and write its report; ARGS=--dry-run only shows what would run
	$(TUNEBOOK) train $(RECIPE) $(value ARGS)

data: $(RUN_READY)  ## Prepare RECIPE's data and show samples, lengths and what was cut
	$(TUNEBOOK) data $(RECIPE) $(value ARGS)

eval: $(RUN_READY)  ## Evaluate RECIPE's newest run, or another: ARGS="run=outputs/quickstart/<time>"
	$(TUNEBOOK) eval run=$(RECIPE) $(value ARGS)

sweep: $(RUN_READY)  ## Train RECIPE once per combination of ARGS="key=a,b key=c,d" and rank the results
	$(TUNEBOOK) sweep $(RECIPE) $(value ARGS)

report: $(RUN_READY)  ## Write the report of RECIPE's newest run again, or of others: ARGS="RUN RUN"
	$(TUNEBOOK) report $(or $(value ARGS),$(RECIPE))

list: $(RUN_READY)  ## The recipes, with their hardware and strategy
	$(TUNEBOOK) list $(value ARGS)

explain: $(RUN_READY)  ## What a rule or an error means and what to do: ARGS=<its id>, or all of them
	$(TUNEBOOK) explain $(or $(value ARGS),all)

check: lint type test  ## Everything CI runs but the system tests, in CI's order (no GPU needed)

lint: $(DEV_READY)  ## Style of Python, YAML and shell; changes nothing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/yamllint --strict .
	.venv/bin/shellcheck $(SCRIPTS)

format: $(DEV_READY)  ## Mend what can be mended by itself
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

type: $(DEV_READY)  ## Types, strict for src
	.venv/bin/mypy

# One thread per process: two processes of two threads each are slower on two cores than two of one.
test: $(DEV_READY)  ## The tests that need no GPU, engine or cluster; ARGS="tests/data -x"
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile $(value ARGS)

test-system: $(DEV_READY)  ## The tests that use the project as a whole, as its users do
	.venv/bin/python -m pytest -m system tests/system $(value ARGS)

setup: $(DEV_READY)  ## Set up .venv for development, or bring it up to date with the locks

lock:  ## Write the locks again after a change of docker/cpu/*.in; ARGS=--upgrade for newer versions
	$(PYTHON) docker/make_locks.py $(value ARGS)

clean-venv:  ## Remove .venv; the next target sets it up again
	rm -rf .venv

$(RUN_READY): $(LOCKS)
	PYTHON=$(PYTHON) docker/cpu/setup_venv.sh run
	@touch $@

$(DEV_READY): $(LOCKS) docker/cpu/requirements-dev.lock
	PYTHON=$(PYTHON) docker/cpu/setup_venv.sh dev
	@touch $(RUN_READY) $@
