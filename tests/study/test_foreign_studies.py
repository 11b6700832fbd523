"""A study folder of someone else: nothing of it runs or is written unasked; damage is one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Capture, contents, error_line, small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import train

optuna = pytest.importorskip("optuna")

from ml_pipeline.study.folder import StudyFolder, StudySettings  # noqa: E402

EVIL = """
import pathlib
from gymnasium.envs.classic_control import CartPoleEnv
pathlib.Path("sprung").touch()
class Env(CartPoleEnv): ...
"""
SPACE = {"agent.gamma": {"low": 0.9, "high": 0.99}}
OVERRIDES = [*small(), "~callbacks.media"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A study with one complete trial, which this user signed."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = train([*OVERRIDES, "agent.gamma=0.95"])
        study = StudyFolder("mine")
        study.make()
        study.write(StudySettings(OVERRIDES, SPACE, 1, 1, "rollout/episode_return"))
        trial = optuna.trial.create_trial(
            value=1.0,
            params={"agent.gamma": 0.95},
            distributions={"agent.gamma": optuna.distributions.FloatDistribution(0.9, 0.99)},
            user_attrs={"run_dir": str(run.run_dir), "seed": 1, "seconds": 1.0},
        )
        study.add_trial(trial)
        yield folder


@pytest.fixture
def study(template: Path, here: Path) -> Path:
    """A copy of the study that this user made; a module evil.py is in the current folder."""
    shutil.copytree(template, here, dirs_exist_ok=True)
    (here / "evil.py").write_text(EVIL)
    return here / "studies" / "mine"


@pytest.fixture
def foreign(study: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same, made by another user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    return study


def change(study: Path, key: str, value: object) -> None:
    settings = yaml.safe_load((study / "study.yaml").read_text())
    settings[key] = value
    (study / "study.yaml").write_text(yaml.safe_dump(settings))


def kept(here: Path) -> dict[Path, bytes]:
    """What must stay as it is; reading a journal needs locks."""
    found = contents(here / "conf") | contents(here / "studies")
    return {path: content for path, content in found.items() if "lock" not in path.name}


BEST = ["study", "best", "mine", "--episodes", "1"]
DEPLOY = [*BEST, "--deploy", "live"]
START = ["study", "start", "mine"]
COMMANDS = {"best": BEST, "deploy": DEPLOY, "start": START, "more": [*START, "n_trials=2"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_trials", 1),  # no change but the author
        ("overrides", ["env.target=evil.Env"]),
        ("overrides", ["+env.kwargs.x=${oc.env:HOME}"]),
        ("overrides", ["hydra.searchpath=[file:///tmp]"]),
        ("config_dir", "../outside"),
        ("objective", "x\nnetwork: {_target_: evil.Env}"),
    ],
    ids=str,
)
def test_study_of_another_user_is_refused(
    key: str, value: object, command: str, foreign: Path, here: Path, capsys: Capture
) -> None:
    change(foreign, key, value)
    before = kept(here)

    assert main(COMMANDS[command]) == 1

    error = error_line(capsys)
    assert error.startswith(
        "studies/mine/study.yaml: this user did not write it, or it has changed"
    )
    assert "add --trust (with study start: trust=true)" in error
    assert kept(here) == before
    assert not (here / "sprung").exists()
    assert not (here / "live").exists()
    assert not Path("../outside").exists()


def test_edited_study_needs_trust_and_a_harmless_one_can_be_looked_at(
    study: Path, capsys: Capture
) -> None:
    assert main(BEST) == 0
    change(study, "n_trials", 7)

    assert main(BEST) == 1
    assert main([*BEST, "--trust"]) == 0
    assert main(["study", "status", "mine"]) == 0
    assert main(["study", "status"]) == 0


@pytest.mark.parametrize("trusted", [False, True])
def test_deployment_checks_the_run_that_the_journal_names(
    trusted: bool, study: Path, here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = (here / "runs").glob("*/*")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("target: null", "target: evil.Env"))
    monkeypatch.syspath_prepend(here)

    assert main([*DEPLOY, *(["--trust"] if trusted else [])]) == (0 if trusted else 1)

    assert (here / "sprung").exists() == trusted
    assert ("env.target=evil.Env" in capsys.readouterr().err) == (not trusted)


@pytest.mark.parametrize("trust", ["trust=true", "trust=True"])
def test_trust_continues_a_study_of_another_user_which_becomes_own(
    trust: str, foreign: Path
) -> None:
    assert main([*START, trust]) == 0
    assert main(START) == 0


def write_link(path: Path) -> None:
    path.symlink_to(Path("precious").absolute())


@pytest.mark.parametrize("command", [*COMMANDS.values(), ["study", "status", "mine"]], ids=str)
@pytest.mark.parametrize("make", [write_link, os.mkfifo])
@pytest.mark.parametrize("name", ["study.yaml", "journal.log", "trials", "logs", "claim.lock"])
def test_special_file_in_a_study_is_refused(
    name: str, make: Callable[[Path], Any], command: list[str], study: Path, here: Path
) -> None:
    path = study / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    before = contents(here)

    assert main(command) == 1

    assert contents(here) == before


SETTINGS: dict[str, bytes] = {
    "empty": b"",
    "list": b"[1]",
    "binary": bytes(range(256)),
    "not closed": b"a: [",
    "unknown key": b"colour: red",
    "deep": b"[" * 100_000,
    "alias": b"a: &a [x]\nb: *a",
    "tag": b"!!python/object/apply:os.system [touch sprung]",
    "huge": b"x: " + b"y" * 2_000_000,
}
VALUES = [
    *(("overrides", value) for value in (5, "x", None, [5], [["a"]])),
    *(("space", value) for value in ([], 5, {1: {}}, {"agent.gamma": 5})),
    *(("n_trials", value) for value in ("many", None, 1.5, [1])),
    *(("seed", value) for value in ("x", None)),
    *(("objective", value) for value in (5, None)),
    ("config_dir", 5),
]


@pytest.mark.parametrize("damage", [*SETTINGS, *VALUES], ids=str)
def test_damaged_settings_are_one_line(
    damage: str | tuple[str, object], study: Path, capsys: Capture
) -> None:
    if isinstance(damage, str):
        (study / "study.yaml").write_bytes(SETTINGS[damage])
    else:
        change(study, *damage)

    for command in (["study", "status", "mine"], [*BEST, "--trust"], [*START, "trust=true"]):
        assert main(command) == 1
        assert error_line(capsys).startswith("cannot read studies/mine/study.yaml: ")


JOURNAL_COMMANDS = [["study", "status", "mine"], ["compare", "studies/mine"]]
if find_spec("optuna_dashboard") is not None:
    JOURNAL_COMMANDS.append(["study", "dashboard", "mine"])
LINES: dict[str, str] = {
    "word": "hello",
    "list": "[]",
    "number": "5",
    "no code": "{}",
    "unknown code": '{"op_code": 99, "worker_id": "x"}',
    "deep": "[" * 100_000,
    "no time": '{"op_code": 4, "worker_id": "x", "study_id": 0, "datetime_start": "x"}',
    "binary": "\0\1",
}
NOTES = [
    *(("run_dir", value) for value in (5, None, ["x"])),
    *(("seconds", value) for value in ("x", [1])),
    *(("deaths", "x"), ("error", [1]), ("host", 5), ("seed", "x")),
]


@pytest.mark.parametrize("damage", [*LINES, *NOTES], ids=str)
def test_damaged_journal_is_one_line(
    damage: str | tuple[str, object], study: Path, capsys: Capture
) -> None:
    journal = study / "journal.log"
    lines = journal.read_text().splitlines()
    if isinstance(damage, str):
        lines[1:1] = [LINES[damage]]  # Optuna leaves out a last line that is cut
    else:
        trial = json.loads(lines[-1])
        trial["user_attrs"] |= {damage[0]: damage[1]}
        lines[-1] = json.dumps(trial)
    journal.write_text("\n".join(lines) + "\n")

    for command in [*JOURNAL_COMMANDS, BEST, DEPLOY, START]:
        assert main(command) == 1
        error = error_line(capsys)
        assert "studies/mine/journal.log is damaged: " in error


@pytest.mark.parametrize("key", ["run_dir", "seed"])
def test_trial_without_its_notes_cannot_be_the_best(key: str, study: Path, capsys: Capture) -> None:
    text = (study / "journal.log").read_text()
    (study / "journal.log").write_text(text.replace(f'"{key}"', '"other"'))

    assert main(BEST) == 1

    assert "trial 0 has no run_dir and seed" in error_line(capsys)


def test_value_that_the_space_does_not_have_is_refused(study: Path, capsys: Capture) -> None:
    text = (study / "journal.log").read_text()
    (study / "journal.log").write_text(text.replace('"agent.gamma"', '"agent.lam"'))

    assert main(BEST) == 1

    assert "agent.lam: a trial in the journal has it" in error_line(capsys)
