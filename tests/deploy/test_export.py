"""One file per policy: it does what the live policy does, says what it is, and runs no code."""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import small
from gymnasium import spaces
from tiny_envs import ForbiddingEnv, SpaceEnv

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.build import load_agent, train
from ml_pipeline.deploy.export import _leaf_names
from ml_pipeline.deploy.exported import ExportedPolicy, PolicyFileError

pytestmark = pytest.mark.xdist_group("export")  # its fixtures are made once

SMALL_CNN = "{channels: [4], kernels: [3], strides: [1], hidden_size: 8}"

# What is trained -> the inputs and the shape of the action that the file must have.
CASES: dict[str, tuple[list[str], list[str], list[int]]] = {
    "cartpole": (["env=cartpole"], ["obs"], []),
    "normalised": (["env=cartpole", "agent.normalize_obs=true"], ["obs"], []),
    "gaussian": (["env=pendulum", "agent.log_std_init=1"], ["obs"], [1]),
    "squashed": (["env=pendulum", "agent.box_policy=squashed"], ["obs"], [1]),
    "gsde": (["env=pendulum", "agent.box_policy=gsde"], ["obs"], [1]),
    "mixed": (
        ["env.target=tiny_envs.MixedEnv", "network=dict", f"+network.cnn={SMALL_CNN}"],
        ["choice", "image", "vector"],
        [2],
    ),
    "cnn": (
        ["env.target=test_export.make_camera", "network=cnn", "network.channels=[4,4,4]"],
        ["obs"],
        [2, 2],
    ),
    "mask in obs": (
        ["env.target=tiny_envs.ForbiddingEnv", "+env.kwargs.where=obs"],
        ["action_mask", "observation"],
        [],
    ),
    "mask in info": (
        ["env.target=tiny_envs.ForbiddingEnv", "agent.action_mask=info"],
        ["obs", "action_mask"],
        [],
    ),
    "lstm": (["env=cartpole", "network=lstm"], ["obs", "state"], []),
    "shared gru": (
        [
            "env.target=tiny_envs.NoisyEnv",
            "network=lstm",
            "network.cell=gru",
            "agent.shared_trunk=true",
        ],
        ["parts_0", "parts_1", "parts_2", "vector", "state"],
        [2],
    ),
}
LONGER = [("lstm", "pt2"), *((case, "onnx") for case in CASES if case not in ("normalised", "cnn"))]


def make_camera() -> gym.Env[Any, Any]:
    image = spaces.Box(0, 255, (36, 36, 2), np.uint8)
    return SpaceEnv(image, spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]))


def trained(*overrides: str) -> Path:
    """The folder of a small run, without the time that workers and evaluation take."""
    quick = ["vec_env=serial", "~callbacks.evaluation"]
    given = [each for each in small() if "evaluation" not in each]
    return train([*given, *quick, *overrides]).run_dir


@pytest.fixture
def run(here: Path) -> Path:
    return trained()


def exported(run: Path, file_format: str = "pt2") -> Path:
    assert main(["export", str(run), "--format", file_format]) == 0
    return run / f"policy.{file_format}"


@pytest.mark.parametrize(
    ("case", "file_format"),
    [
        pytest.param(case, kind, marks=[pytest.mark.slow] if (case, kind) in LONGER else [])
        for case in CASES
        for kind in ("pt2", "onnx")
    ],
)
def test_an_exported_policy_plays_as_the_live_one(
    here: Path, case: str, file_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, inputs, action_shape = CASES[case]
    run = trained(*overrides)
    capsys.readouterr()

    file = exported(run, file_format)

    told = capsys.readouterr()
    assert "checked on 1,000 observations: max difference" in told.out
    assert "actions equal" in told.out
    assert told.err == ""
    policy = ExportedPolicy.load(file)
    assert list(policy.inputs) == inputs
    assert list(policy.outputs["action"].shape) == action_shape
    live = load_agent(run)
    for seed in (1, 2):  # the second episode begins with an empty memory
        ours, theirs = (
            evaluate(each, live.env, n_episodes=2, seed=seed, deterministic=True).episodes
            for each in (live.agent, policy)
        )
        assert np.allclose(ours, theirs, rtol=1e-4)


def test_actions_fit_the_action_space_whatever_the_batch(here: Path) -> None:
    live = load_agent(run := trained(*CASES["cnn"][0]))
    policy = ExportedPolicy.load(exported(run))
    live.env.action_space.seed(0)

    for n_envs in (1, 2, 64, 65):
        images = np.stack([live.env.observation_space.sample() for _ in range(n_envs)])
        actions = policy.act_batch(images[:, ::-1])  # also of arrays that run backwards

        assert actions.shape == (n_envs, 2, 2)
        assert all(action in live.env.action_space for action in actions)
        assert (actions == live.agent.act_batch(images[:, ::-1], True)).all()


@pytest.mark.parametrize("file_format", ["pt2", "onnx"])
def test_the_metadata_names_env_spaces_commit_inputs_and_outputs(
    run: Path, file_format: str
) -> None:
    policy = ExportedPolicy.load(exported(run, file_format))

    env = gym.make("CartPole-v1")
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


def test_both_formats_can_be_used_without_this_package(run: Path) -> None:
    import onnx
    import onnxruntime

    pt2, onnx_file = exported(run), exported(run, "onnx")
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


def test_the_critic_stays_behind(run: Path) -> None:
    program = torch.export.load(str(exported(run)))

    assert {name.partition(".")[0] for name in program.state_dict} == {"actor", "policy_head"}


def test_a_policy_that_disagrees_leaves_no_file(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(
        "~network.hidden_sizes", "~network.activation", "network._target_=own_parts.CountingCalls"
    )
    before = sorted(run.iterdir())

    assert main(["export", str(run), "--out", "policy.pt2"]) == 1

    error = capsys.readouterr().err
    assert "the exported policy and the live one disagree by" in error
    assert "no file was written" in error
    assert error.count("\n") == 1
    assert not list(here.glob("*policy.pt2*"))
    assert sorted(run.iterdir()) == before


def test_a_network_that_is_no_graph_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(
        "~network.hidden_sizes", "~network.activation", "network._target_=own_parts.Deciding"
    )

    assert main(["export", str(run)]) == 1

    error = capsys.readouterr().err
    assert "network Deciding cannot be exported as pt2: " in error
    assert error.count("\n") == 1
    assert not (run / "policy.pt2").exists()


@pytest.mark.slow
def test_a_network_that_speaks_of_its_batch_as_len_is_exported(here: Path) -> None:
    run = trained(
        "~network.hidden_sizes", "~network.activation", "network._target_=own_parts.ByLength"
    )

    policy = ExportedPolicy.load(exported(run))

    assert len(policy.act_batch(np.zeros((5, 4), dtype=np.float32))) == 5


def test_out_and_checkpoint_choose_file_and_weights(here: Path) -> None:
    run = train([*small(), "vec_env=serial"]).run_dir

    for checkpoint in ("best", "latest"):
        arguments = ["--checkpoint", checkpoint, "--out", f"{checkpoint}.policy"]
        assert main(["export", str(run), *arguments]) == 0

    for checkpoint in ("best", "latest"):
        policy = ExportedPolicy.load(f"{checkpoint}.policy")
        assert policy.metadata["checkpoint"] == checkpoint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "nowhere/policy.pt2"], "its folder does not exist; choose another with --out"),
        (["--out", "runs"], "runs cannot be written: it is a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), *arguments]) == 1

    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_missing_package_is_named_with_its_command(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    assert main(["export", str(run), "--format", "onnx"]) == 1

    error = capsys.readouterr().err
    assert "--format onnx needs onnxscript, which is not installed: pip install " in error


def test_what_is_no_exported_policy_is_refused(here: Path) -> None:
    Path("words.onnx").write_text("no graph")
    with zipfile.ZipFile("empty.pt2", "w") as archive:
        archive.writestr("nothing", "")
    foreign = torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(2, 1),))
    torch.export.save(foreign, "foreign.pt2")

    for name, words in (
        ("words.onnx", "words.onnx is no exported policy: "),
        ("empty.pt2", "empty.pt2 is no exported policy: "),
        ("foreign.pt2", "foreign.pt2 was not made by python -m ml_pipeline export"),
        ("nowhere.pt2", "nowhere.pt2 cannot be read: No such file"),
        (".", "export a run first: python -m ml_pipeline export"),
    ):
        with pytest.raises(PolicyFileError, match=words):
            ExportedPolicy.load(name)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung").absolute(),)


def test_a_pickle_within_a_pt2_is_not_run(run: Path, here: Path) -> None:
    with zipfile.ZipFile(exported(run)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = [name for name in members if name.endswith(".pt")]
    torch.save(Trap(), "trap.pt")
    for name in pickled:
        members[name] = Path("trap.pt").read_bytes()
    with zipfile.ZipFile("trap.pt2", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)

    with pytest.raises(PolicyFileError, match="is no exported policy"):
        ExportedPolicy.load("trap.pt2")

    assert pickled
    assert not Path("sprung").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert Path("sprung").exists()  # so the trap is one


def test_leaves_give_names_that_never_meet() -> None:
    assert _leaf_names([""], []) == {"obs": ""}
    assert _leaf_names(["arm/angle", "arm_angle", "state"], ["state"]) == {
        "arm_angle": "arm/angle",
        "obs_arm_angle": "arm_angle",
        "obs_state": "state",
    }


def test_an_exported_policy_refuses_what_it_cannot_do(here: Path) -> None:
    masked = ExportedPolicy.load(exported(trained(*CASES["mask in info"][0])))
    obs, info = ForbiddingEnv().reset(seed=0)
    mask = masked.mask_of({"action_mask": [info["action_mask"]]})
    assert mask is not None

    action = masked.act_batch(obs[None], action_mask=mask)[0]

    assert mask[0, action]
    with pytest.raises(Exception, match="this policy wants masks"):
        masked.act_batch(obs[None])
    with pytest.raises(Exception, match="allows no action"):
        masked.act_batch(obs[None], action_mask=np.zeros_like(mask))
    with pytest.raises(ValueError, match="acts greedily"):
        masked.act_batch(obs[None], False, action_mask=mask)


def test_play_prints_the_same_episodes_for_a_file_and_its_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exported(run)
    outputs = []
    for policy in (file, run):
        capsys.readouterr()
        assert main(["play", str(policy), "--episodes", "3", "--seed", "7"]) == 0
        outputs.append(capsys.readouterr().out)

    assert outputs[0] == outputs[1]
    title, *episodes, mean = outputs[0].splitlines()
    assert title == "CartPole-v1, greedy actions"
    assert [line.split(":")[0] for line in episodes] == ["seed 7", "seed 8", "seed 9"]
    returns = [float(line.split("return ")[1].split(",")[0]) for line in episodes]
    assert mean == f"mean return of 3: {sum(returns) / 3:.1f}"


@pytest.mark.parametrize("kind", ["file", "run"])
def test_play_shows_a_window(run: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    policy = exported(run) if kind == "file" else run

    assert main(["play", str(policy), "--episodes", "1", "--render", "human"]) == 0


def test_play_refuses_an_env_that_has_changed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exported(trained(*CASES["cnn"][0]))
    changed = SpaceEnv(spaces.Box(0, 255, (9, 9, 2), np.uint8), spaces.Discrete(2))
    monkeypatch.setattr("test_export.make_camera", lambda: changed)

    assert main(["play", str(file)]) == 1

    error = capsys.readouterr().err
    assert "env make_camera has Box(0, 255, (9, 9, 2), uint8)" in error
    assert error.count("\n") == 1
