"""Old dotted paths of modules, classes and functions lead to the current ones."""

from __future__ import annotations

import importlib
import io
import pickle
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from ml_pipeline import moved as table
from ml_pipeline.envs.snapshots import _Unpickler
from ml_pipeline.moved import moved
from ml_pipeline.targets import import_dotted
from ml_pipeline.worlds.hockey.env import Hockey


@pytest.mark.parametrize("old", sorted(table._MODULES))
def test_every_moved_module_exists_at_its_new_path(old: str) -> None:
    new = moved(f"ml_pipeline.{old}")

    if not new.endswith(("_kernels", "_kernel", "triton_ppo")):  # they need Triton
        importlib.import_module(new)
    assert (REPOSITORY / f"{new.replace('.', '/')}.py").is_file()
    assert not (REPOSITORY / f"ml_pipeline/{old.replace('.', '/')}.py").exists()


@pytest.mark.parametrize("old", sorted(table._NAMES))
def test_every_moved_name_is_found_by_its_old_path(old: str) -> None:
    found = import_dotted(f"ml_pipeline.{old}", key="agent.loss")

    assert found is import_dotted(moved(f"ml_pipeline.{old}"), key="agent.loss")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ml_pipeline.envs.tasks.hockey.Hockey", "ml_pipeline.worlds.hockey.env.Hockey"),
        ("ml_pipeline.algorithms.ppo.PPO", "ml_pipeline.algorithms.ppo.algorithm.PPO"),
        ("ml_pipeline.agents.ppo.ppo_loss", "ml_pipeline.algorithms.ppo.loss.ppo_loss"),
        ("ml_pipeline.agents.ppo.PPOAgent", "ml_pipeline.algorithms.ppo.agent.PPOAgent"),
        ("ml_pipeline.algorithms.ppo.algorithm.PPO", "ml_pipeline.algorithms.ppo.algorithm.PPO"),
        ("my_module.agents.ppo", "my_module.agents.ppo"),
    ],
)
def test_a_path_leads_to_its_newest_place(old: str, new: str) -> None:
    assert moved(old) == new


def test_pickle_of_an_old_env_finds_its_classes() -> None:
    old = pickle.dumps(Hockey, protocol=0).replace(
        b"ml_pipeline.worlds.hockey.env", b"ml_pipeline.envs.tasks.hockey"
    )

    assert b"envs.tasks" in old
    assert _Unpickler(io.BytesIO(old), None).load() is Hockey


def test_scripts_of_a_user_may_import_old_paths_and_are_told_the_new_ones() -> None:
    code = (
        "from ml_pipeline.protocols import Callback\n"
        "import ml_pipeline.agents.networks as networks\n"
        "print(Callback.__module__, networks.MLP.__module__)\n"
        "from ml_pipeline.protocols import Nothing\n"
    )

    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "ml_pipeline.training.contracts ml_pipeline.policy.networks\n"
    assert "ml_pipeline.agents.networks.MLP is now ml_pipeline.policy.networks.MLP" in done.stderr
    assert "cannot import name 'Nothing' from 'ml_pipeline.protocols'" in done.stderr
