"""python -m ml_pipeline compare: groups, tables, supported claims, and bad input."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import small

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.compare import RunData, chosen_metric, differing_keys, grouped
from ml_pipeline.analysis.wandb_runs import WandbError, download
from ml_pipeline.build import train
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.run_folder import RunFolder

pytestmark = pytest.mark.xdist_group("compare")  # the runs are trained once


def run_data(
    config: dict[str, Any], returns: list[float] | None = None, metric: str = EVAL_RETURN
) -> RunData:
    rows = [
        {"env_steps": str(100 * (i + 1)), metric: str(each), "time/iteration_seconds": "0.5"}
        for i, each in enumerate(returns or [1.0])
    ]
    return RunData(RunFolder(Path("runs/x")), config, {}, rows)


def test_differing_keys_include_a_key_that_one_config_lacks() -> None:
    assert differing_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}]) == ["b", "c"]


def test_runs_that_differ_only_by_seed_form_a_group() -> None:
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


def test_speed_and_time_count_all_rows() -> None:
    run = run_data({}, [1.0, 2.0, 3.0])

    assert run.steps_per_second() == 200.0
    assert run.seconds(EVAL_RETURN).tolist() == [0.5, 1.0, 1.5]


def test_default_metric_is_the_runs_best_metric_if_all_have_it() -> None:
    old, other = run_data({}), run_data({"best_metric": "eval/win"}, metric="eval/win")

    assert chosen_metric([old, old], None) == EVAL_RETURN
    assert chosen_metric([other, other], None) == "eval/win"
    assert chosen_metric([old, other], None) == MEAN_RETURN


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two runs that differ by gamma, and one of another env."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("compared"))
        return {
            name: str(train([*small(), *more]).run_dir.absolute())
            for name, more in {
                "run": ["agent.gamma=0.9"],
                "second": ["agent.gamma=0.99"],
                "other": ["env.target=tiny_envs.CountingEnv"],
            }.items()
        }


@pytest.fixture
def run(runs: dict[str, str], here: Path) -> str:
    return runs["run"]


def test_tables_show_the_differing_keys_and_the_supported_claims(
    run: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", run, runs["second"], "--report", "report"]) == 0

    header, first, second, _, groups, *rest = capsys.readouterr().out.splitlines()
    assert "agent.gamma" in header
    assert "agent.clip_range" not in header
    assert " 0.9 " in first
    assert " 0.99 " in second
    assert f"{EVAL_RETURN}, IQM" in groups
    assert rest[0].startswith("agent.gamma=0.9 ")
    assert rest[2].startswith("1 seed is too few to claim a difference between agent.gamma=0.9")
    assert rest[3] == "report: report/report.html"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "left to compare"),
        (["{run}", "--by", "agent.gama"], "--by agent.gama: not a config key of these runs; did"),
        (["{run}", "--metric", "eval/return"], "--metric eval/return: not in metrics.csv of every"),
        (["{run}", "{other}"], "these runs use 2 envs, whose returns cannot be compared"),
        (["{run}", "--report", "taken"], "cannot write the report into taken"),
        (["wandb:here"], "wandb:here is not a W&B address; write wandb:ENTITY/PROJECT"),
        (["wandb:me/mine"], "wandb:me/mine needs a W&B key"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_code_1(
    runs: dict[str, str],
    here: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("taken").touch()

    assert main(["compare", *(each.format(**runs) for each in arguments)]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1]
    assert all(line.startswith("left out: ") for line in lines[:-1])


def test_other_folders_and_empty_runs_are_left_out_and_named(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("half").mkdir()
    shutil.copytree(run, "empty")
    Path("empty/metrics.csv").write_text("env_steps\n")

    assert main(["compare", run, "half", "empty"]) == 0

    printed = capsys.readouterr()
    assert run in printed.out
    assert "one run: an interval needs at least two" in printed.out
    half, empty = printed.err.splitlines()
    assert half.startswith("left out: half is ")
    assert empty == "left out: empty has no rows in metrics.csv: no iteration has finished"


def test_without_the_packages_for_a_report_the_tables_are_shown(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if not installed

    assert main(["compare", run]) == 0
    assert 'the report needs plotly, which is not installed: pip install "ml_pipeline[plots]"' in (
        capsys.readouterr().out
    )
    assert main(["compare", run, "--report", "report"]) == 1


def test_wandb_runs_are_downloaded_into_folders_that_compare_reads(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for W&B's client returns the data that a run has logged."""
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
    with pytest.raises(WandbError, match="wandb:me/other has no runs"):
        download("wandb:me/other")
