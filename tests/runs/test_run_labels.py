"""name, notes, tags and run_root: what a user says about a run, and where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Capture, error_line, read_rows, small, summary_of

from ml_pipeline import train
from ml_pipeline.__main__ import main
from ml_pipeline.assembly.compose import plain_config
from ml_pipeline.errors import UserError


def test_labels_are_in_the_folder_the_summary_the_config_and_the_list(
    here: Path, capsys: Capture
) -> None:
    labels = {"name": "base-1.0", "notes": "first,\nwith a 'quote'", "tags": ["a b", "c"]}

    run = train(small(), quiet=True, **labels).run_dir

    assert run.name.endswith("_base-1.0")
    assert labels.items() <= summary_of(run).items()
    assert labels.items() <= plain_config(run).items()
    assert main(["runs"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[-4:] == ["name", "tags", "notes", "started"]
    assert "  base-1.0  a b, c  first, with a 'quote'  " in row


def test_resumed_run_keeps_its_labels_except_those_that_are_named(here: Path) -> None:
    run = train(small(), "tags=[old]", quiet=True, name="kept", notes="kept").run_dir

    resumed = train(f"resume={run}", "total_steps=128", "tags=[new]", quiet=True).run_dir

    assert resumed == run
    labels = {"name": "kept", "notes": "kept", "tags": ["new"]}
    assert labels.items() <= summary_of(run).items()
    assert labels.items() <= plain_config(run).items()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("name=a/b", "name=a/b: must be 1 to 50 letters, digits, and . _ -"),
        ("name=", "name=: must be 1 to 50 letters"),
        (f"name={51 * 'a'}", f"name={51 * 'a'}: must be 1 to 50 letters"),
        ("name='a b'", "name=a b: must be"),
        ("tags=smoke", r"tags=smoke: must be a list, as in \[a,b\]"),
        ("tags=['']", "tags=.*: must be a list of texts of 1 to 64 characters"),
        ("run_root=", "run_root=: must be the path of a folder"),
        ("run_root='~/runs'", "run_root=~/runs: must be the path of a folder, without ~"),
    ],
)
def test_bad_label_is_refused_in_one_line(here: Path, override: str, line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}") as caught:
        train(small(), override)

    assert "\n" not in str(caught.value)
    assert not list(here.iterdir())


def test_longest_name_of_wide_letters_fits_a_file_name(here: Path) -> None:
    name = 50 * "\U00020000"  # 4 bytes each

    assert train(small(), name=name, quiet=True).run_dir.name.endswith(name)


def test_runs_under_another_root_are_found_with_root(here: Path, capsys: Capture) -> None:
    run = train(small(), run_root="elsewhere/runs", quiet=True).run_dir

    assert run.parent == Path("elsewhere/runs/CartPole-v1")
    assert [path.name for path in here.iterdir()] == ["elsewhere"]
    for command in (["evaluate", "latest", "--episodes", "1"], ["play", "latest"]):
        assert main([*command, "--root", "elsewhere/runs"]) == 0
        assert f"latest: {run}\n" in capsys.readouterr().out
    assert main(["runs", "--root", str(here / "elsewhere" / "runs")]) == 0
    assert capsys.readouterr().out.count("/elsewhere/runs/CartPole-v1/") == 1
    assert main(["evaluate", "latest"]) == 1
    assert "--root" in error_line(capsys)


def test_env_that_changes_the_folder_does_not_move_the_run(here: Path, capsys: Capture) -> None:
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    env = ["env.target=own_parts.Wanderer", f"+env.kwargs.folder={elsewhere}", "vec_env=serial"]

    run = train(small(callbacks__checkpoints__every_steps=32), env).run_dir
    train(f"resume={run}", "total_steps=128")

    assert Path.cwd() == here
    assert not list(elsewhere.iterdir())
    assert run == next(Path().glob("runs/Wanderer/*"))
    assert len(read_rows(run)) == 4
    assert summary_of(run)["status"] == "finished"
    commands = [line for line in capsys.readouterr().out.splitlines() if "evaluate:" in line]
    assert (
        commands
        == [f"evaluate:   {commands[0].split()[1]} -m ml_pipeline evaluate {run} --deterministic"]
        * 2
    )
