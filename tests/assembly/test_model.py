"""``PPO(env).learn(n)``: models as objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import contents, only_run, read_rows
from own_parts import Wide
from tiny_envs import CountingEnv

from ml_pipeline import DQN, PPO, SAC, train
from ml_pipeline.__main__ import main
from ml_pipeline.assembly.compose import plain_config
from ml_pipeline.assembly.model import Model
from ml_pipeline.errors import UserError

SMALL: dict[str, Any] = {
    "n_envs": 2,
    "vec_env": "serial",
    "device": "cpu",
    "logger": "none",
    "callbacks": {"evaluation": {"n_episodes": 2}, "checkpoints": {"final_episodes": 2}},
    "quiet": True,
}
PPO_SIZES = {"n_steps": 16, "n_minibatches": 2, "n_epochs": 2}
REPLAY_SIZES = {"learning_starts": 16, "batch_size": 8, "iteration_length": 8, "buffer_size": 100}
SMALL_NETWORK = {"network": {"hidden_sizes": [16]}}


def test_a_model_is_a_run_of_train_with_the_same_settings(here: Path) -> None:
    model = PPO("CartPole-v1", network=Wide, seed=3, learning_rate=1e-3, **PPO_SIZES, **SMALL)
    model.learn(64)
    settings = {key: value for key, value in SMALL.items() if key != "quiet"}
    agent = {"learning_rate": 1e-3, **PPO_SIZES}
    by_train = train(
        env="CartPole-v1", network=Wide, seed=3, agent=agent, total_steps=64, quiet=True, **settings
    )

    assert model.run_dir is not None
    assert plain_config(model.run_dir) == plain_config(by_train.run_dir)
    assert read_rows(model.run_dir) == read_rows(by_train.run_dir)
    assert main(["evaluate", str(model.run_dir), "--episodes", "1"]) == 0


@pytest.mark.parametrize(
    ("kind", "env", "sizes"),
    [
        (PPO, lambda: CountingEnv(5), PPO_SIZES),
        (DQN, "CartPole-v1", {**REPLAY_SIZES, **SMALL_NETWORK}),
        (SAC, "Pendulum-v1", {**REPLAY_SIZES, **SMALL_NETWORK}),
    ],
)
def test_a_model_learns_again_after_it_was_saved_and_loaded(
    kind: type[Model], env: Any, sizes: dict[str, Any], here: Path
) -> None:
    model = kind(env, **sizes, **SMALL).learn(64)
    model.learn(32)
    saved = model.save("saved/mine")
    before = contents(saved)
    obs = model._loaded()[1].observation_space.sample()

    loaded = kind.load(saved, quiet=True)

    assert np.array_equal(loaded.predict(obs), model.predict(obs))
    assert loaded.evaluate(2).mean == model.evaluate(2).mean
    loaded.learn(32)
    assert contents(saved) == before
    model.learn(32)
    assert loaded.run_dir is not None
    assert model.run_dir is not None
    assert loaded.run_dir != model.run_dir
    assert read_rows(loaded.run_dir) == read_rows(model.run_dir)
    assert read_rows(model.run_dir)[-1]["env_steps"] == "128"


def test_a_model_without_a_run_folder_leaves_nothing(here: Path) -> None:
    model = PPO("CartPole-v1", run_folder=False, **PPO_SIZES, **{**SMALL, "logger": "none"})
    model.learn(64)

    assert not list(here.iterdir())
    assert model.save("mine") == Path("mine")
    assert PPO.load("mine").evaluate(1).mean == model.evaluate(1).mean


def test_save_replaces_a_model_and_nothing_else(here: Path) -> None:
    model = PPO("CartPole-v1", **PPO_SIZES, **SMALL).learn(64)
    (here / "mine").mkdir()
    (here / "mine/thesis.tex").write_text("all of it")

    model.save("again")
    model.learn(32).save("again")

    assert read_rows(Path("again"))[-1]["env_steps"] == "96"
    with pytest.raises(UserError, match="mine exists and is not a saved model"):
        model.save("mine")
    assert [path.name for path in here.iterdir() if path.name[0] == "."] == []
    assert only_run(here) == here / model.run_dir


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: PPO("MlpPolicy", "CartPole-v1"), r"PPO takes the env first and no policy: PPO\("),
        (lambda: PPO("CartPole-v1").predict([0.0] * 4), r"learnt nothing yet; call learn"),
        (lambda: PPO("CartPole-v1", ent_coef=0.1, **SMALL).learn(64), r"ent_coef=0.1: unknown key"),
        (lambda: PPO("CartPole-v1", agent={"gamma": 0.9}), r"pass its hyperparameters as arg"),
        (lambda: DQN.load("nowhere"), r"nowhere is not a run folder"),
    ],
)
def test_mistakes_with_a_model_are_one_line(call: Any, error: str, here: Path) -> None:
    with pytest.raises(UserError) as raised:
        call()

    assert re.search(error, str(raised.value))
    assert "\n" not in str(raised.value)


def test_model_of_another_algorithm_is_refused(finished_run: Path) -> None:
    with pytest.raises(UserError, match=r"was trained by agent=ppo, not dqn"):
        DQN.load(finished_run)
