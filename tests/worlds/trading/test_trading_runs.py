"""Runs in the trading envs: their metrics, their evaluation, and that they resume bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import only_run, read_rows, small
from stopped_runs import checkpoint_numbers

from ml_pipeline.assembly.run import train

SINGLE, TENSOR = "env.target=trading_envs.SmallTrading", "env.target=trading_envs.SmallTorchTrading"
SETTINGS = "+env.kwargs={episode_bars: 12, window: 2, account: {leverage: 3.0, max_drawdown: 0.05}"
HELD_OUT = "+eval_env.kwargs={random_start: false, symbol: each}"
PPO = [
    *small(n_envs=4, total_steps=384, callbacks__checkpoints__every_steps=192),
    f"{SETTINGS}}}",
    HELD_OUT,
]
SAC = [
    *("agent=sac", "n_envs=4", "device=cpu", "logger=none", "network.hidden_sizes=[8]"),
    *("agent.learning_starts=32", "agent.batch_size=8", "agent.iteration_length=16"),
    *("agent.buffer_size=200", "total_steps=384", "callbacks.checkpoints.every_steps=192"),
    *(f"{SETTINGS}, positions: null, portfolio: true}}", "~callbacks.evaluation"),
]
CASES = {
    "PPO in one process": [*PPO, SINGLE],
    "PPO with tensors": [*PPO, "vec_env=auto", TENSOR],
    "SAC with a portfolio": [*SAC, "vec_env=serial", SINGLE],
    "SAC with tensors": [*SAC, TENSOR],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.slow
def test_a_run_that_crashes_within_its_episodes_resumes_bit_for_bit(
    case: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = ["+callbacks.crash._target_=own_parts.CrashAt", "+callbacks.crash.iteration=5"]
    monkeypatch.setenv("CRASH", "raise")
    with pytest.raises(RuntimeError, match="crash at iteration 5"):
        train([*case, *crash])
    monkeypatch.delenv("CRASH")
    run = only_run(here)
    train([f"resume={run}"])
    whole = train([*case, *crash]).run_dir

    assert read_rows(run) == read_rows(whole)
    ours, theirs = checkpoint_numbers(run), checkpoint_numbers(whole)
    names = [name for name in theirs if "['segments']" not in name]  # files have random names
    assert [name for name in names if ours.get(name) != theirs[name]] == []


@pytest.mark.parametrize("env", ["trading", "torch_trading"])
@pytest.mark.slow
def test_an_evaluation_before_the_first_episode_has_ended_plays_its_whole_period(
    env: str, here: Path
) -> None:
    """Otherwise it would be cut at 1,000 bars, and compare wrongly with later ones."""
    data = "{market: random_walk, n_bars: 10000, features: [return_1], cache_dir: cache}"
    held_out = ["+eval_env.kwargs={period: validation, random_start: false}", "vec_env=auto"]
    run = train([*small(n_envs=4), f"env={env}", f"env.kwargs.data={data}", *held_out]).run_dir

    last = read_rows(run)[-1]
    assert last["rollout/total_episodes"] == "0"
    assert float(last["eval/episode_length"]) > 1_400
    assert float(last["eval/n_cut_episodes"]) == 0.0


def test_a_run_logs_the_outcome_of_its_episodes_and_of_the_whole_evaluated_period(
    here: Path,
) -> None:
    run = train([*CASES["PPO in one process"], "+eval_env.kwargs.account={}"]).run_dir

    rows = read_rows(run)
    names = ["equity", "total_return", "max_drawdown", "trades", "turnover", "costs", "financing"]
    for name in (*names, "closed"):
        assert any(row[f"rollout/info/{name}"] for row in rows)
        assert any(row[f"eval/info/{name}"] for row in rows)
    lengths = {float(row["eval/episode_length"]) for row in rows if row["eval/episode_length"]}
    assert lengths == {300.0 - 2.0}
