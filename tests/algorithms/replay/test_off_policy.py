"""DQN and SAC through the door: train, resume, evaluate, export."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Capture, contents, error_line
from gymnasium import spaces
from tiny_envs import ForbiddingEnv

from ml_pipeline.__main__ import main
from ml_pipeline.algorithms.replay.commands import _load as replay_loading
from ml_pipeline.assembly.compose import ConfigError
from ml_pipeline.assembly.entry import with_agent
from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.errors import UserError
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import (
    LATEST,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.checks import BadValueError

COMMON = [
    *("n_envs=2", "device=cpu", "logger=none", "network.hidden_sizes=[16]"),
    *("agent.learning_starts=32", "agent.batch_size=8", "agent.iteration_length=8"),
    *("callbacks.evaluation.n_episodes=2", "callbacks.evaluation.eval_every_steps=64"),
    *("callbacks.checkpoints.every_steps=32", "callbacks.checkpoints.final_episodes=2"),
]
DQN = ["agent=dqn", "env=cartpole", *COMMON, "agent.buffer_size=100", "agent.target_every=4"]
SAC = ["agent=sac", "env=pendulum", *COMMON, "agent.buffer_size=100"]
GSDE = [*SAC, "agent.box_policy=gsde", "agent.gsde_every_steps=3"]
DISCRETE = ["agent=sac", "env=cartpole", *COMMON, "agent.buffer_size=100"]
OPTIONS = ["experiment=dqn_cartpole", "--cfg", "job"]


def test_a_checkpoint_writes_only_new_transitions(here: Path) -> None:
    run = train([*DQN, "vec_env=serial", "total_steps=96"]).run_dir
    before = {path: path.stat().st_mtime_ns for path in (run / "replay").iterdir()}

    train([f"resume={run}", "total_steps=128"])
    after = {path.name for path in (run / "replay").iterdir()}

    assert {path.name for path in before} < after  # no old file was written again
    assert {path: path.stat().st_mtime_ns for path in before} == before
    train([f"resume={run}", "total_steps=384"])
    rows = [tuple(map(int, path.name.split("-")[:2])) for path in (run / "replay").iterdir()]
    assert min(rows)[1] > 192 - 50  # files whose rows have all left the ring are removed
    best = torch.load(run / "checkpoints" / "best.pt", weights_only=True)
    assert "obs" not in best["replay"]


def test_replay_of_a_run_that_saves_meanwhile_reads_the_newer_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train([*DQN, "vec_env=serial", "total_steps=96"]).run_dir
    goals = [384]

    def load_while_training(folder: RunFolder, name: str) -> StateDict:
        state = load_checkpoint(folder, name)
        if goals:  # its files are removed before they are read
            train([f"resume={run}", f"total_steps={goals.pop()}"])
        return state

    monkeypatch.setattr(replay_loading, "load_checkpoint", load_while_training)
    buffer, env_steps, sizes = replay_loading.load_replay_buffer(run)

    assert (env_steps, buffer.n_written) == (384, 192)
    assert len(sizes) == len(list((run / "replay").iterdir()))


def test_a_missing_replay_file_is_named(here: Path) -> None:
    run = train([*DQN, "vec_env=serial", "total_steps=96"]).run_dir
    lost = sorted((run / "replay").iterdir())[0]
    lost.unlink()

    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        train([f"resume={run}", "total_steps=128"])


def test_the_update_ratio_does_not_depend_on_the_number_of_envs(here: Path) -> None:
    ratio = ["agent.updates_per_env_step=0.25", "total_steps=512", "vec_env=serial"]
    for n_envs in (1, 4):
        run = train([*DQN, *ratio, f"n_envs={n_envs}"]).run_dir
        n_updates = load_checkpoint(RunFolder.open(run), LATEST)["n_updates"]
        rows = read_metrics(run / "metrics.csv")
        measured = [float(row["time/updates_per_env_step"]) for row in rows]

        assert n_updates == pytest.approx(0.25 * (512 - 32), abs=2)
        assert np.mean(measured[-8:]) == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
def test_a_new_update_ratio_holds_for_the_steps_after_the_resume(here: Path) -> None:
    settings = [*DQN, "vec_env=serial"]
    run = train([*settings, "total_steps=96", "agent.updates_per_env_step=0.5"]).run_dir

    for total_steps, ratio in ((128, 0.25), (160, 1.0)):
        changes = [f"total_steps={total_steps}", f"agent.updates_per_env_step={ratio}"]
        train([f"resume={run}", *changes])  # the run decides which agent it has

    rows = read_metrics(run / "metrics.csv")
    measured = [float(row["time/updates_per_env_step"]) for row in rows]
    assert measured[-6:] == [0.5, 0.5, 0.25, 0.25, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (DQN, "info"),
        pytest.param(DQN, "obs", marks=pytest.mark.slow),
        pytest.param(DISCRETE, "info", marks=pytest.mark.slow),
        (DISCRETE, "obs"),
    ],
)
def test_forbidden_actions_are_never_taken(here: Path, settings: list[str], where: str) -> None:
    env = ["env.target=tiny_envs.ForbiddingEnv", f"+env.kwargs.where={where}"]  # raises at one

    run = train([*settings, *env, "total_steps=128", "vec_env=serial"]).run_dir

    assert load_agent(run).agent.greedy().mask_leaf == (None if where == "info" else "action_mask")
    assert isinstance(ForbiddingEnv(where).action_space, spaces.Discrete)


@pytest.mark.slow
def test_evaluate_and_export_work_for_all(here: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime", reason="the extra export installs it; .ci/run does")
    for settings in (DQN, SAC, GSDE, DISCRETE):
        run = train([*settings, "vec_env=serial", "total_steps=64"]).run_dir
        assert main(["evaluate", str(run), "--episodes", "2", "--deterministic"]) == 0
        assert main(["export", str(run), "--format", "onnx"]) == 0
        assert "policy.onnx" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["agent=dqn", "env=pendulum"], "agent=dqn: action space .* is not discrete"),
        (["agent=dqn", "network=lstm"], "network Recurrent is recurrent, which this agent"),
        (
            ["agent=dqn", "agent.batch_size=8", "agent.buffer_size=15"],
            "agent.buffer_size=15: too small; n_envs=8 and agent.n_step=1 need at least 16",
        ),
        (
            ["agent=dqn", "agent.batch_size=9", "agent.buffer_size=8"],
            "agent.batch_size=9: must be at most agent.buffer_size=8",
        ),
        (["agent=sac", "env=pendulum", "agent.tau=0"], "agent.tau=0.0: must be above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(here: Path, settings: list[str], words: str) -> None:
    with pytest.raises((UserError, ConfigError), match=words):
        train([*settings, "logger=none", "device=cpu"])


@pytest.mark.parametrize("agent", ["sac", "ppo"])
def test_gsde_for_discrete_actions_is_refused_before_a_folder_exists(
    here: Path, agent: str
) -> None:
    with pytest.raises(ConfigError, match=r"=gsde: needs Box actions, but env CartPole-v1 has D"):
        train([f"agent={agent}", "env=cartpole", "agent.box_policy=gsde", "device=cpu"])

    assert not list(here.iterdir())


def test_two_halves_of_the_envs_are_refused_before_a_folder_exists(here: Path) -> None:
    with pytest.raises(ConfigError, match="collector=double: replay learns while envs step"):
        train(["agent=dqn", "collector=double"])

    assert not list(here.iterdir())


def test_stacked_frames_of_a_tensor_env_are_refused_before_a_folder_exists(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.stacked_frames; set agent\.stacked_f"):
        train(["agent=dqn", "env=torch_cartpole", "agent.stacked_frames=4"])

    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("", 1),
        ("--cfg job", 3),
        ("experiment=dqn_cartpole --cfg job", 1),
        ("-m seed=1,2", 2),
        ("--config-dir my_conf ~callbacks.evaluation env=mine", 3),
    ],
)
def test_a_door_adds_its_agent_next_to_the_other_overrides(words: str, place: int) -> None:
    line = ["train_dqn.py", *words.split()]

    added = with_agent(line, "dqn")

    assert added == [*line[:place], "agent=dqn", *line[place:]]
    assert with_agent([*line, "agent=sac"], "dqn") == [*line, "agent=sac"]
    assert with_agent([*line, "resume=RUN"], "dqn") == [*line, "resume=RUN"]


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("", "experiment=sac_pendulum"),
        ("-m seed=1,2", "experiment=sac_pendulum"),
        ("agent.tau=0.01 +env.kwargs.g=9.0", "experiment=sac_pendulum"),
        ("env=hopper", "agent=sac"),
        ("env.id=MountainCarContinuous-v0", "agent=sac"),
        ("init_from=RUN", "agent=sac"),
        ("experiment=null", "agent=sac"),
        ("experiment=sac_hopper", "agent=sac"),
    ],
)
def test_train_sac_has_a_preset_for_command_lines_without_an_env(words: str, added: str) -> None:
    line = ["train_sac.py", *words.split()]

    new = set(with_agent(line, "sac", "sac_pendulum")) - set(line)

    assert new == {added}


def run_script(name: str, *words: str) -> object:
    """Run a script in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(REPOSITORY / name), run_name="__main__")
    return end.value.code or 0


def test_train_sac_without_arguments_trains_its_preset_for_pendulum(
    here: Path, capsys: Capture
) -> None:
    assert run_script("train_sac.py", "--cfg", "job") == 0

    shown = capsys.readouterr().out
    for line in ("id: Pendulum-v1", "algorithm: ml_pipeline.algorithms.sac.algorithm.SAC"):
        assert line in shown
    assert "total_steps: 20000" in shown


def test_train_dqn_never_trains_another_agent(here: Path, capsys: Capture) -> None:
    assert run_script("train_dqn.py", *OPTIONS) == 0

    shown = capsys.readouterr().out
    assert "algorithm: ml_pipeline.algorithms.dqn.algorithm.DQN" in shown


@pytest.mark.parametrize(
    ("door", "preset", "agent"),
    [
        ("dqn", "lunar_lander", "ppo"),
        ("sac", "dqn_cartpole", "dqn"),
        ("ppo", "sac_hopper", "sac"),  # extends another preset
        ("ppo", "cartpole,hockey_dqn", "dqn"),
    ],
)
def test_preset_of_another_agent_is_refused_with_its_door(
    door: str, preset: str, agent: str
) -> None:
    name = preset.split(",")[-1]

    with pytest.raises(ConfigError, match=rf"^experiment={name}: trains agent={agent}; use train_"):
        with_agent([f"train_{door}.py", f"experiment={preset}"], door)


def test_run_of_another_agent_is_resumed_only_by_its_own_script_and_the_command(
    here: Path, capsys: Capture
) -> None:
    run = train([*SAC, "vec_env=serial", "total_steps=32", "~callbacks.evaluation"]).run_dir
    words = [f"resume={run}", "total_steps=48"]

    assert run_script("train_dqn.py", *words) == 1
    assert error_line(capsys) == f"resume={run}: trains agent=sac; use train_sac.py"
    assert run_script("train_sac.py", *words) == 0
    assert "resumed at env step 32" in capsys.readouterr().out
    assert main(["train", f"resume={run}", "total_steps=64"]) == 0


def test_agents_without_a_script_train_and_resume_by_that_of_ppo(here: Path) -> None:
    preset = ["train_ppo.py", "experiment=pqn_cartpole"]
    assert with_agent(preset, "ppo") == preset
    with pytest.raises(ConfigError, match=r"trains agent=pqn; use train_ppo\.py"):
        with_agent(["train_dqn.py", "experiment=pqn_cartpole"], "dqn")

    words = ["env=pendulum", "n_envs=2", "logger=none", "vec_env=serial", "~callbacks.evaluation"]
    assert run_script("train_ppo.py", "agent=td3", *words, "total_steps=64") == 0
    (run,) = here.glob("runs/*/*")
    assert run_script("train_ppo.py", f"resume={run}", "total_steps=128") == 0


@pytest.mark.parametrize(
    "value", ["RUN", "'RUN'", "RUN/checkpoints/latest.pt", "no_such_folder,RUN"]
)
def test_every_spelling_of_the_resumed_run_is_checked(here: Path, value: str) -> None:
    (here / "RUN" / "checkpoints").mkdir(parents=True)
    (here / "RUN" / "checkpoints" / "latest.pt").touch()
    config = here / "RUN" / "config.yaml"

    config.write_text("agent: {algorithm: ml_pipeline.algorithms.dqn.algorithm.DQN}\n")
    assert with_agent(["train_dqn.py", f"resume={value}"], "dqn")
    with pytest.raises(ConfigError, match=r"^resume=RUN.*: trains agent=dqn; use train_dqn\.py$"):
        with_agent(["train_ppo.py", f"resume={value}"], "ppo")


@pytest.mark.parametrize(
    "text",
    [
        "agent: {algorithm: my_reinforce.REINFORCE}",
        "agent: {learning_rate: 1e-3}",  # older than the key
        "[]",
        "{",
    ],
)
def test_train_ppo_resumes_old_runs_and_own_algorithms(here: Path, text: str) -> None:
    (here / "RUN").mkdir()
    (here / "RUN" / "config.yaml").write_text(text)

    assert with_agent(["train_ppo.py", "resume=RUN"], "ppo") == ["train_ppo.py", "resume=RUN"]


def test_run_that_ends_before_its_first_update_says_so(here: Path, capsys: Capture) -> None:
    train([*DQN, "vec_env=serial", "total_steps=32", "~callbacks.evaluation"])

    assert "this run of 32 env steps ends before its first update" in capsys.readouterr().out


@pytest.fixture(params=["between iterations", "within one"])
def stopped(request: pytest.FixtureRequest, here: Path) -> Path:
    """A run of DQN with 2 envs, stopped at env step 32; its folder."""
    settings = [*DQN, "env.target=tiny_envs.NanEnv", "vec_env=serial", "~callbacks.evaluation"]
    if request.param == "between iterations":
        return train([*settings, "total_steps=32"]).run_dir
    with pytest.raises(BadValueError):  # the third iteration fails, and no checkpoint exists yet
        train([*settings, "total_steps=64", "callbacks.checkpoints.every_steps=1000"])
    (run,) = (path.parent for path in here.glob("runs/*/*/config.yaml"))
    assert load_checkpoint(RunFolder.open(run), LATEST)["positions"] is None
    return run


def test_resume_with_another_number_of_envs_is_refused_and_changes_nothing(stopped: Path) -> None:
    before = contents(stopped)

    with pytest.raises(ConfigError, match=r"^n_envs=4: .* its replay has 2; use n_envs=2"):
        train([f"resume={stopped}", "n_envs=4", "total_steps=128"])

    assert contents(stopped) == before


def test_checkpoint_from_before_the_number_of_envs_was_saved_resumes(stopped: Path) -> None:
    folder = RunFolder.open(stopped)
    state = load_checkpoint(folder, LATEST)
    assert state["replay"].pop("n_envs") == 2
    save_checkpoint(folder, LATEST, state)

    # Another env of the same form, which does not fail.
    settings = ["env.target=tiny_envs.CountingEnv", "total_steps=128"]
    assert train([f"resume={stopped}", *settings]).env_steps == 128
