"""python -m ml_pipeline compare: groups, tables, words on what may be claimed, and bad input."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import small

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.compare import RunData, differing_keys, grouped
from ml_pipeline.analysis.wandb_runs import WandbError, download
from ml_pipeline.build import train
from ml_pipeline.runs.run_folder import RunFolder


def run_data(config: dict[str, Any], returns: list[float] | None = None) -> RunData:
    rows = [
        {
            "env_steps": str(100 * (i + 1)),
            "eval/episode_return": str(each),
            "time/iteration_seconds": "0.5",
        }
        for i, each in enumerate(returns or [1.0])
    ]
    return RunData(RunFolder(Path("runs/x")), config, {}, rows)


def test_keys_that_differ_are_found_even_where_one_lacks_them() -> None:
    assert differing_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}]) == ["b", "c"]


def test_a_group_is_what_differs_by_no_more_than_the_seed() -> None:
    configs = [
        {"seed": seed, "agent.gamma": gamma, "vec_env.n_workers": seed, "agent.n_steps": 16}
        for gamma in (0.9, 0.99)
        for seed in (1, 2)
    ]
    runs = [run_data(config) for config in configs]

    assert [(g.label, len(g.runs)) for g in grouped(runs)] == [
        ("agent.gamma=0.9", 2),
        ("agent.gamma=0.99", 2),
    ]
    assert [g.label for g in grouped(runs, ["seed"])] == ["seed=1", "seed=2"]
    assert [g.label for g in grouped(runs[:2])] == ["all runs"]


def test_speed_and_time_are_those_of_all_rows() -> None:
    run = run_data({}, [1.0, 2.0, 3.0])

    assert run.steps_per_second() == 200.0
    assert run.seconds("eval/episode_return").tolist() == [0.5, 1.0, 1.5]


def test_the_tables_show_what_differs_and_what_may_be_claimed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(train([*small(), f"agent.gamma={gamma}"]).run_dir) for gamma in (0.9, 0.99)]
    capsys.readouterr()

    assert main(["compare", *runs, "--report", "report"]) == 0

    header, first, second, _, groups, *rest = capsys.readouterr().out.splitlines()
    assert "agent.gamma" in header
    assert "agent.clip_range" not in header
    assert " 0.9 " in first
    assert " 0.99 " in second
    assert "eval/episode_return, IQM" in groups
    assert rest[0].startswith("agent.gamma=0.9 ")
    assert rest[2].startswith("1 seed is too few to claim a difference between agent.gamma=0.9")
    assert rest[3] == "report: report/report.html"


@pytest.fixture
def run(here: Path) -> str:
    return str(train(small()).run_dir)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no run is left to compare"),
        (["{run}", "--by", "agent.gama"], "--by agent.gama is no key of these runs' configs; did"),
        (["{run}", "--metric", "eval/return"], "--metric eval/return is not in metrics.csv of"),
        (["{run}", "{other}"], "these runs are of 2 envs, whose returns cannot be compared"),
        (["{run}", "--report", "taken"], "cannot write the report into taken"),
        (["wandb:here"], "wandb:here leads nowhere; write wandb:ENTITY/PROJECT"),
        (["wandb:me/mine"], "wandb:me/mine needs a W&B key"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(
    run: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(train([*small(), "env.target=tiny_envs.CountingEnv"]).run_dir)
    Path("taken").touch()
    capsys.readouterr()

    assert main(["compare", *(a.format(run=run, other=other) for a in arguments)]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1]
    assert all(line.startswith("left out: ") for line in lines[:-1])


def test_a_folder_that_is_no_run_and_a_broken_one_are_left_out_and_named(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/half").mkdir()
    broken = shutil.copytree(run, Path("runs/broken"))
    (broken / "metrics.csv").write_text("env_steps\n")
    capsys.readouterr()

    assert main(["compare", run, "runs/half", str(broken)]) == 0

    told = capsys.readouterr()
    assert run in told.out
    assert "one run: no interval can be drawn" in told.out
    assert told.err.splitlines() == [
        "left out: runs/half is no run folder: it has no config.yaml",
        "left out: runs/broken has no rows in metrics.csv: it has trained nothing yet",
    ]


def test_without_the_packages_for_a_report_the_tables_are_shown(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)  # as if not installed

    assert main(["compare", run]) == 0
    assert 'the report needs plotly, which is not installed: pip install -e ".[plots]"' in (
        capsys.readouterr().out
    )
    assert main(["compare", run, "--report", "report"]) == 1


def test_runs_are_fetched_from_wandb_into_folders_that_compare_reads(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a stand-in for W&B's client that hands out what a run of ours has logged."""
    config = yaml.safe_load((Path(run) / "config.yaml").read_text())
    with (Path(run) / "metrics.csv").open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    theirs = SimpleNamespace(
        id="abc",
        config={**config, "env_name": "CartPole-v1", "agent_name": "ppo", "_wandb": {}},
        scan_history=lambda: iter([{"_step": 1, "system": "x"}, *rows]),
        state="finished",
        commit="0123",
        summary={"_runtime": 12.0},
        url="somewhere",
    )
    api = SimpleNamespace(runs=lambda path: [theirs] if path == "me/mine" else [])
    monkeypatch.setattr("wandb.Api", lambda timeout: api)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)

    assert main(["compare", run, "wandb:me/mine", "--report", "report"]) == 0

    assert re.search(r"runs/wandb/mine/abc +finished", capsys.readouterr().out)
    with pytest.raises(WandbError, match="wandb:me/other holds no runs"):
        download("wandb:me/other")
