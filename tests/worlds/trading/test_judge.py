"""The command judge: trading runs over held-out bars, its files and page, and its mistakes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Capture, error_line, small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly import run as build
from ml_pipeline.assembly.compose import compose_config
from ml_pipeline.assembly.run import train
from ml_pipeline.worlds.trading.data.edge import optimal_sharpe
from ml_pipeline.worlds.trading.judge import judge_run, judge_runs

MARKET = [
    *("env.kwargs.data.n_bars=2000", "env.kwargs.data.n_symbols=2", "env.kwargs.episode_bars=50"),
    *("env.kwargs.data.features=[column_signal]", "env.kwargs.data.cache_dir=cache"),
]
N_BARS = 299  # of the test period, after the first


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds, an LSTM, a portfolio, and CartPole; copied, never changed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        for name, overrides in {
            "first": ["env=trading", *MARKET],
            "second": ["env=torch_trading", "vec_env=auto", *MARKET, "seed=2"],
            "lstm": ["env=trading", *MARKET, "network=lstm"],
            "portfolio": ["env=trading", *MARKET, "env.kwargs.portfolio=true"],
            "cartpole": [],
        }.items():
            train([*small(), *overrides]).run_dir.rename(name)
    return folder


@pytest.fixture
def runs(trained: Path, here: Path, config_home: Path) -> Path:
    for path in trained.iterdir():
        if path.name == "config":
            shutil.copytree(path, config_home, dirs_exist_ok=True)
        elif path.name != "runs":
            shutil.copytree(path, here / path.name)
    return here


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_two_seeds_are_judged_on_the_test_period(runs: Path, capsys: Capture) -> None:
    text = printed(capsys, "judge", "first", "second", "--trials", "40", "--out", "out")

    told = json.loads((runs / "out" / "judgement.json").read_text())
    assert told["verdict"] in text
    assert (told["bars"], told["trials"], told["period"]) == (N_BARS, 40, "test")
    assert told["periods_per_year"] == pytest.approx(24 * 365.25)
    assert [part["name"] for part in told["runs"]] == ["first", "second"]
    assert [part["name"] for part in told["symbols"]] == ["SYN0", "SYN1"]
    equity = table(runs / "out" / "equity.csv")
    accounts = ["first/SYN0", "first/SYN1", "second/SYN0", "second/SYN1"]
    assert list(equity[0]) == ["bar_end_utc", "all", "buy_and_hold", *accounts]
    assert len(equity) == N_BARS + 1
    last = [float(equity[-1][name]) for name in accounts]
    assert float(equity[-1]["all"]) == pytest.approx(sum(last) / 4)
    assert told["strategy"]["total_return"] == pytest.approx(sum(last) / 4 - 1.0)
    trades = table(runs / "out" / "trades.csv")
    assert len(trades) == told["strategy"]["trades"] > 0
    names = ("judgement.html", "equity.png", "drawdown.png", "exposure.png", "sharpe.png")
    assert all((runs / "out" / name).stat().st_size > 1_000 for name in names)


@pytest.mark.parametrize("name", ["lstm", "portfolio"])
@pytest.mark.slow
def test_recurrent_policies_and_portfolios(name: str, runs: Path) -> None:
    found = judge_run(name, period="validation", n_trials=1)

    assert len(found.time) - 1 == N_BARS
    assert found.sharpe == found.policy.figures.sharpe
    (walk,) = found.walks.values()
    assert walk.accounts == (("portfolio",) if name == "portfolio" else ("SYN0", "SYN1"))


@pytest.mark.slow
def test_same_run_has_the_same_judgement(runs: Path) -> None:
    first, again = (judge_run("first", period="test", n_trials=3) for _ in range(2))

    assert first.equity.tolist() == again.equity.tolist()
    assert first.verdict == again.verdict


def test_trained_period_supports_no_claim(runs: Path) -> None:
    for period in ("train", "all"):
        found = judge_run("first", period=period, n_trials=1)
        assert not found.claims_edge
        assert "the policy was trained on these bars" in found.verdict


@pytest.mark.slow
def test_a_run_of_a_study_knows_its_number_of_trials(here: Path, capsys: Capture) -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra study")
    from ml_pipeline.study.folder import StudyFolder, StudySettings

    overrides = [*small(), "env=trading", *MARKET]
    run = build.run(compose_config(overrides), overrides, sweep="gold").run_dir
    folder = StudyFolder("gold")
    folder.make()
    folder.write(StudySettings(overrides, {}, n_trials=9, seed=1, objective="x"))
    for value in (1.0, 2.0, 3.0, 4.0):
        folder.study().add_trial(optuna.trial.create_trial(value=value))

    printed(capsys, "judge", str(run), "--out", "out")

    assert json.loads((here / "out" / "judgement.json").read_text())["trials"] == 4


@pytest.mark.slow
def test_runs_of_a_sweep_know_their_number_of_trials(here: Path, capsys: Capture) -> None:
    command = ["train", "-m", "agent.learning_rate=1e-3,1e-4,1e-5", "hydra/launcher=basic"]
    assert main([*command, *small(), "env=trading", *MARKET]) == 0
    run = sorted((here / "runs" / "Trading").iterdir())[0]
    capsys.readouterr()

    printed(capsys, "judge", str(run), "--out", "out")

    assert json.loads((here / "out" / "judgement.json").read_text())["trials"] == 3
    shutil.rmtree(here / "runs" / "sweeps")
    assert main(["judge", str(run)]) == 1
    assert "its study or sweep" in (line := error_line(capsys))
    assert "add --trials N" in line


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["cartpole"], "env CartPole-v1 is not a trading env; use the command evaluate"),
        (["first", "first"], "first: named twice"),
        (["first", "portfolio"], "portfolio: walks other bars than first"),
        (["missing"], "missing is not a run folder"),
        (["first", "--checkpoint", "step_7"], "step_7"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], error: str, runs: Path, capsys: Capture
) -> None:
    assert main(["judge", *arguments]) == 1
    assert error in error_line(capsys)


def test_evaluate_names_the_command(runs: Path, capsys: Capture) -> None:
    text = printed(capsys, "evaluate", "first", "--episodes", "1")

    assert text.splitlines()[-1].endswith("judge first")


@pytest.mark.slow
def test_page_in_a_browser_draws_every_picture(runs: Path, browser: Any, capsys: Capture) -> None:
    printed(capsys, "judge", "first", "second", "--out", "out")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url))

    page.goto((runs / "out" / "judgement.html").as_uri())
    page.wait_for_selector("#exposure .main-svg")

    assert page.locator("h1").inner_text() == "No edge can be claimed"
    assert page.locator("#equity .scatterlayer .trace").count() == 5  # two runs, three lines
    assert page.locator("#drawdown .scatterlayer .trace").count() == 2
    assert page.locator("#sharpe .scatterlayer .trace").count() >= 6
    assert [each for each in problems if not each.startswith("file:")] == []


@pytest.mark.slow
def test_ppo_finds_a_known_edge(here: Path) -> None:
    """Positive control; benchmarks/trading_controls.py has more bars, seeds and rewards."""
    data = "env.kwargs.data"
    run = train(
        [
            *("env=torch_trading", "n_envs=128", "total_steps=100_000", "seed=1", "device=cpu"),
            *(f"{data}.n_bars=40_000", f"{data}.features=[column_signal]", f"{data}.cache_dir=c"),
            *("env.kwargs.account.commission=0.0", "env.kwargs.account.spread=0.0"),
            *("env.kwargs.reward.kind=risk_adjusted", "env.kwargs.reward.variance_penalty=24"),
            *("agent.gamma=0.0", "agent.n_steps=64", "agent.n_epochs=4"),
            *("~callbacks.evaluation", "logger=none"),
        ]
    ).run_dir

    found = judge_runs([run], period="test", n_trials=500)

    assert found.claims_edge
    per_bar = found.sharpe / found.periods_per_year**0.5
    assert per_bar >= 0.8 * optimal_sharpe(0.2, positions="discrete")
