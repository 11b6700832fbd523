"""A run folder of someone else: no code of its author runs unasked, and damage is one line."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Capture, change_config, contents, error_line, small
from omegaconf import DictConfig

from ml_pipeline.__main__ import main
from ml_pipeline.assembly import run as build
from ml_pipeline.assembly.compose import compose_config, plain_config
from ml_pipeline.assembly.run import RunResult, load_agent, train
from ml_pipeline.assembly.script import exit_code
from ml_pipeline.errors import UserError
from ml_pipeline.runs.checkpoint import write_sealed
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.runs.signatures import UntrustedError, is_signed

SETTINGS = [*small(), "~callbacks.evaluation", "~callbacks.media"]

EVIL = """
import pathlib
import gymnasium
from ml_pipeline.algorithms.ppo.algorithm import PPO
from ml_pipeline.training.contracts import Callback as Base
pathlib.Path("sprung").touch()
class Env(gymnasium.Env): ...
class Callback(Base): ...
"""


@pytest.fixture
def run(plain_run: Path, here: Path) -> RunFolder:
    """A copy of the run that this user made; a module evil.py is in the current folder."""
    (here / "evil.py").write_text(EVIL)
    shutil.copytree(plain_run, here / "run")
    sys.modules.pop("evil", None)
    return RunFolder.open("run")


@pytest.fixture
def foreign(run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunFolder:
    """The same, made by another user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    return run


@cache
def composed() -> DictConfig:
    return compose_config(["total_steps=128"])


def resume(path: Path | str, *, trust: bool = False) -> RunResult:
    """``train([f"resume={path}", "total_steps=128"])``, but Hydra composes the config only once."""
    cfg = deepcopy(composed())
    cfg.resume = str(path)
    cfg.trust = trust
    return build.run(cfg, [f"resume={path}", "total_steps=128", f"trust={trust}".lower()])


COMMANDS: dict[str, Callable[[str], int]] = {
    "evaluate": lambda run: main(["evaluate", run, "--episodes", "1"]),
    "export": lambda run: main(["export", run]),
    "play": lambda run: main(["play", run, "--episodes", "1"]),
    "resume": lambda run: exit_code(lambda: resume(run)),
}

# What the refusal shows, and the other keys of the config that lead to it.
NAMES: dict[str, dict[str, Any]] = {
    "network._target_=os.system": {},
    "network._target_=evil.Network": {},
    "network.encoder._target_=evil.Network": {
        "network._target_": "ml_pipeline.policy.recurrent.Recurrent"
    },
    "network.more.0._target_=evil.Network": {"network.more": [{"_target_": "evil.Network"}]},
    "env.target=evil.Env": {},
    "env.id=evil:Env-v0": {},
    "env.id=GymV26Environment-v0": {},
    "env.kwargs.x._target_=evil.Env": {},
    "env.wrappers.x._target_=evil.wrap": {},
    "callbacks.x._target_=evil.Callback": {},
    "callbacks.x.y._target_=evil.Callback": {},
    "logger.x._target_=evil.Logger": {},
    "agent.algorithm=evil.PPO": {},
    "agent.learning_rate_schedule=evil.schedule": {},
    "agent.loss._target_=evil.loss": {},
    "agent.loss.mirror_obs=evil.mirror": {
        "agent.loss._target_": "ml_pipeline.algorithms.ppo.ideas.symmetry.symmetric_loss"
    },
    "agent.optimizer._target_=evil.Adam": {},
    "agent.advantage._target_=evil.advantage": {},
    "agent.on_rollout._target_=evil.hook": {},
    # Names of the known packages that would import or write what their arguments say.
    "env.target=gymnasium.make": {"env.kwargs": {"id": "evil:Env-v0"}},
    "env.target=gymnasium.Wrapper.evil": {},
    "env.target=ml_pipeline.targets.import_dotted": {"env.kwargs": {"path": "evil.Env", "key": ""}},
    "env.kwargs.game._target_=evil.Env": {"env.target": "ml_pipeline.games.petting_zoo.PettingZoo"},
    "env.wrappers.x._target_=gymnasium.wrappers.RecordVideo": {
        "env.wrappers.x.video_folder": "videos"
    },
    "network._target_=torch.nn.modules.module.importlib.import_module": {"network.name": "evil"},
    "network._target_=ml_pipeline.extras.import_extra": {
        "network.module": "evil",
        "network.needed_by": "",
    },
    "callbacks.x._target_=ml_pipeline.runs.run_folder.RunFolder": {"callbacks.x.path": "x"},
}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        *((command, name) for name in NAMES for command in ("evaluate", "resume")),
        *((command, next(iter(NAMES))) for command in ("export", "play")),
    ],
)
def test_config_of_another_user_runs_no_code(
    command: str, shown: str, foreign: RunFolder, here: Path, capsys: Capture
) -> None:
    key, _, value = shown.partition("=")
    for name, each in {key: value, **NAMES[shown]}.items():
        change_config(foreign.path, name, each)
    before = contents(foreign.path)

    assert COMMANDS[command](str(foreign.path)) == 1

    assert shown in error_line(capsys)
    assert not (here / "sprung").exists()
    assert not (here / "videos").exists()
    assert contents(foreign.path) == before


def test_refusal_names_the_file_the_key_the_value_and_the_fix(
    foreign: RunFolder, capsys: Capture
) -> None:
    change_config(foreign.path, "env.target", "evil.Env")

    assert main(["evaluate", str(foreign.path)]) == 1

    error = error_line(capsys)
    assert error.startswith(f"{foreign.config}: env.target=evil.Env: ")
    assert "this user did not write the file, or it has changed since" in error
    assert "add --trust (with resume=: trust=true)" in error


def test_shipped_ideas_in_a_foreign_config_need_no_trust(foreign: RunFolder) -> None:
    idea = "ml_pipeline.algorithms.ppo.ideas.plasticity.Plasticity"
    change_config(foreign.path, "agent.on_rollout._target_", idea)

    assert main(["evaluate", str(foreign.path), "--episodes", "1"]) == 0


@pytest.mark.parametrize("command", ["evaluate", "play", "resume"])
def test_trust_runs_the_code(
    command: str, foreign: RunFolder, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    change_config(foreign.path, "agent.algorithm", "evil.PPO")
    path = str(foreign.path)

    if command == "resume":
        assert train([f"resume={path}", "total_steps=128", "trust=true"]).env_steps == 128
    else:
        assert main([command, path, "--trust"]) == 0

    assert (here / "sprung").exists()


def test_foreign_run_of_known_parts_needs_no_trust_and_becomes_own(foreign: RunFolder) -> None:
    for path in foreign.checkpoints.glob("*.envs"):
        path.unlink()  # another user's env snapshots do need trust
    assert not is_signed("config", foreign.config.read_bytes())

    load_agent(foreign.path)
    assert resume(foreign.path).env_steps == 128

    assert is_signed("config", foreign.config.read_bytes())


def test_compare_imports_nothing_of_another_user(
    foreign: RunFolder, here: Path, capsys: Capture
) -> None:
    change_config(foreign.path, "env.target", "evil.Env")
    assert plain_config(foreign.path)["env"]["target"] == "evil.Env"

    change_config(foreign.path, "agent.algorithm", "evil.PPO")
    assert main(["compare", str(foreign.path)]) == 1

    assert "left out: run/config.yaml: agent.algorithm=evil.PPO: " in capsys.readouterr().err
    assert not (here / "sprung").exists()


def test_what_the_user_types_is_trusted(foreign: RunFolder, here: Path) -> None:
    change_config(foreign.path, "callbacks.theirs", {"_target_": "evil.Callback"})
    mine = "+callbacks.mine={_target_: own_parts.CountChildren}"
    arguments = [f"resume={foreign.path}", "total_steps=128", mine, "trust=false"]
    for path in foreign.checkpoints.glob("*.envs"):
        path.unlink()

    with pytest.raises(UntrustedError, match=r"callbacks\.theirs\._target_=evil\.Callback"):
        train(arguments)
    assert train([*arguments, "callbacks=default", "~callbacks.evaluation"]).env_steps == 128

    assert (here / "children").exists()
    assert not (here / "sprung").exists()


def test_key_with_a_dot_does_not_pass_as_typed(foreign: RunFolder, here: Path) -> None:
    config = yaml.safe_load(foreign.config.read_text())
    config["callbacks"]["checkpoints.every_steps"] = {"_target_": "evil.Callback"}
    foreign.config.write_text(yaml.safe_dump(config))

    with pytest.raises(UserError, match=r"evil\.Callback"):
        train([f"resume={foreign.path}", "callbacks.checkpoints.every_steps=32"])

    assert not (here / "sprung").exists()


def test_own_run_of_an_own_env_needs_no_trust_until_its_config_is_edited(
    here: Path, capsys: Capture
) -> None:
    own = [*SETTINGS, "env.target=tiny_envs.CountingEnv"]
    run = RunFolder.open(train(own).run_dir)
    path, text = str(run.path), run.config.read_text()

    assert main(["evaluate", path, "--episodes", "1"]) == 0
    assert main(["play", path, "--episodes", "1"]) == 0
    assert train([f"resume={path}", "total_steps=128"]).env_steps == 128
    assert main(["evaluate", path, "--episodes", "1"]) == 0
    capsys.readouterr()

    run.config.write_text(text.replace("seed: 1", "seed: 2"))
    assert main(["evaluate", path, "--episodes", "1"]) == 1
    changed, error = capsys.readouterr().err.splitlines()
    assert "config.yaml: changed since it was written" in changed
    assert "env.target=tiny_envs.CountingEnv: " in error
    assert "or it has changed since" in error
    assert main(["evaluate", path, "--episodes", "1", "--trust"]) == 0


def test_run_without_a_key_can_be_evaluated_with_trust(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "a file"))

    run = train([*SETTINGS, "env.target=tiny_envs.CountingEnv"]).run_dir

    with pytest.raises(UntrustedError):
        load_agent(run)
    assert load_agent(run, trust=True).env_steps == 64


def test_environment_variable_of_the_reader_stays_secret(
    foreign: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    text = foreign.config.read_text()
    for value in ("'${oc.env:MY_TOKEN}'", '"\\x24{oc.env:MY_TOKEN}"'):
        foreign.config.write_text(text.replace("kwargs: {}", f"kwargs: {{x: {value}}}"))

        assert main(["compare", str(foreign.path)]) == 1
        assert COMMANDS["export"](str(foreign.path)) == 1

        error = capsys.readouterr().err
        assert "env.kwargs.x=${oc.env:MY_TOKEN}: interpolations are not allowed" in error
        assert "hunter2" not in error


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
CONFIGS: dict[str, bytes] = {
    "list": b"[1, 2]",
    "scalar": b"7",
    "word": b"hello",
    "null": b"null",
    "empty": b"",
    "binary": bytes(range(256)),
    "not closed": b"a: [",
    "deep list": b"[" * 100_000,
    "deep mapping": b"".join(b" " * i + b"a:\n" for i in range(2_000)),
    "deep braces": b"{a: " * 100_000,
    "aliases": BOMB.encode(),
    "python tag": b"!!python/object/apply:os.system [touch sprung]",
    "huge": b"env: " + b"x" * 2_000_000,
    "two documents": b"seed: 1\n---\nseed: 2\n",
    "unknown key": b"colour: red\nnetwork: {_target_: ml_pipeline.policy.networks.MLP}\n",
    "list as key": b"? [a]\n: b\n",
}
VALUES: list[tuple[str, Any]] = [
    ("seed", "9" * 5_000),
    ("seed", int("9" * 400)),
    ("seed", [1]),
    ("total_steps", int("9" * 400)),
    ("total_steps", {}),
    ("n_envs", int("9" * 400)),
    ("n_envs", "many"),
    ("agent", "ppo"),
    ("agent", ["ppo"]),
    ("agent.algorithm", 5),
    ("agent.algorithm", {"a": 1}),
    ("agent.n_steps", int("9" * 400)),
    ("agent.gamma", "high"),
    ("agent.colour", "red"),
    ("env", []),
    ("env", 5),
    ("env.id", ["CartPole-v1"]),
    ("env.id", "\x1b[2J\ud7ff"),
    ("env.kwargs", [1]),
    ("env.kwargs", {1: 2}),
    ("env.kwargs", {"x": {"y": [1]}}),
    ("env.wrappers", {"x": 5}),
    ("env.wrappers", {"x": {"_target_": ["gymnasium.Wrapper"]}}),
    ("network", {"hidden_sizes": [8]}),
    ("network", {"_target_": 5}),
    ("network", {"_target_": "torch.nn.Linear", "in_features": "x", "out_features": 2}),
    ("network", {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}),
    ("network", {"_target_": "torch.nn.Sequential"}),
    ("network.hidden_sizes", "wide"),
    ("network.hidden_sizes", [10**30]),
    ("network.activation", {"a": 1}),
    ("vec_env.mode", 5),
    ("device", "abacus"),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_damaged_config_is_one_line(
    name: str, foreign: RunFolder, here: Path, capsys: Capture
) -> None:
    foreign.config.write_bytes(CONFIGS[name])

    for command in ("evaluate", "resume"):
        assert COMMANDS[command](str(foreign.path)) == 1
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert "config.yaml: not the config of a run" in error.splitlines()[0]
        assert len(error) < 2_000
    assert not (here / "sprung").exists()


@pytest.mark.parametrize(
    ("key", "value"), VALUES, ids=[f"{key}={value!s:.40}" for key, value in VALUES]
)
def test_wrong_value_in_a_config_is_a_user_error(key: str, value: Any, foreign: RunFolder) -> None:
    change_config(foreign.path, key, value)

    with pytest.raises(UserError):
        load_agent(foreign.path)
    with pytest.raises(UserError):
        resume(foreign.path, trust=True)


@pytest.mark.parametrize(
    "path",
    ["x" * 5_000, "a\0b", "run/" * 2_000, "\udcff"],
    ids=["long name", "null byte", "long path", "not UTF-8"],
)
def test_impossible_path_is_one_line(path: str, here: Path, capsys: Capture) -> None:
    for command in ("evaluate", "export", "play", "compare", "serve"):
        assert main([command, path]) == 1
        assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(UserError):
        train([f'resume="{path}"'])


SUMMARIES: dict[str, str] = {
    "not closed": "{",
    "list": "[]",
    "number": "5",
    "deep": "[" * 100_000,
    "nan": '{"seconds": NaN}',
    "infinite": '{"seconds": 1e999}',
    "huge": f'{{"seconds": {"9" * 400}}}',
    "list of seconds": '{"seconds": [1]}',
    "word": '{"train_seconds": "nan"}',
    "commands": '{"commands": 5}',
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_damaged_summary_is_one_line(name: str, run: RunFolder, capsys: Capture) -> None:
    run.summary.write_text(SUMMARIES[name])

    with pytest.raises(UserError, match=r"summary\.json"):
        resume(run.path)
    assert main(["runs", "--root", "."]) == 0


def write_checkpoint(run: RunFolder, state: Any) -> None:
    """With a correct checksum."""
    content = io.BytesIO()
    torch.save(state, content)
    write_sealed(run.checkpoints / "latest.pt", content.getvalue())


STATES: list[tuple[str, Any]] = [
    *((key, None) for key in ("agent", "env_steps", "iteration", "global_generators", "config")),
    *((f"agent.{key}", None) for key in ("model", "adam", "spaces", "act_generator")),
    *((f"agent.{key}", 5) for key in ("model", "adam", "spaces", "act_generator")),
    *((key, "abc") for key in ("agent", "iteration", "env_steps", "n_episodes", "callbacks")),
    *((key, [1, "a"]) for key in ("collector", "generator", "learning_rate", "recent_episodes")),
    *((f"global_generators.{key}", [1]) for key in ("python", "numpy", "torch")),
    ("env_steps", -1),
    ("env_steps", 1.5),
    ("env_snapshots", 5),
    ("config", 5),
    ("config", "{a: " * 100_000),
    ("config", BOMB),
    ("config", "- 1"),
    ("recent_episodes", [["a", "b", "c"]]),
    ("recent_episodes", [5]),
    ("callbacks.checkpoints.best_return", "high"),
    ("callbacks.checkpoints", 5),
    ("agent.adam.mean", torch.zeros(3)),
    ("generator", torch.zeros(3)),
    ("generator", torch.zeros(5_056, dtype=torch.int64)),
    ("global_generators.torch", torch.zeros(3, dtype=torch.uint8)),
]


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(key, value, id=f"{key}={value!s:.20}") for key, value in STATES],
)
def test_wrong_value_in_a_checkpoint_is_a_user_error(key: str, value: Any, run: RunFolder) -> None:
    """None removes the key."""
    state = torch.load(run.checkpoints / "latest.pt", weights_only=True)
    *parents, last = key.split(".")
    part = state
    for parent in parents:
        part = part[parent]
    if value is None:
        del part[last]
    else:
        part[last] = value
    write_checkpoint(run, state)

    with pytest.raises(UserError):
        resume(run.path)


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "unknown", "list"])
def test_wrong_weights_are_a_user_error(change: str, run: RunFolder) -> None:
    state = torch.load(run.checkpoints / "latest.pt", weights_only=True)
    model = state["agent"]["model"]
    name = next(iter(model))
    if change == "missing":
        del model[name]
    else:
        values = {
            "shape": torch.zeros(2, 2, 2),
            "dtype": torch.zeros(model[name].shape, dtype=torch.complex64),
            "unknown": torch.zeros(1),
            "list": [1.0],
        }
        model["unknown" if change == "unknown" else name] = values[change]
    write_checkpoint(run, state)

    with pytest.raises(UserError):
        load_agent(run.path, "latest")
    with pytest.raises(UserError):
        resume(run.path)


@pytest.mark.parametrize("state", [[], 5, {"format": 2}, {"format": "2"}])
def test_checkpoint_of_another_kind_is_a_user_error(state: Any, run: RunFolder) -> None:
    write_checkpoint(run, state)

    with pytest.raises(UserError, match=r"checkpoint"):
        load_agent(run.path, "latest")
    with pytest.raises(UserError, match=r"checkpoint"):
        resume(run.path)


def test_texts_of_a_folder_are_shown_as_they_are(
    run: RunFolder, here: Path, capsys: Capture
) -> None:
    shutil.copytree(run.path, here / "runs" / "[red]a" / "b")
    shutil.copytree(run.path, here / "runs" / "[red]a" / "c")
    change_config(
        RunFolder(here / "runs" / "[red]a" / "c").path, "objective", "[/red] \x1b[2J\u202e:smile:"
    )

    assert main(["runs"]) == 0

    output = capsys.readouterr().out
    assert "[/red] \ufffd[2J\ufffd:smile:" in output
    assert "runs/[red]a/b" in output


@pytest.mark.slow
def test_comparison_shows_values_of_a_config_as_they_are(
    run: RunFolder, here: Path, capsys: Capture
) -> None:
    other = RunFolder(here / "other")
    shutil.copytree(run.path, other.path)
    for each in (run, other):  # not auto, whose choice summary.json has
        change_config(each.path, "network._target_", "ml_pipeline.policy.networks.MLP")
    change_config(run.path, "network.activation", "$\\frac{$ </script><script>alert(1)</script>")
    change_config(other.path, "network.activation", "[/x] <img src=x onerror=alert(1)>")

    assert main(["compare", str(run.path), str(other.path), "--report", "report"]) == 0

    assert "[/x] <img src=x" in capsys.readouterr().out
    page = (here / "report" / "report.html").read_text()
    assert "&lt;img src=x" in page
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page


WRAPPERS: dict[str, dict[str, Any]] = {
    "text for a function": {"_target_": "gymnasium.wrappers.TransformReward", "func": "numpy.sign"},
    "entry for a function": {
        "_target_": "gymnasium.wrappers.TransformObservation",
        "func": {"_target_": "numpy.sign"},
        "observation_space": None,
    },
    "number for a trigger": {
        "_target_": "gymnasium.wrappers.RecordVideo",
        "video_folder": "videos",
        "step_trigger": 5,
    },
    "no env": {"_target_": "gymnasium.spaces.Discrete"},
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrong_wrapper_in_a_config_is_one_line_in_every_command(
    name: str, run: RunFolder, capsys: Capture
) -> None:
    change_config(run.path, "env.wrappers", {"x": WRAPPERS[name]})
    path = str(run.path)

    for command in (*COMMANDS, "tournament"):
        code = COMMANDS.get(command, lambda path: main(["tournament", path, "random"]))(path)

        assert code == 1
        error = capsys.readouterr().err
        assert "env.wrappers.x" in error
        assert "Traceback" not in error


def test_export_shows_where_an_env_raises_in_one_line(here: Path, capsys: Capture) -> None:
    scaled = "+env.wrappers.scale={_target_:tiny_envs.scale_reward,factor:2}"
    run = RunFolder(train([*SETTINGS, scaled]).run_dir)
    change_config(run.path, "env.wrappers.scale.factor", "twice")

    assert main(["export", str(run.path), "--trust"]) == 1

    error = error_line(capsys)
    assert error.startswith("the env raised TypeError: ")
    assert "(tiny_envs.py:" in error
