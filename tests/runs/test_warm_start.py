"""init_from=RUN: a new run starts with the weights of another one."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Capture, contents, read_rows, small
from omegaconf import OmegaConf

from ml_pipeline.algorithms.ppo import algorithm as ppo
from ml_pipeline.assembly.compose import ConfigError
from ml_pipeline.assembly.run import train
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.console import numbered_output
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.contracts import Callback


class Peek(Callback):
    """The state of the run before its first iteration."""

    def on_train_start(self, loop: Any) -> None:
        self.env_steps = loop.env_steps
        self.agent = copy.deepcopy(loop.agent.state_dict())


def started(*overrides: str) -> tuple[Peek, Path]:
    peek = Peek()
    return peek, train([*small(), *overrides], callbacks={"peek": peek}).run_dir


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("checkpoint", ["best", "latest"])
def test_new_run_has_the_weights_of_the_best_or_latest_checkpoint(
    finished_run: Path, checkpoint: str
) -> None:
    if checkpoint == "latest":
        (finished_run / "checkpoints" / "best.pt").unlink()
    before = contents(finished_run)

    peek, run = started(f"init_from={finished_run}", "seed=7")

    saved = load_checkpoint(RunFolder.open(finished_run), checkpoint)["agent"]
    fresh, _ = started("seed=7")
    assert peek.env_steps == 0
    assert equal(peek.agent["model"], saved["model"])
    assert not equal(peek.agent["model"], fresh.agent["model"])
    assert str(peek.agent["adam"]) == str(fresh.agent["adam"])
    assert str(peek.agent["adam"]) != str(saved["adam"])
    assert [int(row["env_steps"]) for row in read_rows(run)] == [32, 64]
    assert contents(finished_run) == before


REPLAY = [
    *("n_envs=2", "device=cpu", "logger=none", "vec_env=serial", "network.hidden_sizes=[16]"),
    *("agent.learning_starts=16", "agent.batch_size=8", "agent.iteration_length=16"),
    "total_steps=64",
]


@pytest.mark.parametrize(
    ("settings", "parts", "normaliser"),
    [
        pytest.param(small(), ["model"], "model", marks=pytest.mark.slow, id="PPO"),
        pytest.param(["agent=dqn", *REPLAY], ["model", "target"], "preprocess", id="DQN"),
        pytest.param(
            ["agent=sac", "env=pendulum", *REPLAY],
            ["actor", "critics", "targets", "temperature"],
            "preprocess",
            id="SAC",
        ),
    ],
)
def test_every_agent_starts_from_old_networks_and_their_normaliser(
    here: Path, settings: list[str], parts: list[str], normaliser: str
) -> None:
    settings = [*settings, "agent.normalize_obs=true", "~callbacks.evaluation"]
    source = train(settings).run_dir
    peek = Peek()

    train([*settings, f"init_from={source}", "seed=7"], callbacks={"peek": peek})

    saved = load_checkpoint(RunFolder.open(source), "latest")["agent"]
    assert any("moments" in name for name in saved[normaliser])
    assert all(equal(peek.agent[part], saved[part]) for part in {*parts, normaliser})
    assert peek.agent.get("n_updates", 0) == peek.env_steps == 0  # PPO does not count updates


@pytest.mark.slow
def test_config_records_the_file_and_a_resume_does_not_read_it_again(
    finished_run: Path, capsys: Capture
) -> None:
    path = finished_run / "checkpoints" / "latest.pt"

    _, run = started(f"init_from={path}")

    assert OmegaConf.load(run / "config.yaml").init_from == str(path)
    assert f"started from {path}, env step 64" in capsys.readouterr().out
    shutil.rmtree(finished_run)
    train([f"resume={run}", "total_steps=96"])
    assert len(read_rows(run)) == 3
    with pytest.raises(ConfigError, match="init_from= cannot be combined with resume="):
        train([f"resume={run}", f"init_from={run}"])


@pytest.mark.slow
def test_latest_is_the_newest_run_but_not_in_a_sweep(finished_run: Path) -> None:
    peek, _ = started("init_from=latest")

    saved = load_checkpoint(RunFolder.open(finished_run), "best")["agent"]
    assert equal(peek.agent["model"], saved["model"])
    with numbered_output(0), pytest.raises(ConfigError, match="jobs of a sweep would find each"):
        train([*small(), "init_from=latest"])


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        (
            "network.hidden_sizes=[32,64]",
            "model.actor.layers.0.weight is float32 [64, 4] there and float32 [32, 4] here",
        ),
        ("env=acrobot", "spaces.observation_space.shape is [4] there and [6] here"),
        ("agent.normalize_obs=true", "model.preprocess.moments.0.mean exists only here"),
        ("agent.shared_trunk=true", "model.critic.layers.0.weight exists only there"),
    ],
)
def test_misfit_is_one_line_that_names_the_difference(
    finished_run: Path, override: str, difference: str
) -> None:
    runs = list(finished_run.parents[1].glob("*/*"))

    with pytest.raises(ConfigError) as raised:
        train([*small(), override, f"init_from={finished_run}"])

    fix = "use the env, network and agent of that run"
    assert str(raised.value) == f"init_from={finished_run}: {difference}; {fix}"
    assert list(finished_run.parents[1].glob("*/*")) == runs


def test_what_is_not_a_run_is_one_line(finished_run: Path, here: Path) -> None:
    with pytest.raises(ConfigError, match=r"^init_from=nope: nope is not a run folder"):
        train([*small(), "init_from=nope"])
    (finished_run / "checkpoints" / "best.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"^init_from=.*best\.pt is not a checkpoint of format"):
        train([*small(), f"init_from={finished_run}"])


def test_folder_of_another_user_runs_no_code(finished_run: Path, here: Path) -> None:
    (here / "trap.py").write_text("open('sprung', 'w')")
    config = OmegaConf.load(finished_run / "config.yaml")
    config.network = {"_target_": "trap.Network"}
    config.callbacks.mine = {"_target_": "trap.Mine"}
    (finished_run / "config.yaml").write_text(OmegaConf.to_yaml(config))  # without a signature

    peek, _ = started(f"init_from={finished_run}")

    saved = load_checkpoint(RunFolder.open(finished_run), "best")["agent"]
    assert equal(peek.agent["model"], saved["model"])
    assert not (here / "sprung").exists()


def test_algorithm_that_cannot_start_from_another_run_says_so(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ppo, "PPO", ppo.PPO._replace(start_from=None))

    with pytest.raises(ConfigError, match=r"PPO cannot start from another run; give its Algorithm"):
        train([*small(), f"init_from={finished_run}"])
