# make train and make test need only Python >= 3.10, pip, venv and make.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

# Each variable that is set becomes an override of train_ppo.py, which checks its value.
TRAIN_ENV ?= $(if $(TRAIN_ROM),game_boy)
TRAIN_ENVS ?=
TRAIN_STEPS ?=
TRAIN_EPISODE_LENGTH ?=
TRAIN_UPDATE_EPOCHS ?=
TRAIN_BATCH_SIZE ?=
TRAIN_OUTPUT_DIR ?=
TRAIN_ROM ?=
TRAIN_GAME ?=
TRAIN_STATE ?=
ROLLOUT := 128
# The key of an episode's length: each world has its own, and a class without one gets a wrapper.
LIMIT_KEY = $(or $(LIMIT_OF_$(TRAIN_ENV)),$(if $(filter-out torch_%,$(OWN_CLASS)),$(LIMIT_BY_WRAPPER)),$(LIMIT_OF_ID))
LIMIT_OF_game_boy = env.kwargs.episode_length
LIMIT_OF_trading = env.kwargs.episode_bars
LIMIT_OF_torch_trading = env.kwargs.episode_bars
LIMIT_OF_torch_hockey = $(error TRAIN_EPISODE_LENGTH=$(TRAIN_EPISODE_LENGTH): the length of a game of \
	torch_hockey is fixed; use TRAIN_ENV=hockey, or leave the variable out)
LIMIT_OF_ID = +env.kwargs.max_episode_steps
LIMIT_BY_WRAPPER = +env.wrappers.limit._target_=gymnasium.wrappers.TimeLimit" "+env.wrappers.limit.max_episode_steps
OWN_CLASS = $(if $(shell grep -ls '^target:' $(foreach folder,. ml_pipeline/worlds/*,$(folder)/conf/env/$(TRAIN_ENV).yaml)),$(TRAIN_ENV))
# PPO counts minibatches instead of their transitions.
MINIBATCHES = $$($(BIN)/python -c 'import sys; n, size = sys.argv[1:]; \
	fits = n.isdecimal() and size.isdecimal() and int(size) and $(ROLLOUT) * int(n) % int(size) == 0; \
	print($(ROLLOUT) * int(n) // int(size)) if fits else sys.exit(f"TRAIN_BATCH_SIZE={size}: must \
	divide a rollout of $(ROLLOUT) x TRAIN_ENVS={n} transitions; use a power of two up to $(ROLLOUT)")' \
	'$(or $(TRAIN_ENVS),8)' '$(TRAIN_BATCH_SIZE)')
TRAIN = $(if $(TRAIN_BATCH_SIZE),minibatches=$(MINIBATCHES) &&) $(BIN)/python train_ppo.py \
	$(if $(TRAIN_ENV),"env=$(TRAIN_ENV)") \
	$(if $(TRAIN_ENVS),"n_envs=$(TRAIN_ENVS)") \
	$(if $(TRAIN_STEPS),"total_steps=$(TRAIN_STEPS)") \
	$(if $(TRAIN_EPISODE_LENGTH),"$(LIMIT_KEY)=$(TRAIN_EPISODE_LENGTH)") \
	$(if $(TRAIN_UPDATE_EPOCHS),"agent.n_epochs=$(TRAIN_UPDATE_EPOCHS)") \
	$(if $(TRAIN_BATCH_SIZE),"agent.n_steps=$(ROLLOUT)" "agent.n_minibatches=$$minibatches") \
	$(if $(TRAIN_OUTPUT_DIR),"run_root=$(TRAIN_OUTPUT_DIR)") \
	$(if $(TRAIN_ROM),"env.kwargs.rom=$(TRAIN_ROM)") \
	$(if $(TRAIN_GAME),"env.kwargs.game=$(TRAIN_GAME)") \
	$(if $(TRAIN_STATE),"env.kwargs.state=$(TRAIN_STATE)")

LOWEST := .venv-lowest
# They need no other extra.
TESTS_OF_CORE := $(foreach each,algorithms envs ground policy runs training,tests/$(each))

# A misspelt variable would train with the default, without a word.
VARIABLES := PYTHON VENV ARGS TRAIN_ENV TRAIN_ENVS TRAIN_STEPS TRAIN_EPISODE_LENGTH TRAIN_UPDATE_EPOCHS \
	TRAIN_BATCH_SIZE TRAIN_OUTPUT_DIR TRAIN_ROM TRAIN_GAME TRAIN_STATE
TYPED := $(filter TRAIN_%,$(.VARIABLES)) $(foreach each,$(.VARIABLES),$(if $(filter command%,$(origin $(each))),$(each)))
UNKNOWN := $(firstword $(filter-out $(VARIABLES) MAKE% SHELL,$(TYPED)))
ifneq ($(filter train%,$(MAKECMDGOALS)),)
ifneq ($(UNKNOWN),)
$(error $(UNKNOWN)=$($(UNKNOWN)): make has no such variable; choose from $(VARIABLES))
endif
endif

.PHONY: help setup setup-dev train train-parallel train-pure-rl train-20k bench-scaling test test-all test-lowest notebooks check format
.PHONY: box2d mujoco atari envpool jax clean

help:  ## show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo 'Variables of train, train-parallel, train-pure-rl and train-20k:'
	@echo '  TRAIN_ENV=game_boy         a preset of conf/env; default cartpole, with TRAIN_ROM game_boy'
	@echo '  TRAIN_ENVS=4               number of envs'
	@echo '  TRAIN_STEPS=50000          env steps over all envs'
	@echo '  TRAIN_EPISODE_LENGTH=1000  steps after which an episode is truncated'
	@echo '  TRAIN_UPDATE_EPOCHS=8      passes over each rollout'
	@echo '  TRAIN_BATCH_SIZE=256       transitions per minibatch; divides $(ROLLOUT) x TRAIN_ENVS'
	@echo '  TRAIN_OUTPUT_DIR=runs      folder of the run folders'
	@echo '  TRAIN_ROM=game.gb TRAIN_GAME=game.yaml TRAIN_STATE=game.state   for TRAIN_ENV=game_boy'
	@echo 'Variables of all: ARGS="..." more arguments, PYTHON=python3.12, VENV=.venv'

setup: $(VENV)/.installed  ## create .venv and install the package

setup-dev: $(VENV)/.installed-dev  ## also install the packages for tests and checks

$(VENV)/.installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else "ml_pipeline needs Python 3.10 or newer, this is %d.%d; choose another one: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

train: setup  ## train; make train ARGS="env=acrobot n_envs=8 seed=3"
	$(strip $(TRAIN) $(ARGS))

train-parallel: setup  ## train with every env in a worker process
	$(strip $(TRAIN) vec_env=parallel $(ARGS))

train-pure-rl: setup  ## train on the rewards of the env alone, without reward shaping
	$(strip $(TRAIN) $(if $(filter %hockey,$(filter-out torch_%,$(TRAIN_ENV))),"~env.wrappers.shaping") $(ARGS))

train-20k: TRAIN_STEPS = 20000
train-20k: TRAIN_ENVS = 2
train-20k: setup  ## train for 20,000 steps with 2 envs
	$(strip $(TRAIN) $(ARGS))

bench-scaling: setup-dev  ## measure 1 to 16 envs in every mode; recommend settings for this machine
	$(BIN)/python benchmarks/scaling.py $(ARGS)

# With PYTHONDONTWRITEBYTECODE, each of many processes would compile the package again.
COMPILE = $(BIN)/python -m compileall -q ml_pipeline

test: setup-dev  ## run the fast tests
	@$(COMPILE)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow and not gpu" $(ARGS)

test-all: setup-dev  ## run every test that this machine can run
	@$(COMPILE)
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

test-lowest:  ## run the tests of the core with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -e ".[pettingzoo,sweep]" $$($(LOWEST)/bin/python tests/lowest.py) pytest==8.0 pytest-timeout==2.3.1 pytest-xdist==3.6.0
	$(LOWEST)/bin/python -m pytest -n auto --dist loadgroup -m "not slow and not gpu" $(TESTS_OF_CORE) $(ARGS)

notebooks: setup-dev  ## run every notebook
	$(BIN)/python -m pytest --nbmake -n auto notebooks $(ARGS)

check: setup-dev  ## check lint, format, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev  ## fix lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

box2d: setup  ## install Box2D, for env=lunar_lander
	$(BIN)/python -m pip install --quiet swig setuptools wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation box2d-py
	$(BIN)/python -m pip install --quiet "gymnasium[classic-control]"

mujoco: setup  ## install MuJoCo, for env=half_cheetah, hopper, walker2d
	$(BIN)/python -m pip install --quiet -e ".[mujoco]"

atari: setup  ## install the Arcade Learning Environment, for env=pong, breakout
	$(BIN)/python -m pip install --quiet -e ".[atari]"

envpool: setup  ## install EnvPool, for env=envpool; needs Python 3.11 or newer
	$(BIN)/python -m pip install --quiet -e ".[envpool]"

jax: setup  ## install JAX for the CPU and gymnax, for env=gymnax; 700 MiB
	$(BIN)/python -m pip install --quiet -e ".[jax]"

clean:  ## remove .venv, builds and caches; keep runs/
	rm -rf $(VENV) $(LOWEST) .mypy_cache .ruff_cache .pytest_cache *.egg-info build
