# make train and make test need only Python >= 3.10, pip, venv and make.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help setup setup-dev train test test-all notebooks check format box2d mujoco atari clean

help:  ## show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

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
	$(BIN)/python train_ppo.py $(ARGS)

test: setup-dev  ## run the fast tests
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow and not gpu" $(ARGS)

test-all: setup-dev  ## run every test that this machine can run
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

notebooks: setup-dev  ## run every notebook
	$(BIN)/python -m pytest --nbmake -p no:xdist notebooks $(ARGS)

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

clean:  ## remove .venv, builds and caches; keep runs/
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info build
