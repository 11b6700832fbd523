"""TorchTrading, compared step by step with Trading, and its accounts with independent sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensor_transitions import check_compiles_as_one_graph, check_stays_on_the_device
from torch import Tensor
from trading_markets import OPTIONS, random_market

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.assembly.build import find_tensor_env
from ml_pipeline.config.train import EnvConfig, TrainConfig
from ml_pipeline.envs.tensor_env import Position
from ml_pipeline.worlds.trading.account import Account
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.tensor_env import TorchTrading

each_option = pytest.mark.parametrize("name", OPTIONS)


def make(market: Market, n_envs: int, **settings: Any) -> TorchTrading:
    env = TorchTrading(n_envs, seed=2, **{"market": market, "episode_bars": 20, **settings})
    env.reset()
    env.action_space.seed(0)
    return env


def sample(env: TorchTrading) -> Tensor:
    return torch.as_tensor(env.action_space.sample())


def account_of(position: Position) -> Account:
    return Account(*position.state[2:-2])


def follow(reference: Trading, position: Position, i: int) -> None:
    """Start an episode of ``reference`` where env i has started its own."""
    row, column = position.state[0][i].item(), int(position.state[1][i])
    options = {"row": row}
    if not reference.task.portfolio:
        options["symbol"] = reference.task.market.symbols[column]
    reference.reset(options=options)


@each_option
@pytest.mark.parametrize("volatility", [pytest.param(0.003, marks=pytest.mark.slow), 0.03])
def test_every_step_equals_that_of_the_single_env(name: str, volatility: float) -> None:
    n, market = 6, random_market(volatility=volatility)
    env = make(market, n, **OPTIONS[name])
    references = [Trading(market=market, **{"episode_bars": 20, **OPTIONS[name]}) for _ in range(n)]
    for i, reference in enumerate(references):
        follow(reference, env.position, i)
    n_ended = n_closed = 0

    for _ in range(42):
        action = sample(env)
        position, result = env._advance_all(env.position, action)
        steps = [each.step(a) for each, a in zip(references, action.numpy(), strict=True)]
        obs, gain, terminated, truncated, infos = zip(*steps, strict=True)
        accounts = [np.hstack(reference.account) for reference in references]
        ours = torch.cat(account_of(position), dim=1)
        np.testing.assert_allclose(ours, accounts, rtol=1e-12, atol=1e-8)
        np.testing.assert_allclose(result.final_obs, obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.reward, gain, rtol=1e-5, atol=1e-9)
        assert result.terminated.tolist() == list(terminated)
        assert result.truncated.tolist() == list(truncated)
        outcome = env.outcome(position.state)
        env.position, _ = env._autoreset(position, result)
        for i in torch.nonzero(result.terminated | result.truncated)[:, 0].tolist():
            told = {name: part[i].item() for name, part in outcome.items()}
            assert told == pytest.approx(infos[i], rel=1e-12, abs=1e-8)
            follow(references[i], env.position, i)
            n_ended += 1
            n_closed += terminated[i]
    assert n_ended >= (n if name != "whole period" else 0)
    can_close = volatility == 0.03 and name in ("leverage", "drawdown stop", "continuous portfolio")
    assert n_closed >= (n if can_close else 0)


@pytest.mark.parametrize("name", ["costs", "leverage", "continuous", "continuous portfolio"])
def test_accounts_equal_independent_sums(name: str) -> None:
    """The sums use only prices, units and the rules, over episodes of 100 bars."""
    n_envs, market = 100, random_market(400, volatility=0.01)
    env = make(market, n_envs, **{**OPTIONS[name], "episode_bars": 100})
    rules = env.task.rules
    opens, close, spread = (
        torch.from_numpy(each) for each in (market.open, market.close, market.spread)
    )
    flow, n_trades, n_closed = torch.zeros(n_envs, 1, dtype=torch.float64), 0, 0

    def prices(table: Tensor, position: Position) -> Tensor:
        row, column = position.state[:2]
        return table[row] if env.task.portfolio else table[row, column][:, None]

    for _ in range(120):
        position, result = env._advance_all(env.position, sample(env))
        before, after = account_of(env.position), account_of(position)
        alive = ~after.is_closed[:, 0]
        n_closed += int((~alive).sum())
        first, last = prices(opens, position), prices(close, position)
        traded = after.units - before.units
        due = after.financing - before.financing
        cost = after.costs - before.costs
        profit = before.units * (first - prices(close, env.position)) + after.units * (last - first)
        half = 0.5 * prices(spread, position) + rules.slippage * first
        if rules.spread is not None:
            half = (0.5 * rules.spread + rules.slippage) * first
        paid = first + torch.sign(traded) * half
        flow = flow - (traded * first).sum(1, keepdim=True) - cost - due
        scale = after.equity.abs() + (after.units.abs() * last).sum(1, keepdim=True)

        wanted_cost = traded.abs() * (half + rules.commission * paid)
        errors = (
            after.equity - after.cash - (after.units * last).sum(1, keepdim=True),
            after.equity - before.equity - profit.sum(1, keepdim=True) + cost + due,
            after.cash - rules.cash - flow,
            cost - wanted_cost.sum(1, keepdim=True),
        )
        for error in errors:
            assert (error.abs() <= 1e-9 * scale)[alive].all()
        assert torch.equal(after.equity[~alive], after.cash[~alive])
        assert (after.units[~alive] == 0.0).all()
        assert (after.equity[alive] > 0.0).all()
        tradable = prices(torch.from_numpy(market.tradable), position)
        assert (traded[alive][~tradable[alive]] == 0.0).all()
        n_trades += int((traded != 0.0).sum())
        ended = result.terminated | result.truncated
        flow = torch.where(ended[:, None], 0.0, flow)
        env.position, _ = env._autoreset(position, result)
    assert n_trades > n_envs
    assert (n_closed > 0) == (rules.max_drawdown is not None or rules.leverage > 1.0)


@pytest.mark.parametrize(("portfolio", "n_bytes"), [(False, 149), (True, 149 + 19 * 32)])
def test_an_account_needs_few_bytes_beside_one_copy_of_the_market(
    portfolio: bool, n_bytes: int
) -> None:
    env = make(random_market(n_symbols=20), 50, portfolio=portfolio)

    parts = (*env.position.state, *env.position[1:])

    assert sum(part.numel() * part.element_size() for part in parts) == 50 * n_bytes
    assert env._bars.shape == (60, 20, 6)
    assert env._features.shape == (60, 20, 2)


def test_starts_are_spread_over_rows_and_symbols() -> None:
    env = make(random_market(), 2_000)
    row, column = env.position.state[:2]

    assert (row.min(), row.max()) == (0, 39)
    counts = torch.bincount(column, minlength=3)
    assert (counts - 2_000 / 3).abs().max() < 4 * np.sqrt(2_000 * 2 / 9)


def test_symbol_each_follows_the_seed_of_an_env() -> None:
    env = make(random_market(), 5, symbol="each")

    assert env.position.state[1].tolist() == [2, 0, 1, 2, 0]  # seed 2


def test_money_is_float64_and_observations_and_rewards_are_float32() -> None:
    env = make(random_market(), 4)
    obs, gain, *_ = env.step(sample(env))

    assert obs.dtype == gain.dtype == torch.float32
    account = account_of(env.position)
    assert {part.dtype for part in account[:-1]} == {torch.float64}


def test_the_door_detects_a_tensor_env_and_evaluates_in_the_single_env() -> None:
    target = "ml_pipeline.worlds.trading.tensor_env.TorchTrading"
    config = TrainConfig(env=EnvConfig(id=None, target=target), agent=PPOConfig())
    market = random_market()

    assert find_tensor_env(config) is TorchTrading
    single = TorchTrading.single_env(market=market, episode_bars=20, window=3)
    assert isinstance(single, Trading)
    assert single.observation_space == make(market, 2, window=3).single_observation_space
    assert single.action_space == make(market, 2, window=3).single_action_space


@pytest.mark.parametrize("name", ["continuous", "continuous portfolio"])
def test_an_action_that_is_not_a_number_trades_nothing(name: str) -> None:
    market = random_market(volatility=0.001)
    env = make(market, 4, **OPTIONS[name])
    single = Trading(market=market, **{"episode_bars": 20, **OPTIONS[name]})
    single.reset(seed=0)
    for _ in range(3):
        env.step(torch.ones(4, env.task.n_assets))
        single.step(np.ones(env.task.n_assets))
    units, held = account_of(env.position).units, single.account.units

    env.step(torch.full((4, env.task.n_assets), torch.nan))
    single.step(np.full(env.task.n_assets, np.nan))

    assert torch.equal(account_of(env.position).units, units)
    assert torch.isfinite(account_of(env.position).equity).all()
    assert np.array_equal(single.account.units, held)
    assert np.isfinite(single.account.equity)
    assert np.any(held != 0.0)


def test_mps_is_refused() -> None:
    with pytest.raises(ValueError, match="device=mps: MPS has no float64, which money needs"):
        TorchTrading(2, market=random_market(), episode_bars=20, device="mps")


@each_option
def test_a_transition_never_reads_from_the_device(name: str) -> None:
    check_stays_on_the_device(make(random_market(), 4, **OPTIONS[name]))


# The other options differ in numbers only.
TRACED = [each for each in OPTIONS if each not in ("leverage", "drawdown stop", "whole period")]


@pytest.mark.slow  # tracing takes seconds
@pytest.mark.parametrize("name", TRACED)
def test_a_transition_compiles_as_one_graph(name: str) -> None:
    check_compiles_as_one_graph(make(random_market(), 4, **OPTIONS[name]))
