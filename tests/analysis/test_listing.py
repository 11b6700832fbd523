"""python -m ml_pipeline runs: lists runs with their status, and removes some only on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import small

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.listing import find_runs, prune
from ml_pipeline.build import train
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

pytestmark = pytest.mark.xdist_group("listing")  # the run is trained once


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("listed"))
        return train(small()).run_dir.absolute()


@pytest.fixture
def runs(trained: Path, here: Path) -> list[RunFolder]:
    """A finished run, a killed run, and a run that a test can lock as if it were trained."""
    folders = [
        RunFolder(Path(shutil.copytree(trained, f"runs/CartPole-v1/{name}"))) for name in "abc"
    ]
    for run in folders[1:]:
        run.update_summary({"status": "running"})
    return folders


def test_runs_are_listed_with_their_status(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    with runs[2].locked():
        assert main(["runs"]) == 0

    header, *rows = capsys.readouterr().out.splitlines()
    assert " ".join(header.split()) == "run env agent seed env steps return status started"
    assert [row.split()[1:5] for row in rows] == [["CartPole-v1", "ppo", "1", "64"]] * 3
    assert [row.split()[6] for row in rows] == ["finished", "died", "running"]


def test_damaged_run_is_listed_too(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    runs[0].summary.write_text("{")

    assert main(["runs", "--status", "unknown"]) == 0
    assert str(runs[0].path) in capsys.readouterr().out


def test_prune_removes_only_the_requested_runs_and_only_with_yes(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "prune"]) == 1
    assert "--status failed" in capsys.readouterr().err
    assert main(["runs", "prune", "--status", "died"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("died") == 2
    assert "--yes" in shown
    assert all(run.path.is_dir() for run in runs)

    assert main(["runs", "prune", "--status", "died", "--yes"]) == 0
    assert [run.path.is_dir() for run in runs] == [True, False, False]


def test_prune_keeps_a_run_that_is_being_trained(runs: list[RunFolder]) -> None:
    found = find_runs(Path("runs"))

    with runs[2].locked(), pytest.raises(RunFolderError):
        prune([info for info in found if info.run.path == runs[2].path])

    assert runs[2].path.is_dir()


def test_missing_root_is_a_one_line_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 1

    error = capsys.readouterr().err
    assert "--root runs: not a folder; runs/ is in" in error
    assert error.count("\n") == 1


def test_summary_holds_commit_host_versions_and_command(trained: Path) -> None:
    run = RunFolder(trained)
    facts = json.loads(run.summary.read_text())

    assert set(facts["versions"]) == {"python", "torch", "numpy", "gymnasium"}
    assert facts["host"]
    assert facts["commands"][0].startswith("train(")
    commit = facts["git_commit"]
    if commit is not None:
        assert run.changes.is_file() == commit.endswith("+")
