"""An exported file: plays like the live policy, describes itself, and runs no code."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Capture, error_line, small
from gymnasium import spaces
from tiny_envs import ForbiddingEnv, SpaceEnv
from vec_envs import linux_only

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.assembly.load import load_agent
from ml_pipeline.assembly.run import train
from ml_pipeline.deploy.exported import ExportedPolicy, PolicyFileError
from ml_pipeline.metrics import shown_return
from ml_pipeline.policy.actor_critic import _leaf_names

pytestmark = pytest.mark.xdist_group("export")  # a case is trained and exported once

SMALL_CNN = "{channels:[4],kernels:[3],strides:[1],hidden_size:8}"
FORBIDDING = "env.target=tiny_envs.ForbiddingEnv"
SHARED_GRU = "network=lstm network.cell=gru agent.shared_trunk=true"

# Name -> overrides of the run, inputs of the file, shape of its action, or of its parts by name.
CASES: dict[str, tuple[str, str, list[int] | dict[str, list[int]]]] = {
    "cartpole": ("env=cartpole", "obs", []),
    "normalised": ("env=cartpole agent.normalize_obs=true", "obs", []),
    "gaussian": ("env=pendulum agent.log_std_init=1", "obs", [1]),
    "squashed": ("env=pendulum agent.box_policy=squashed", "obs", [1]),
    "gsde": ("env=pendulum agent.box_policy=gsde", "obs", [1]),
    "mixed": (
        f"env.target=tiny_envs.MixedEnv network=dict +network.cnn={SMALL_CNN}",
        "choice image vector",
        [2],
    ),
    "cnn": (
        "env.target=test_export.make_camera network=cnn network.channels=[4,4,4]",
        "obs",
        [2, 2],
    ),
    "mask in obs": (f"{FORBIDDING} +env.kwargs.where=obs", "action_mask observation", []),
    "mask in info": (f"{FORBIDDING} agent.action_mask=info", "obs action_mask", []),
    "lstm": ("env=cartpole network=lstm", "obs state", []),
    "shared gru": (
        f"env.target=tiny_envs.NoisyEnv {SHARED_GRU}",
        "parts_0 parts_1 parts_2 vector state",
        [2],
    ),
    "mingru": ("env=cartpole network=lstm network.cell=mingru", "obs state", []),
    "trxl": ("env=cartpole network=trxl", "obs state", []),
    "parts": (
        "env=lanes network=lstm",
        "obs action_mask state",
        {"action/lane": [], "action/speed": [1]},
    ),
}
FAST = [("normalised", "pt2")]


def make_camera() -> gym.Env[Any, Any]:
    image = spaces.Box(0, 255, (36, 36, 2), np.uint8)
    return SpaceEnv(image, spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]))


class Exported(NamedTuple):
    run: Path
    file: Path
    out: str  # printed by the export command
    err: str


Export = Callable[..., Exported]


def trained(*overrides: str) -> Path:
    """A small run without evaluation."""
    return train([*small(), "~callbacks.evaluation", *overrides]).run_dir.absolute()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """``exported(case, file_format)`` trains and exports each case once."""
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def run_of(case: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return trained(*CASES[case][0].split())

    @cache
    def export(case: str, file_format: str) -> Exported:
        run = run_of(case)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            assert main(["export", str(run), "--format", file_format]) == 0
        return Exported(run, run / f"policy.{file_format}", out.getvalue(), err.getvalue())

    return lambda case="normalised", file_format="pt2": export(case, file_format)


@pytest.mark.parametrize(
    ("case", "file_format"),
    [
        pytest.param(case, kind, marks=[] if (case, kind) in FAST else [pytest.mark.slow])
        for case in CASES
        for kind in ("pt2", "onnx")
    ],
)
def test_exported_policy_plays_like_the_live_policy(
    exported: Export, case: str, file_format: str
) -> None:
    _, inputs, action_shape = CASES[case]

    run, file, out, err = exported(case, file_format)

    assert "checked on 1,000 observations: max difference" in out
    assert "actions equal" in out
    assert err == ""
    policy = ExportedPolicy.load(file)
    assert list(policy.inputs) == inputs.split()
    parts = action_shape if isinstance(action_shape, dict) else {"action": action_shape}
    assert {name: list(policy.outputs[name].shape) for name in parts} == parts
    live = load_agent(run)
    ours, theirs = (  # the second episode starts with a new recurrent state
        evaluate(each, live.env, n_episodes=2, seed=1, deterministic=True).episodes
        for each in (live.agent, policy)
    )
    assert np.allclose([e[:2] for e in ours], [e[:2] for e in theirs], rtol=1e-4)


@pytest.mark.slow
def test_actions_fit_the_action_space_for_every_batch_size(exported: Export) -> None:
    run, file, *_ = exported("cnn")
    live, policy = load_agent(run), ExportedPolicy.load(file)
    live.env.action_space.seed(0)

    for n_envs in (1, 2, 64, 65):
        images = np.stack([live.env.observation_space.sample() for _ in range(n_envs)])
        actions = policy.act_batch(images[:, ::-1])  # flipped: arrays with negative strides

        assert actions.shape == (n_envs, 2, 2)
        assert all(action in live.env.action_space for action in actions)
        assert (actions == live.agent.act_batch(images[:, ::-1], True)).all()


@pytest.mark.parametrize("file_format", [pytest.param("pt2", marks=pytest.mark.slow), "onnx"])
def test_metadata_has_env_spaces_commit_inputs_and_outputs(
    exported: Export, file_format: str
) -> None:
    run, file, *_ = exported(file_format=file_format)
    policy = ExportedPolicy.load(file)

    env = gym.make("CartPole-v1")
    assert policy.act_batch(np.zeros((0, 4), np.float32)).shape == (0,)
    assert policy.env_name == "CartPole-v1"
    assert policy.metadata["env"]["id"] == "CartPole-v1"
    assert policy.observation_space == env.observation_space
    assert policy.action_space == env.action_space
    summary = json.loads((run / "summary.json").read_text())
    assert policy.metadata["commit"] == summary["git_commit"]
    assert policy.metadata["run"] == run.name
    assert policy.metadata["checkpoint"] == "latest"
    assert policy.metadata["env_steps"] == 64
    assert policy.metadata["inputs"] == {"obs": {"dtype": "float32", "shape": [4], "leaf": ""}}
    assert policy.metadata["outputs"] == {
        "action": {"dtype": "int64", "shape": []},
        "policy": {"dtype": "float32", "shape": [2]},
    }


def test_both_formats_can_be_used_without_this_package(exported: Export) -> None:
    import onnx
    import onnxruntime

    pt2, onnx_file = (exported(file_format=file_format).file for file_format in ("pt2", "onnx"))
    obs = np.array([[0.1, -0.2, 0.3, -0.4]] * 3, dtype=np.float32)

    program = torch.export.load(str(pt2))
    first = program.module()({"obs": torch.from_numpy(obs)})
    session = onnxruntime.InferenceSession(str(onnx_file))
    second = session.run(["policy"], {"obs": obs})[0]

    assert list(first) == ["action", "policy"]
    assert np.allclose(first["policy"].numpy(), second, atol=1e-5)
    assert session.get_inputs()[0].shape == ["batch", 4]
    (props,) = onnx.load(str(onnx_file)).metadata_props
    assert json.loads(props.value)["env_name"] == "CartPole-v1"


def test_file_does_not_contain_the_critic(exported: Export) -> None:
    program = torch.export.load(str(exported().file))

    parts = {"preprocess", "trunk", "head"}
    assert {name.partition(".")[0] for name in program.state_dict} == parts


def with_network(name: str) -> Path:
    """A small run with a network of tests/own_parts.py."""
    return trained("network=own", f"network._target_=own_parts.{name}")


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("CountingCalls", "the exported policy and the live one differ by .*no file was"),
        ("Deciding", "network Deciding cannot be exported as pt2: "),
    ],
)
def test_failed_export_prints_one_line_and_leaves_no_file(
    here: Path, network: str, words: str, capsys: Capture
) -> None:
    run = with_network(network)
    before = sorted(run.iterdir())

    assert main(["export", str(run), "--out", "policy.pt2"]) == 1

    assert re.search(words, error_line(capsys))
    assert not list(here.glob("*policy.pt2*"))
    assert sorted(run.iterdir()) == before


@pytest.mark.slow
def test_network_that_calls_len_on_its_batch_is_exported(here: Path) -> None:
    run = with_network("ByLength")

    assert main(["export", str(run)]) == 0

    policy = ExportedPolicy.load(run / "policy.pt2")
    assert len(policy.act_batch(np.zeros((5, 4), dtype=np.float32))) == 5


def test_out_and_checkpoint_choose_file_and_weights(finished_run: Path) -> None:
    for checkpoint in ("best", "latest"):
        arguments = ["--checkpoint", checkpoint, "--out", f"{checkpoint}.policy"]
        assert main(["export", str(finished_run), *arguments]) == 0

        policy = ExportedPolicy.load(f"{checkpoint}.policy")
        assert policy.metadata["checkpoint"] == checkpoint


def test_unwritable_path_is_a_one_line_error(exported: Export, here: Path, capsys: Capture) -> None:
    run = exported().run
    Path("runs").mkdir()

    for out, words in (
        ("nowhere/policy.pt2", "its folder does not exist; choose another file"),
        ("runs", "--out runs: cannot be written, it is a folder"),
    ):
        assert main(["export", str(run), "--out", out]) == 1
        assert words in error_line(capsys)


def test_missing_package_is_named_with_its_install_command(
    exported: Export, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = exported().run
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    assert main(["export", str(run), "--format", "onnx"]) == 1

    words = "--format onnx needs onnxscript, which is not installed: pip install "
    assert words in error_line(capsys)


def test_file_that_is_not_an_exported_policy_is_refused(here: Path) -> None:
    Path("words.onnx").write_text("no graph")
    with zipfile.ZipFile("empty.pt2", "w") as archive:
        archive.writestr("nothing", "")
    foreign = torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(2, 1),))
    torch.export.save(foreign, "foreign.pt2")

    for name, words in (
        ("words.onnx", "words.onnx is not an exported policy: "),
        ("empty.pt2", "empty.pt2 is not an exported policy: "),
        ("foreign.pt2", "foreign.pt2 has no metadata; create it with"),
        ("nowhere.pt2", "nowhere.pt2 cannot be read: No such file"),
        (".", "export the run first: python -m ml_pipeline export"),
    ):
        with pytest.raises(PolicyFileError, match=words):
            ExportedPolicy.load(name, trust=True)


def test_input_names_of_leaves_are_unique() -> None:
    assert _leaf_names([""], []) == {"obs": ""}
    assert _leaf_names(["arm/angle", "arm_angle", "state"], ["state"]) == {
        "arm_angle": "arm/angle",
        "obs_arm_angle": "arm_angle",
        "obs_state": "state",
    }


def test_exported_policy_needs_a_mask_and_acts_greedily(exported: Export) -> None:
    masked = ExportedPolicy.load(exported("mask in info").file)
    obs, info = ForbiddingEnv().reset(seed=0)
    mask = masked.mask_of({"action_mask": [info["action_mask"]]})
    assert mask is not None

    action = masked.act_batch(obs[None], action_mask=mask)[0]

    assert mask[0, action]
    with pytest.raises(Exception, match="this policy needs action masks"):
        masked.act_batch(obs[None])
    with pytest.raises(Exception, match="allows no action"):
        masked.act_batch(obs[None], action_mask=np.zeros_like(mask))
    with pytest.raises(ValueError, match="acts greedily"):
        masked.act_batch(obs[None], False, action_mask=mask)


def test_play_prints_the_same_episodes_for_a_file_and_its_run(
    exported: Export, capsys: Capture
) -> None:
    run, file, *_ = exported()
    capsys.readouterr()  # of the training
    outputs = []
    for policy in (file, run):
        assert main(["play", str(policy), "--episodes", "3", "--seed", "7"]) == 0
        outputs.append(capsys.readouterr().out)

    assert outputs[0] == outputs[1]
    title, *episodes, mean = outputs[0].splitlines()
    assert title == "CartPole-v1, greedy actions"
    assert [line.split(":")[0] for line in episodes] == ["seed 7", "seed 8", "seed 9"]
    returns = [float(line.split("return ")[1].split(",")[0]) for line in episodes]
    assert mean == f"mean return of 3: {shown_return(sum(returns) / 3)}"


def test_play_renders_a_file_and_a_run(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    run, file, *_ = exported()

    for policy in (file, run):
        assert main(["play", str(policy), "--episodes", "1", "--render", "human"]) == 0


@linux_only
def test_invisible_window_is_remarked_on(
    exported: Export, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SDL_NO_SIGNAL_HANDLERS", "1")  # restored after the test
    command = ["play", str(exported().run), "--episodes", "1"]

    assert main([*command, "--render", "human"]) == 0
    assert "--render human: there is no display (DISPLAY is not set)" in capfd.readouterr().err

    assert main(command) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@linux_only
def test_sigterm_ends_a_command_that_shows_episodes(exported: Export) -> None:
    words = ["play", str(exported().run), "--episodes", "1000", "--render", "human"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ml_pipeline", *words],
        env={**os.environ, "SDL_VIDEODRIVER": "dummy"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        while "seed 0: " not in process.stdout.readline():
            assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_play_refuses_an_env_that_has_changed(
    exported: Export, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exported("shared gru").file
    changed = SpaceEnv(spaces.Box(0, 255, (9, 9, 2), np.uint8), spaces.Discrete(2))
    monkeypatch.setattr("tiny_envs.NoisyEnv", lambda: changed)

    assert main(["play", str(file)]) == 1

    words = "env NoisyEnv has the space Box(0, 255, (9, 9, 2), uint8)"
    assert words in error_line(capsys)
