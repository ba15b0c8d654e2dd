# `make help` lists the targets. On a machine with GPUs and Docker commands run in a container, elsewhere in .venv,
# which is set up on first use; docker/front.sh decides which, prints it, and does it.

RECIPE ?= quickstart
ARGS ?=
PYTHON ?= python3
WORKERS ?= 2
FRONT := @exec docker/front.sh

# Make silently accepts any NAME=VALUE: `recipe=mine` would train the default, and `training.seed=1` change nothing. No
# variable of this file has a small letter in its name, and none of a library except such as http_proxy.
TYPED := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),'$(name)'))
IGNORED := $(if $(TYPED),$(shell printf '%s\n' $(TYPED) | grep '[a-z]' | grep -vm 1 '_proxy$$'))
ifneq ($(IGNORED),)
$(error $(IGNORED)=$(value $(IGNORED)) would be ignored: make's own variables are in capital letters, and overrides \
  belong into ARGS="$(IGNORED)=$(value $(IGNORED))")
endif

# `make train mine` would train the default recipe, and then find no target `mine`.
NO_TARGETS := $(filter-out $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST))),$(MAKECMDGOALS))
ifneq ($(NO_TARGETS),)
$(error $(NO_TARGETS) is no target: a recipe or data is RECIPE=$(firstword $(NO_TARGETS)), all else belongs into ARGS="...")
endif

# What is typed after make reaches front.sh through the environment, except ARGS, which make would expand on the way.
export PYTHON
unexport ARGS

.DEFAULT_GOAL := help
.PHONY: help train plan data eval fetch chat sweep export report verify list explain doctor env image push publish pull \
	check lint format type test test-torchao test-system test-slow golden docs setup lock clean-venv

help:  ## This list
	@printf 'make TARGET [RECIPE=%s] [ARGS="..."] [WHERE=...] [GPU=...] [GPUS=...]\n\n' '$(RECIPE)'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo; printf '%s\n' 'ARGS are overrides and options: make train ARGS="training.seed=1 optimizer.learning_rate=3e-4"' \
	  'WHERE: container, local (.venv) or auto: a container where Docker works and a GPU is found or GPU is given' \
	  'GPU: the image, auto (for the GPUs here), cpu, volta, turing, ampere, ada, hopper or blackwell; GPUS: how many'

# ARGS goes through `value` and unquoted: make expands nothing in it, the shell splits it, and quotes inside it hold.
train:  ## Train RECIPE, evaluate it and write its report; ARGS=--dry-run only shows what would run
plan:  ## What RECIPE would take: batch, memory per GPU, time; ARGS=--json for programs
data:  ## Prepare RECIPE's data and show samples, lengths and what was cut
sweep:  ## Train RECIPE once per combination of ARGS="key=a,b key=c,d" and rank the results
# A file of data in ARGS takes the place of a recipe, unless one is typed, too.
DATA = $(filter %.jsonl %.json %.csv %.tsv %.gz %.parquet,$(foreach word,$(value ARGS),$(if $(findstring =,$(word)),,$(word))))
train plan data sweep:
	$(FRONT) run $@ $(if $(filter-out file,$(origin RECIPE)),$(RECIPE),$(if $(DATA),,$(RECIPE))) $(value ARGS)

# ARGS may name what RECIPE names, so RECIPE is passed only if it is typed, or if nothing is.
fetch:  ## Download what RECIPE needs, to work without a network later; only a suite's data: ARGS=suite=leaderboard
	$(FRONT) run $@ $(if $(filter-out file,$(origin RECIPE)),$(RECIPE),$(if $(value ARGS),,$(RECIPE))) $(value ARGS)

chat:  ## Talk to the newest finished run, or RECIPE's; ARGS="'Hello'" for one answer
export:  ## Write the newest run, or RECIPE's, as one Hugging Face folder; ARGS="--checkpoint 40 --merge --dtype bf16 --to DIR"
report:  ## Write the report of the newest run again, or RECIPE's
verify:  ## Compare the newest run, or RECIPE's, with the recipe's evidence, or another: ARGS=RUN
chat export report verify:
	$(FRONT) run $@ $(if $(filter-out file,$(origin RECIPE)),$(RECIPE)) $(value ARGS)

eval:  ## Evaluate the newest finished run, RECIPE's if it is given, or another: ARGS="run=outputs/quickstart/<time>"
	$(FRONT) run $@ $(if $(filter-out file,$(origin RECIPE)),run=$(RECIPE)) $(value ARGS)

doctor:  ## Check driver, image, torch, NCCL, links, shared memory and disks
	$(FRONT) run doctor $(value ARGS)

list:  ## The recipes, with their hardware and strategy
	$(FRONT) run list $(value ARGS)

explain:  ## What a setting, a group or a rule means: ARGS=training.max_length; without ARGS, the list of all
	$(FRONT) run explain $(or $(value ARGS),all)

env:  ## Find the GPUs, pick the image and write .env; every target that uses a container does this
image:  ## Build the image for the GPUs here, or for others: GPU=hopper
push:  ## Push the image that is built here: REGISTRY=host/path
publish:  ## Build an image and push it with SBOM and provenance: GPU=hopper REGISTRY=host/path
pull:  ## Take the image from where it was published, instead of building it
env image push publish pull:
	$(FRONT) $@

check: lint type test  ## Style, types and the tests that need no GPU, engine or cluster; all of CI: .ci/run

lint: setup  ## Style of Python, YAML, shell, workflows and prose; changes nothing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/yamllint --strict .
	.venv/bin/lint-imports --no-cache --no-logo
	.venv/bin/shellcheck -xa .ci/* docker/*.sh
	.venv/bin/hadolint docker/Dockerfile
	.venv/bin/zizmor --quiet --offline --no-progress --pedantic .github/workflows
	.venv/bin/python docs/plain_english.py

format: setup  ## Fix what can be fixed automatically
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

type: setup  ## Types, strict for src
	.venv/bin/mypy

# One thread per process: two processes of two threads each are slower on two cores than two of one.
test: setup  ## The tests that need no GPU, engine or cluster; ARGS="tests/data -x"
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile $(value ARGS)

# torchao is next to .venv, not in it: transformers imports it wherever it is installed.
TORCHAO = $(CURDIR)/.cache/torchao
FP8_TESTS = tests/model/test_fp8_layers.py tests/parallel/test_sharded_layers.py tests/train/test_fp8.py

test-torchao: setup  ## The tests of fp8, which computes on a CPU what a GPU would; fetches torchao by the lock
	mkdir -p $(TORCHAO)
	sed -n '/^torchao==/,/# via/p' docker/hopper/requirements.lock > $(TORCHAO).txt
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes --upgrade --target $(TORCHAO) -r $(TORCHAO).txt
	OMP_NUM_THREADS=1 PYTHONPATH=$(TORCHAO) .venv/bin/python -m pytest $(FP8_TESTS) $(value ARGS)

# In parallel, as tests/system/conftest.py distributes them; the number of threads is the user's default there.
SYSTEM_TESTS = .venv/bin/python -m pytest $(if $(findstring tests/,$(filter-out --%,$(value ARGS))),,tests/system)

test-system: setup  ## The tests that use the project as a whole, as its users do
	$(SYSTEM_TESTS) -m "system and not slow" -n $(WORKERS) --durations=40 $(value ARGS)

# Exit code 5: ARGS names tests of the other kind only.
test-slow: setup  ## Those that take long and that few changes concern, for a nightly run
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m nightly -n $(WORKERS) --dist loadfile $(value ARGS) || test $$? = 5
	$(SYSTEM_TESTS) -m "system and slow" -n $(WORKERS) $(value ARGS) || test $$? = 5

golden: setup  ## Write the files of tests/golden/ again, or those of ARGS="tests/golden/test_data.py"
	.venv/bin/python -m tests.golden $(value ARGS)

docs:  ## Build the documentation site into .cache/site; its packages are in .cache/docs-venv
	test -x .cache/docs-venv/bin/pip || $(PYTHON) -m venv --clear .cache/docs-venv
	.cache/docs-venv/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes -r docker/requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 .cache/docs-venv/bin/mkdocs build --strict

setup:  ## Set up .venv for development, or bring it up to date with the locks
	@docker/venv.sh setup dev

lock:  ## Write the locks again after a change of an .in file in docker/; ARGS=--upgrade
	$(PYTHON) docker/make_locks.py $(value ARGS)

clean-venv:  ## Remove .venv; the next target sets it up again
	@docker/venv.sh remove
