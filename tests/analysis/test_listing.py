"""python -m ml_pipeline runs: lists runs with their status, and removes some only on request."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Capture, error_line, small

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.listing import find_runs, prune, runs_table, stored_values
from ml_pipeline.assembly.run import train
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


def test_runs_are_listed_with_their_status(runs: list[RunFolder], capsys: Capture) -> None:
    with runs[2].locked():
        assert main(["runs"]) == 0

    header, *rows = capsys.readouterr().out.splitlines()
    assert " ".join(header.split()) == "run status seed env steps return started"
    assert [row.split()[0] for row in rows] == [str(run.path) for run in runs]
    assert [row.split()[1] for row in rows] == ["finished", "died", "running"]
    assert [row.split()[2:4] for row in rows] == [["1", "64"]] * 3


def change(run: RunFolder, **facts: Any) -> None:
    config = yaml.safe_load(run.config.read_text())
    run.config.write_text(yaml.safe_dump({**config, **facts}))


def test_keys_that_differ_are_columns_as_far_as_they_fit(runs: list[RunFolder]) -> None:
    change(runs[0], n_envs=4, precision="bf16")
    change(runs[1], seed=7, added_later=True)
    found = find_runs(Path("runs"))

    cells, hidden = runs_table(found, width=250)
    assert list(cells)[5:] == ["n_envs", "precision", "started"]
    assert cells["seed"] == ["1", "7", "1"]
    assert cells["n_envs"] == ["4", "2", "2"]
    assert cells["precision"] == ["bf16", "float32", "float32"]
    assert hidden == []

    # "runs/CartPole-v1/a" 18, "finished" 8, seed 4, env steps 9, return 6, n_envs 6, with gaps.
    cells, hidden = runs_table(found, width=61)
    assert list(cells)[5:] == ["n_envs"]
    assert hidden == ["precision", "started"]


def test_unfitting_columns_are_named_on_a_narrow_terminal(
    runs: list[RunFolder], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")

    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not shown, for lack of width: started"


@pytest.fixture
def five_hours_behind_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "EST5")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("five_hours_behind_utc")
def test_runs_are_sorted_by_start_and_shown_in_local_time(
    runs: list[RunFolder], capsys: Capture
) -> None:
    starts = ["2026-01-02T12:00:00+05:00", "2026-01-02T08:30:00+00:00", "2026-01-02T06:00:00+00:00"]
    for run, start in zip(runs, starts, strict=True):
        run.update_summary({"started": start})

    assert main(["runs"]) == 0

    rows = capsys.readouterr().out.splitlines()[1:]
    assert [" ".join(row.split()[5:7]) for row in rows] == [
        *("2026-01-02 01:00-05:00", "2026-01-02 02:00-05:00", "2026-01-02 03:30-05:00"),
    ]
    assert [row.split()[0][-1] for row in rows] == ["c", "a", "b"]


@pytest.mark.parametrize("command", ["evaluate", "play"])
def test_latest_is_the_run_that_started_last(
    runs: list[RunFolder], command: str, capsys: Capture
) -> None:
    runs[1].update_summary({"started": "2999-01-01T00:00:00+00:00"})

    assert main([command, "latest", "--episodes", "1"]) == 0

    assert capsys.readouterr().out.splitlines()[0] == f"latest: {runs[1].path}"


@contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Root may read everything, so it is another user meanwhile."""
    Path.cwd().chmod(0o755)
    folder.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        folder.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
@pytest.mark.parametrize("command", [["runs"], ["evaluate", "latest"]], ids=" ".join)
def test_folder_of_runs_that_cannot_be_read_is_named(
    command: list[str], runs: list[RunFolder], capsys: Capture
) -> None:
    with unreadable(Path("runs")):
        assert main(command) == 1

    assert error_line(capsys) == (
        "runs: Permission denied; change its permissions, or name another file or folder"
    )


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
def test_folder_of_an_env_that_cannot_be_read_is_named_and_left_out(
    runs: list[RunFolder], capsys: Capture
) -> None:
    other = Path("runs/Other-v1")
    other.mkdir()

    with unreadable(other):
        assert main(["runs"]) == 0

    printed = capsys.readouterr()
    assert printed.err == "runs/Other-v1: Permission denied; its runs are left out\n"
    assert len(printed.out.splitlines()) == 1 + len(runs)


def test_folder_called_latest_is_that_folder(runs: list[RunFolder], capsys: Capture) -> None:
    Path("latest").mkdir()

    assert main(["evaluate", "latest"]) == 1
    assert "latest is not a run folder: it has no config.yaml" in capsys.readouterr().err


def test_latest_without_runs_is_a_one_line_error(here: Path, capsys: Capture) -> None:
    assert main(["export", "latest"]) == 1

    error = capsys.readouterr().err
    assert "latest: runs/ has no runs; train in this folder, or name a run folder" in error
    assert error.count("\n") == 1


def test_damaged_run_is_listed_too(runs: list[RunFolder], capsys: Capture) -> None:
    runs[0].summary.write_text("{")
    runs[0].config.write_text("a: [")

    assert main(["runs", "--status", "unknown"]) == 0
    assert str(runs[0].path) in capsys.readouterr().out


def test_equal_parts_of_configs_are_parsed_once(
    runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, run in enumerate(runs):
        change(run, seed=100 + number)
    n_keys = len(yaml.safe_load(runs[0].config.read_text()))
    parsed: list[str] = []
    load = yaml.load
    monkeypatch.setattr(
        "ml_pipeline.analysis.listing.yaml.load",
        lambda text, **options: (parsed.append(text), load(text, **options))[1],
    )

    cells, _ = runs_table(find_runs(Path("runs")), width=250)

    assert cells["seed"] == ["100", "101", "102"]
    assert len(parsed) <= n_keys + 2 + 1  # two more seeds, and the text before the first key


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('a: "one\ntwo: 2"\nb: 3\n', {"a": "one two: 2", "b": 3}),
        ("a:\n- 1\n- 2\n# b: 4\nb:\n  c: 3\n", {"a": [1, 2], "b.c": 3}),
        ("".join(f"k{n}: {n}\n" for n in range(1500)), {f"k{n}": n for n in range(1500)}),
        ("a: |\n  b: 1\n\n  c: 2\nd: 3\n", {"a": "b: 1\n\nc: 2\n", "d": 3}),
        ("{a: 1, b: {c: 2}}", {"a": 1, "b.c": 2}),
    ],
)
def test_config_in_any_yaml_is_read(
    runs: list[RunFolder], text: str, values: dict[str, Any]
) -> None:
    runs[0].config.write_text(text)

    assert stored_values(runs[0]) == values


def test_prune_removes_only_the_requested_runs_and_only_with_yes(
    runs: list[RunFolder], capsys: Capture
) -> None:
    assert main(["runs", "prune"]) == 1
    assert "--status failed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["runs", "CartPole-v1"])
    assert "for the runs of an env, write --env CartPole-v1" in capsys.readouterr().err
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


def test_missing_root_is_a_one_line_error(here: Path, capsys: Capture) -> None:
    assert main(["runs"]) == 1

    error = capsys.readouterr().err
    assert "or name your run_root with --root" in error
    assert error.count("\n") == 1


def test_summary_holds_times_commit_host_versions_and_command(trained: Path) -> None:
    run = RunFolder(trained)
    facts = run.read_summary()

    offset = datetime.now().astimezone().utcoffset()
    for key in ("started", "ended"):
        assert datetime.fromisoformat(facts[key]).utcoffset() == offset
    assert set(facts["versions"]) == {"python", "torch", "numpy", "gymnasium"}
    assert facts["host"]
    assert facts["commands"][0].startswith("train(")
    commit = facts["git_commit"]
    if commit is not None:
        assert run.changes.is_file() == commit.endswith("+")
