"""Statistics of equity curves: by hand, against the papers, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ml_pipeline.analysis.statistics import estimate
from ml_pipeline.worlds.trading.statistics import (
    annual_return,
    bar_returns,
    block_length,
    calmar_ratio,
    deflated_sharpe,
    effective_bars,
    expected_best_sharpe,
    max_drawdown,
    probabilistic_sharpe,
    shape,
    sharpe_draws,
    sharpe_ratio,
    sortino_ratio,
)

EQUITY = np.array([100.0, 110.0, 99.0, 108.9])  # +10 %, -10 %, +10 %


def test_ratios_of_three_returns_by_hand() -> None:
    returns = bar_returns(EQUITY)

    np.testing.assert_allclose(returns, [0.1, -0.1, 0.1])
    mean, deviation = 0.1 / 3, math.sqrt(((1 / 15) ** 2 * 2 + (2 / 15) ** 2) / 2)
    assert sharpe_ratio(returns) == pytest.approx(mean / deviation)
    assert sortino_ratio(returns) == pytest.approx(mean / math.sqrt(0.01 / 3))
    assert max_drawdown(EQUITY) == pytest.approx(0.1)
    assert annual_return(EQUITY, 6.0) == pytest.approx(1.089**2 - 1.0)  # 3 bars are half a year
    assert calmar_ratio(EQUITY, 6.0) == pytest.approx((1.089**2 - 1.0) / 0.1)


def test_curves_without_risk_or_without_anything_left() -> None:
    flat, rising, lost = np.ones(5), np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.5, 0.0, 0.0])

    assert sharpe_ratio(bar_returns(flat)) == sortino_ratio(bar_returns(flat)) == 0.0
    assert calmar_ratio(flat, 10.0) == 0.0
    assert sortino_ratio(bar_returns(rising)) == calmar_ratio(rising, 10.0) == math.inf
    assert bar_returns(lost).tolist() == [-0.5, -1.0, 0.0]
    assert annual_return(lost, 10.0) == -1.0
    assert max_drawdown(lost) == 1.0
    assert deflated_sharpe(bar_returns(flat), 10) == (0.0, 0.0)


def test_constant_returns_have_no_sharpe_ratio() -> None:
    assert sharpe_ratio(np.full(1_000, 0.1)) == 0.0  # its deviation is rounding


def test_skewness_and_kurtosis_by_hand() -> None:
    # Three 0 and one 4: mean 1, moments 3, (-3 + 27) / 4 = 6 and (3 + 81) / 4 = 21.
    skewness, kurtosis = shape(np.array([0.0, 0.0, 0.0, 4.0]))

    assert skewness == pytest.approx(6 / 3**1.5)
    assert kurtosis == pytest.approx(21 / 9)


@pytest.mark.parametrize(
    ("skewness", "kurtosis", "expected"), [(-2.448, 10.164, 0.913), (0.0, 3.0, 0.982)]
)
def test_probabilistic_sharpe_of_the_paper(
    skewness: float, kurtosis: float, expected: float
) -> None:
    """Bailey & Lopez de Prado (2012): 24 months, monthly Sharpe ratio 0.458."""
    found = probabilistic_sharpe(
        0.458, benchmark=0.0, n_bars=24, skewness=skewness, kurtosis=kurtosis
    )

    assert found == pytest.approx(expected, abs=5e-4)


def test_deflated_sharpe_of_the_paper() -> None:
    """Bailey & Lopez de Prado (2014): 100 trials with variance 1/2 per year, 1,250 days."""
    best = expected_best_sharpe(100, 0.5 / 250)
    found = probabilistic_sharpe(
        2.5 / math.sqrt(250), benchmark=best, n_bars=1_250, skewness=-3.0, kurtosis=10.0
    )

    assert best == pytest.approx(0.1132, abs=1e-4)
    assert found == pytest.approx(0.9004, abs=1e-4)


def test_expected_best_of_normal_estimates() -> None:
    draws = np.random.default_rng(0).normal(0.0, 2.0, (20_000, 50))

    assert expected_best_sharpe(50, 4.0) == pytest.approx(draws.max(axis=1).mean(), rel=0.02)
    assert expected_best_sharpe(1, 4.0) == 0.0


def test_more_trials_lower_the_deflated_sharpe() -> None:
    noise = np.random.default_rng(1).normal(size=2_000)
    returns = noise - noise.mean() + 0.05 * noise.std()

    sure = [deflated_sharpe(returns, n)[0] for n in (1, 10, 500)]

    assert sure[0] > 0.95
    assert sure[0] > sure[1] > sure[2]
    assert sure[2] < 0.5


def test_autocorrelation_leaves_fewer_effective_bars() -> None:
    noise = np.random.default_rng(2).normal(size=200_000)
    slow = autoregressive(noise, 0.5)

    # The long-run variance of an AR(1) is (1 + phi) / (1 - phi) = 3 times the variance.
    assert effective_bars(slow) == pytest.approx(len(noise) / 3, rel=0.05)
    assert effective_bars(noise) == pytest.approx(len(noise), rel=0.03)
    assert effective_bars(autoregressive(noise, -0.5)) == len(noise)


@pytest.mark.parametrize("phi", [0.3, 0.7])
def test_block_length_of_an_autoregression_is_the_optimal_one(phi: float) -> None:
    """(1.5)^(1/3) * (2 phi / (1 - phi^2))^(2/3) * n^(1/3), Politis & White (2004)."""
    n = 30_000
    found = [
        block_length(autoregressive(np.random.default_rng(seed).normal(size=n), phi))
        for seed in range(5)
    ]

    best = (1.5 * (2 * phi / (1 - phi**2)) ** 2 * n) ** (1 / 3)
    assert np.mean(found) == pytest.approx(max(best, n ** (1 / 3)), rel=0.15)


def test_block_length_of_noise_is_the_least() -> None:
    assert block_length(np.random.default_rng(0).normal(size=8_000)) == 20
    assert block_length(np.zeros(8_000)) == 20


def test_draws_resample_whole_blocks_of_all_columns() -> None:
    # Two blocks of two bars: [a, b, c, d] gives the pairs ab, bc, cd, da.
    returns = np.array([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0], [8.0, 16.0]])
    pairs = [(1.0, 2.0), (2.0, 4.0), (4.0, 8.0), (8.0, 1.0)]
    possible = {round(sharpe_ratio(np.array([*p, *q])), 9) for p in pairs for q in pairs}

    draws = sharpe_draws(returns, 2)

    assert {round(each, 9) for each in draws[:, 0].tolist()} == possible
    np.testing.assert_allclose(draws[:, 1], draws[:, 0])  # twice the returns, the same blocks


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_confidence_is_uniform_without_skill(side: float) -> None:
    """Skewed returns whose true ratio is 0: the confidence is one minus a fair p-value."""
    random = np.random.default_rng(3)
    sure = np.array(
        [deflated_sharpe(side * (random.exponential(size=1_000) - 1.0), 1)[0] for _ in range(2_000)]
    )

    levels = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    np.testing.assert_allclose([np.mean(sure < level) for level in levels], levels, atol=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.4])
def test_interval_covers_the_true_sharpe_ratio(phi: float) -> None:
    """Of 95 % intervals, 95 % cover, also with serial correlation; single bars cover fewer."""
    n_series, true = 300, 0.1
    covers = {"blocks": 0, "bars": 0}
    for seed in range(n_series):
        noise = np.random.default_rng(seed).normal(size=800)
        returns = true + autoregressive(noise, phi) * math.sqrt(1.0 - phi**2)
        for name, block in (("blocks", block_length(returns)), ("bars", 1)):
            low, high = estimate(true, sharpe_draws(returns[:, None], block)[:, 0])[1:]
            covers[name] += bool(low < true < high)

    assert covers["blocks"] / n_series > 0.91
    assert phi == 0.0 or covers["bars"] / n_series < 0.86


def autoregressive(noise: np.ndarray, phi: float) -> np.ndarray:
    """value[t] = phi * value[t - 1] + noise[t], from an exact convolution with phi^k."""
    kernel = phi ** np.arange(60.0) if phi else np.ones(1)
    return np.convolve(noise, kernel)[: len(noise)]
