"""A misspelt metric in the config is reported as soon as the metrics of its group are known."""

from __future__ import annotations

from pathlib import Path

from conftest import Capture, small

from ml_pipeline.assembly.run import train
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.record import MetricNames


def test_name_is_checked_once_its_group_is_known(capsys: Capture) -> None:
    names = MetricNames({"a": "eval/wim", "b": "los/value", "c": "loss/value", "d": EVAL_RETURN})
    rows = [
        {"loss/value": 1.0},
        {"loss/value": 1.0, MEAN_RETURN: 2.0},
        {"loss/value": 1.0, MEAN_RETURN: 2.0, EVAL_RETURN: 3.0},
        {"loss/value": 1.0},
    ]
    said = []
    for index, row in enumerate(rows):
        names.log(row, env_steps=1_000 * (index + 1))
        said.append(capsys.readouterr().out)

    assert said == [
        "",
        "b=los/value: not logged by env step 2,000; did you mean loss/value?\n",
        "a=eval/wim: not logged by env step 3,000; metrics.csv has all names\n",
        "",
    ]


def test_run_reports_misspelt_metrics_before_its_end(here: Path, capsys: Capture) -> None:
    target = "ml_pipeline.callbacks.early_stopping.EarlyStopping"
    stop = f"{{_target_: {target}, metric: eval/eposide_return}}"
    wrong = ["objective=rollout/episode_retrun_mean_100", "best_metric=policy/approxkl"]
    settings = small(total_steps=192, callbacks__evaluation__eval_every_steps=64)

    train([*settings, "vec_env=serial", "env_seeds=adjacent", *wrong, f"+callbacks.stop={stop}"])

    out = capsys.readouterr().out
    for line in (
        "callbacks.stop.metric=eval/eposide_return: not logged by env step 64; "
        "did you mean eval/episode_return?\n",
        "objective=rollout/episode_retrun_mean_100: not logged by env step 32; "
        "did you mean rollout/episode_return_mean_100?\n",
        "best_metric=policy/approxkl: not logged by env step 32; did you mean policy/approx_kl?\n",
    ):
        assert line in out
