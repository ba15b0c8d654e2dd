# The front door: `make help` lists what there is. On a machine with GPUs and Docker commands run in a container, elsewhere
# in .venv, which is set up on first use; docker/front.sh decides which, says so, and does it.

RECIPE ?= quickstart
ARGS ?=
PYTHON ?= python3
WORKERS ?= 2

# What .venv is made for: front.sh says which generation; `make setup` leaves it at what it is.
VENV_GENERATION ?= $(or $(file < .venv/.generation),cpu)
LOCKS := $(wildcard docker/$(VENV_GENERATION)/requirements*.lock) docker/requirements-build.lock pyproject.toml \
	docker/setup_venv.sh docker/install_lock.sh
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev
FRONT := @exec docker/front.sh
SCRIPTS := $(wildcard .ci/* docker/*.sh)

# Make takes any NAME=VALUE in silence: `recipe=mine` would train the default, and `training.seed=1` change nothing. No name
# that means something here has a small letter, but those that libraries read from the environment (http_proxy).
NAMES := RECIPE ARGS WHERE GPU GPUS DATA REGISTRY BASE_IMAGE CA PIP_CONF APT_CONF WHEELS NETWORK PYTHON WORKERS
SMALL := a b c d e f g h i j k l m n o p q r s t u v w x y z
TYPED := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
has_small = $(strip $(foreach letter,$(SMALL),$(findstring $(letter),$(1))))
IGNORED := $(foreach name,$(filter-out %_proxy,$(TYPED)),$(if $(call has_small,$(name)),$(name)))
ifneq ($(strip $(IGNORED)),)
NAME := $(firstword $(IGNORED))
MEANT := $(filter $(shell echo '$(NAME)' | tr a-z A-Z),$(NAMES))
TOLD := $(if $(MEANT),$(MEANT)="$(value $(NAME))",ARGS="$(NAME)=$(value $(NAME))")
$(error $(NAME)=$(value $(NAME)) would be ignored. Type $(TOLD))
endif

# What is typed after make reaches front.sh through the environment, all but ARGS, which make would expand on the way.
export PYTHON
unexport ARGS

.DEFAULT_GOAL := help
.PHONY: help train plan data eval fetch chat sweep export report verify list explain doctor env image push pull \
	check lint format type test test-torchao test-system test-slow setup lock clean-venv

help:  ## This list
	@printf 'make TARGET [RECIPE=%s] [ARGS="..."] [WHERE=...] [GPU=...] [GPUS=...]\n\n' '$(RECIPE)'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo; printf '%s\n' 'ARGS are overrides and options: make train ARGS="training.seed=1 optimizer.learning_rate=3e-4"' \
	  'WHERE: container, local (.venv) or auto: a container where Docker works and a GPU is found or GPU is given' \
	  'GPU: the image, auto (for the GPUs here), cpu, volta, turing, ampere, ada, hopper or blackwell; GPUS: how many'

# ARGS goes through `value` and unquoted: make expands nothing in it, the shell splits it, and quotes inside it hold.
# Where ARGS may name what RECIPE does, RECIPE is there only if it is typed, or nothing is.
RECIPE_OR_ARGS = $(if $(filter-out file,$(origin RECIPE)),$(RECIPE),$(if $(value ARGS),,$(RECIPE))) $(value ARGS)

train:  ## Train RECIPE, evaluate it and write its report; ARGS=--dry-run only shows what would run
	$(FRONT) run train $(RECIPE) $(value ARGS)

plan:  ## What RECIPE would take: batch, memory per GPU, time; ARGS=--json for programs
	$(FRONT) run plan $(RECIPE) $(value ARGS)

data:  ## Prepare RECIPE's data and show samples, lengths and what was cut
	$(FRONT) run data $(RECIPE) $(value ARGS)

eval:  ## Evaluate the newest finished run, RECIPE's if it is given, or another: ARGS="run=outputs/quickstart/<time>"
	$(FRONT) run eval $(if $(filter-out file,$(origin RECIPE)),run=$(RECIPE)) $(value ARGS)

fetch:  ## Download what RECIPE needs, to work without a network later; only a suite's data: ARGS=suite=leaderboard
	$(FRONT) run fetch $(RECIPE_OR_ARGS)

chat:  ## Talk to RECIPE's newest run; ARGS="--prompt 'Hello'" for one answer
	$(FRONT) run chat $(RECIPE) $(value ARGS)

sweep:  ## Train RECIPE once per combination of ARGS="key=a,b key=c,d" and rank the results
	$(FRONT) run sweep $(RECIPE) $(value ARGS)

export:  ## Write RECIPE's newest run as one Hugging Face folder; ARGS="--checkpoint 40 --merge --dtype bf16 --to DIR"
	$(FRONT) run export $(RECIPE) $(value ARGS)

report:  ## Write the report of RECIPE's newest run again, or of others: ARGS="RUN RUN"
	$(FRONT) run report $(RECIPE_OR_ARGS)

verify:  ## Compare RECIPE's newest run with the recipe's evidence, or another: ARGS=RUN
	$(FRONT) run verify $(RECIPE_OR_ARGS)

list:  ## The recipes, with their hardware and strategy
	$(FRONT) run list $(value ARGS)

explain:  ## What a rule or an error means and what to do: ARGS=<its id>, or all of them
	$(FRONT) run explain $(or $(value ARGS),all)

doctor:  ## Look at GPUs, driver, links, disks and limits, and at what RECIPE needs of them; ARGS=--json for programs
	$(FRONT) run doctor $(RECIPE) $(value ARGS)

env:  ## Find the GPUs, pick the image and write .env; every target that uses a container does this
	$(FRONT) env

image:  ## Build the image for the GPUs here, or for others: GPU=hopper
	$(FRONT) image

push:  ## Publish the images that are built: REGISTRY=host/path
	$(FRONT) push

pull:  ## Take the image from where it was published, instead of building it
	$(FRONT) pull

check: lint type test  ## Everything CI runs but the system tests, in CI's order (no GPU needed)

lint: $(DEV_READY)  ## Style of Python, YAML and shell; changes nothing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/yamllint --strict .
	.venv/bin/lint-imports --no-cache --no-logo
	.venv/bin/shellcheck -xa $(SCRIPTS)

format: $(DEV_READY)  ## Mend what can be mended by itself
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

type: $(DEV_READY)  ## Types, strict for src
	.venv/bin/mypy

# One thread per process: two processes of two threads each are slower on two cores than two of one.
test: $(DEV_READY)  ## The tests that need no GPU, engine or cluster; ARGS="tests/data -x"
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile $(value ARGS)

# torchao lies beside .venv, not in it: transformers imports it wherever it is installed.
TORCHAO = $(CURDIR)/.cache/torchao
FP8_TESTS = tests/model/test_fp8_layers.py tests/parallel/test_fp8_sharded.py tests/train/test_fp8.py

test-torchao: $(DEV_READY)  ## The tests of fp8, which computes on a CPU what a GPU would; fetches torchao by the lock
	mkdir -p $(TORCHAO)
	sed -n '/^torchao==/,/# via/p' docker/hopper/requirements.lock > $(TORCHAO).txt
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes --upgrade --target $(TORCHAO) -r $(TORCHAO).txt
	OMP_NUM_THREADS=1 PYTHONPATH=$(TORCHAO) .venv/bin/python -m pytest $(FP8_TESTS) $(value ARGS)

# Side by side as tests/system/conftest.py deals them out; threads are left to the user's default there.
SYSTEM_TESTS = .venv/bin/python -m pytest $(if $(findstring tests/,$(filter-out --%,$(value ARGS))),,tests/system)

test-system: $(DEV_READY)  ## The tests that use the project as a whole, as its users do
	$(SYSTEM_TESTS) -m "system and not slow" -n $(WORKERS) --durations=40 $(value ARGS)

# 5: ARGS names tests of the one kind only.
test-slow: $(DEV_READY)  ## Those that take long and that few changes concern, for a nightly run
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m nightly -n $(WORKERS) --dist loadfile $(value ARGS) || test $$? = 5
	$(SYSTEM_TESTS) -m "system and slow" $(value ARGS) || test $$? = 5

setup: $(DEV_READY)  ## Set up .venv for development, or bring it up to date with the locks

lock:  ## Write the locks again after a change of an .in file in docker/; ARGS=--upgrade or --check
	$(PYTHON) docker/make_locks.py $(value ARGS)

clean-venv:  ## Remove .venv; the next target sets it up again
	@docker/setup_venv.sh remove

$(RUN_READY): $(LOCKS)
	docker/setup_venv.sh run $(VENV_GENERATION)
	@touch $@

$(DEV_READY): $(LOCKS) docker/requirements-dev.lock
	docker/setup_venv.sh dev $(VENV_GENERATION)
	@touch $(RUN_READY) $@
