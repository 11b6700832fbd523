"""python -m ml_pipeline runs: what there is, what became of it, and removal only on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import small

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.listing import find_runs, prune
from ml_pipeline.build import train
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError


@pytest.fixture
def runs(here: Path) -> list[RunFolder]:
    """A finished one, one that a kill has ended, and one that is being trained."""
    folders = [RunFolder(train([*small(), f"seed={seed}"]).run_dir) for seed in (1, 2, 3)]
    for run in folders[1:]:
        run.update_summary({"status": "running"})
    return folders


def test_runs_are_listed_with_what_became_of_them(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()

    with runs[2].locked():
        assert main(["runs"]) == 0

    header, *rows = capsys.readouterr().out.splitlines()
    assert " ".join(header.split()) == "run env agent seed env steps return status started"
    rows.sort(key=lambda row: row.split()[3])  # by seed: all began in the same second
    assert [row.split()[1:5] for row in rows] == [
        ["CartPole-v1", "ppo", seed, "64"] for seed in "123"
    ]
    assert [row.split()[6] for row in rows] == ["finished", "died", "running"]


def test_a_damaged_run_is_listed_too(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    runs[0].summary.write_text("{")

    assert main(["runs", "--status", "unknown"]) == 0
    assert str(runs[0].path) in capsys.readouterr().out


def test_nothing_is_removed_that_was_not_asked_for(
    runs: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "prune"]) == 1
    assert "prune needs a status" in capsys.readouterr().err
    assert main(["runs", "prune", "--status", "died"]) == 0
    assert "nothing removed yet; add --yes to remove these 2" in capsys.readouterr().out
    assert all(run.path.is_dir() for run in runs)

    assert main(["runs", "prune", "--status", "died", "--yes"]) == 0
    assert [run.path.is_dir() for run in runs] == [True, False, False]


def test_a_run_that_is_being_trained_is_never_removed(runs: list[RunFolder]) -> None:
    found = find_runs(Path("runs"))

    with runs[2].locked(), pytest.raises(RunFolderError, match="is being trained"):
        prune([info for info in found if info.run.path == runs[2].path])

    assert runs[2].path.is_dir()


def test_a_root_that_is_not_there_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs"]) == 1
    assert "--root runs: not a folder; runs/ is in" in capsys.readouterr().err


def test_a_run_keeps_commit_host_versions_and_command(runs: list[RunFolder]) -> None:
    facts = json.loads(runs[0].summary.read_text())

    assert set(facts["versions"]) == {"python", "torch", "numpy", "gymnasium"}
    assert facts["host"]
    assert facts["commands"][0].startswith("train(")
    commit = facts["git_commit"]
    if commit is not None:
        assert runs[0].changes.is_file() == commit.endswith("+")
