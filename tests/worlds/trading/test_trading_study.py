"""Studies of trading envs: selected on the validation period, deployed only with an edge there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Capture, error_line, read_rows, small
from market_rows import write_table

pytestmark = pytest.mark.xdist_group("trading_study")  # its studies take a minute

optuna = pytest.importorskip("optuna", reason="needs the extra: pip install -e '.[study]'")

from ml_pipeline.__main__ import main  # noqa: E402
from ml_pipeline.assembly.compose import stored_config  # noqa: E402
from ml_pipeline.assembly.run import train  # noqa: E402
from ml_pipeline.errors import UserError  # noqa: E402
from ml_pipeline.runs.run_folder import RunFolder  # noqa: E402
from ml_pipeline.study.folder import StudyFolder  # noqa: E402
from ml_pipeline.study.judging import judged_facts  # noqa: E402
from ml_pipeline.worlds.trading.data.synthetic import synthetic_bars  # noqa: E402
from ml_pipeline.worlds.trading.env import Trading  # noqa: E402
from ml_pipeline.worlds.trading.paper_log import LOG_FILE  # noqa: E402

TRADING = [
    *("env=torch_trading", "env.kwargs.data.n_bars=3000", "env.kwargs.data.cache_dir=cache"),
    *("env.kwargs.data.features=[column_signal]", "env.kwargs.episode_bars=50"),
    *("env.kwargs.account.commission=0", "+env.kwargs.data.parameters.correlation=0.4"),
    *("device=cpu", "logger=none", "n_envs=32", "vec_env=auto", "agent.scale_reward=true"),
]
HELD_OUT = ["+eval_env.kwargs.period=validation", "+eval_env.kwargs.random_start=false"]


@pytest.mark.parametrize("period", ["train", "test", "all"])
def test_selection_by_another_period_than_validation_is_refused(
    period: str, here: Path, capsys: Capture
) -> None:
    held_out = [f"+eval_env.kwargs.period={period}"] if period != "train" else []
    arguments = [*TRADING, *held_out, "n_trials=2", "space=trading"]

    assert main(["study", "start", "mine", *arguments]) == 1

    line = error_line(capsys)
    assert line.startswith(f"eval_env.kwargs.period={period}: a study selects trials")
    assert not Path("studies").exists()


@pytest.mark.parametrize("env", [[], ["env=trading", "vec_env=serial"]], ids=["tensor", "single"])
@pytest.mark.slow
def test_a_run_without_an_edge_is_not_deployed(env: list[str], here: Path) -> None:
    known = [each for each in TRADING if "correlation" not in each]
    walk = ["env.kwargs.data.market=random_walk"]
    result = train([*small(), *known, *walk, *HELD_OUT, "total_steps=2048", *env])
    run = RunFolder.open(result.run_dir)

    with pytest.raises(UserError, match=r"no edge can be claimed.*the study is kept") as caught:
        judged_facts(run, stored_config(run), n_trials=500)

    assert "\n" not in str(caught.value)


def test_runs_of_other_envs_are_not_judged(finished_run: Path) -> None:
    run = RunFolder.open(finished_run)

    assert judged_facts(run, stored_config(run), n_trials=500) == {}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two studies of three trials: one market has an edge, the other has none."""
    folder = tmp_path_factory.mktemp("searched")
    for market in ("edge", "random_walk"):
        known = [each for each in TRADING if "correlation" not in each or market == "edge"]
        arguments = [*known, *HELD_OUT, f"env.kwargs.data.market={market}", "total_steps=20_000"]
        arguments += ["callbacks.evaluation.n_episodes=1", "agent.n_steps=64", "agent.n_epochs=4"]
        arguments += ["agent.n_minibatches=4", "space=trading", "n_trials=3", "n_jobs=2"]
        done = subprocess.run(
            [sys.executable, "-m", "ml_pipeline", "study", "start", market, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_objective_is_the_growth_over_the_whole_validation_period(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(searched)
    data = {"n_bars": 3_000, "features": ["column_signal"], "cache_dir": "cache"}
    validation = Trading(data=data, period="validation", random_start=False)

    trials = StudyFolder.open("edge").study().get_trials()

    assert len(trials) == 3
    for trial in trials:
        last = read_rows(Path(trial.user_attrs["run_dir"]))[-1]
        if trial.value is not None:
            assert float(last["eval/episode_return"]) == pytest.approx(trial.value)
            assert float(last["eval/episode_length"]) == validation.task.n_steps


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_best_trial_is_deployed_with_an_edge_only_and_walks_new_bars(
    searched: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(searched)

    assert main(["study", "best", "edge", "--deploy", "live", "--episodes", "1"]) == 0
    told = json.loads(Path("live/deployed.json").read_text())
    assert told["n_trials"] == 3
    assert told["sharpe"] > 5.0
    capsys.readouterr()
    assert main(["study", "best", "random_walk", "--deploy", "other", "--episodes", "1"]) == 1
    assert "does not hold on the validation period" in error_line(capsys)
    assert not Path("other").exists()
    assert len(StudyFolder.open("random_walk").study().get_trials()) == 3

    settings = {"n_symbols": 1, "bar": "1h", "parameters": {"correlation": 0.4}}
    (bars,) = synthetic_bars("edge", n_bars=3_100, seed=1, **settings).values()
    write_table(Path("SYN0.csv"), bars)
    assert main(["paper", "live", "--data", "SYN0.csv", "--label", "end"]) == 0
    (log,) = Path("paper").glob(f"*/{LOG_FILE}")
    assert log.read_text().count("\n") == 1 + 100
