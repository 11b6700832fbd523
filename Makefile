# make train, make test: a machine with Python >= 3.10, pip, venv and make needs nothing else.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help setup setup-dev train test test-all notebooks check format box2d mujoco atari clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed  ## make .venv and install the package into it

setup-dev: $(VENV)/.installed-dev  ## the same, with what tests and checks need

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else "ml_pipeline needs Python 3.10 or newer, this is %d.%d; name another one: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

train: setup  ## train; make train ARGS="env=acrobot n_envs=8 seed=3"
	$(BIN)/python train_ppo.py $(ARGS)

test: setup-dev  ## the fast tests
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow and not gpu" $(ARGS)

test-all: setup-dev  ## every test that this machine can run
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

notebooks: setup-dev  ## execute every notebook from its first cell to its last
	$(BIN)/python -m pytest --nbmake -p no:xdist notebooks $(ARGS)

check: setup-dev  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev  ## put the code into the house's format
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

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
