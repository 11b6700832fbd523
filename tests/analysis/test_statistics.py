"""Statistics over seeds against hand arithmetic, and the coverage of their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from ml_pipeline.analysis import statistics
from ml_pipeline.analysis.statistics import (
    FEW_SEEDS,
    Estimate,
    are_claimed,
    iqm,
    iqm_over_envs,
    iqm_with_interval,
    mean_over_envs,
    needed_seeds,
    performance_profile,
    probability_of_improvement,
    rank_sum_p,
    student_quantile,
    verdicts,
)


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    assert iqm(np.array([100.0, 1.0, 2.0, 3.0, -50.0, 4.0, 5.0, 6.0])) == np.mean([2, 3, 4, 5])
    assert iqm(np.array([1.0, 5.0, 9.0])) == 5.0
    runs = np.arange(8.0)[:, None] * np.array([1.0, 2.0])
    assert iqm(runs).tolist() == [3.5, 7.0]


@pytest.mark.parametrize("n_seeds", [2, 3, 5, 10])
def test_95_percent_interval_holds_the_truth_of_normal_runs_in_93_to_97_percent(
    n_seeds: int,
) -> None:
    runs = np.random.default_rng(n_seeds).normal(3.0, 2.0, (n_seeds, 4_000))

    _, low, high = iqm_with_interval(runs)

    assert 0.93 <= ((low <= 3.0) & (high >= 3.0)).mean() <= 0.97


def test_interval_of_up_to_three_runs_is_that_of_student() -> None:
    value, low, high = iqm_with_interval(np.array([1.0, 2.0, 6.0]))

    # 4.303 is the quantile for 2 degrees of freedom, 7 the variance
    assert value == 3.0
    assert high - value == pytest.approx(4.303 * np.sqrt(7 / 3), rel=1e-4)
    assert value - low == pytest.approx(high - value)


def test_spread_of_seven_runs_is_that_of_all_around_the_iqm() -> None:
    runs = np.array([-9.0, 1, 2, 3, 4, 5, 15])

    value, _, high = iqm_with_interval(runs)

    assert value == 3.0
    error = np.sqrt(1.2 * ((runs - 3.0) ** 2).sum() / (7 * 6))
    assert high - value == pytest.approx(student_quantile(6) * error)


@pytest.mark.parametrize("n_seeds", [3, 5, 8, 10])
@pytest.mark.parametrize("shape", ["normal", "uniform"])
@pytest.mark.parametrize("spreads", [[1.0, 1.0], [5.0, 1.0, 0.2], [1.0] * 5])
def test_joint_interval_of_envs_holds_the_truth_in_about_95_percent(
    n_seeds: int, shape: str, spreads: list[float]
) -> None:
    generator = np.random.default_rng([n_seeds, len(spreads)])
    draw = {
        "normal": lambda size: generator.normal(0.0, 1.0, size),
        "uniform": lambda size: generator.uniform(-1.0, 1.0, size),
    }[shape]

    value, low, high = iqm_over_envs([spread * draw((n_seeds, 4_000)) for spread in spreads])

    coverage = float(((low <= 0.0) & (high >= 0.0)).mean())
    assert (0.925 if shape == "normal" else 0.91) <= coverage <= 0.975
    assert value.shape == (4_000,)


def test_joint_interval_of_two_envs_has_the_freedom_of_welch() -> None:
    wide, narrow = np.array([1.0, 2.0, 6.0]), np.array([2.0, 3.0, 4.0])

    value, low, high = iqm_over_envs([wide, narrow])

    # The variances of the means are 7/3 and 1/3; (8/3)^2 / ((7/3)^2 / 2 + (1/3)^2 / 2) = 2.56
    assert value == 3.0
    half = float(high - value)
    assert half == pytest.approx(value - low)
    assert half / (0.5 * np.sqrt(8 / 3)) == pytest.approx(3.53, abs=0.02)  # t of 2.56


def test_envs_without_spread_have_an_interval_without_width() -> None:
    assert iqm_over_envs([np.ones(3), np.zeros(3)]) == (0.5, 0.5, 0.5)
    varied = np.array([1.0, 2.0, 6.0])
    assert iqm_over_envs([varied, np.full(3, 3.0)]).high == pytest.approx(
        3.0 + 0.5 * (iqm_with_interval(varied).high - 3.0)
    )


def test_joint_interval_with_an_env_of_a_single_run_is_unknown() -> None:
    value, low, high = iqm_over_envs([np.arange(5.0), np.array([4.0])])

    assert value == 3.0
    assert np.isnan([low, high]).all()


def test_of_ten_runs_the_outer_quarters_count_as_the_nearest_kept_runs() -> None:
    value, _, high = iqm_with_interval(np.array([-90.0, 0, 1, 2, 3, 4, 5, 6, 70, 800]))

    winsorized = np.array([1.0, 1, 1, 2, 3, 4, 5, 6, 6, 6])
    assert value == 3.5
    error = np.sqrt(((winsorized - 3.5) ** 2).sum() / (6 * 5))
    assert high - value == pytest.approx(student_quantile(5) * error)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (30, 2.042)]
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_single_run_has_no_interval() -> None:
    value, low, high = iqm_with_interval(np.array([3.0]))

    assert value == 3.0
    assert np.isnan([low, high]).all()


def test_probability_of_improvement_counts_pairs_and_half_of_ties() -> None:
    value, low, high = probability_of_improvement(np.array([1.0, 2.0]), np.array([1.0, 0.0]))

    assert value == (0.5 + 1.0 + 1.0 + 1.0) / 4
    assert low <= value <= high


def test_performance_profile_is_the_share_of_runs_at_or_above_a_threshold() -> None:
    value, _, _ = performance_profile(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.0, 5.0]))

    assert value.tolist() == [1.0, 0.75, 0.0]


def test_interval_of_the_probability_of_improvement_is_newcombes() -> None:
    ours, theirs = np.array([3.0, 4, 5, 6, 7]), np.array([1.0, 2, 3.5, 4.5, 5.5])

    value, low, high = (float(each) for each in probability_of_improvement(ours, theirs))

    assert value == 19 / 25
    for end in (low, high):  # where the distance is 1.96 standard errors
        more = 4 * ((1 - end) / (2 - end) + end / (1 + end))
        variance = end * (1 - end) / 25 * (1 + more)
        assert (end - value) ** 2 == pytest.approx(1.959964**2 * variance)
    assert 0.0 < low < value < high < 1.0


def test_interval_of_a_certain_improvement_does_not_end_at_one_point() -> None:
    value, low, high = probability_of_improvement(np.arange(5.0) + 10, np.arange(5.0))

    assert value == 1.0
    assert 0.5 < low < 0.8
    assert high == 1.0


@pytest.mark.parametrize(
    ("ours", "theirs", "p"),
    [
        ([6.0, 7, 8, 9, 10], [1.0, 2, 3, 4, 5], 2 / 252),
        ([5.0, 7, 8, 9, 10], [1.0, 2, 3, 4, 6], 4 / 252),
        ([1.0, 1, 1], [1.0, 1, 1], 1.0),
        ([1.0, 4], [2.0, 3], 1.0),
    ],
)
def test_p_of_the_rank_sum_is_a_share_of_the_arrangements(
    ours: list[float], theirs: list[float], p: float
) -> None:
    assert rank_sum_p([(np.array(ours), np.array(theirs))]) == pytest.approx(p)


def test_p_of_many_runs_is_close_to_that_of_the_exact_test() -> None:
    ours, theirs = np.arange(8.0), np.arange(8.0) + 2.5
    exact = rank_sum_p([(ours, theirs)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_MOST_ARRANGEMENTS", 0)
        normal = rank_sum_p([(ours, theirs)])

    assert normal == pytest.approx(exact, rel=0.1)
    assert rank_sum_p([(np.arange(50.0), np.arange(50.0) + 30)]) < 1e-6


def test_holm_claims_the_clear_differences_until_the_first_that_is_not() -> None:
    assert are_claimed([0.04, 0.001, 0.012]) == [True, True, True]
    assert are_claimed([0.04, 0.02, 0.03]) == [False, False, False]  # 3 x 0.02 > 0.05
    assert are_claimed([0.01, 0.03, 0.03]) == [True, False, False]


@pytest.mark.parametrize(("n_groups", "seeds"), [(2, 5), (3, 5), (5, 6), (9, 7)])
def test_more_groups_need_more_seeds(n_groups: int, seeds: int) -> None:
    groups = {str(rank): [np.arange(seeds) - 100.0 * rank] for rank in range(n_groups)}
    fewer = {name: [runs[:-1]] for name, (runs,) in groups.items()}

    assert needed_seeds(n_groups) == seeds
    assert all("is better than" in line for line in verdicts(groups))
    if seeds > FEW_SEEDS:
        assert all("no difference can be claimed" in line for line in verdicts(fewer))


@pytest.mark.parametrize("n_groups", [2, 5])
def test_at_most_5_percent_of_equal_groups_lead_to_a_claim(n_groups: int) -> None:
    generator = np.random.default_rng(4)
    claims = 0
    for _ in range(300):
        groups = sorted(generator.normal(size=(n_groups, 6)), key=lambda runs: -float(iqm(runs)))
        lines = verdicts({str(rank): [runs] for rank, runs in enumerate(groups)})
        claims += any("no difference" not in line for line in lines)

    assert claims / 300 <= 0.08  # 0.05 and more than two standard errors


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([5.0, 6, 7, 8, 9], [1.0, 2, 3, 4, 4], "a is better than b: probability of improvement 1"),
        ([1.0, 2, 3, 4, 4], [5.0, 6, 7, 8, 9], "a is worse than b"),
        ([1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 5], "no difference can be claimed between a and b"),
    ],
)
def test_a_difference_is_claimed_only_if_the_runs_support_it(
    ours: list[float], theirs: list[float], words: str
) -> None:
    (line,) = verdicts({"a": [np.array(ours)], "b": [np.array(theirs)]})

    assert line.startswith(words)


def test_mean_over_envs_has_the_joint_interval_of_independent_estimates() -> None:
    wide, narrow = Estimate(*map(np.array, (1.0, -3.0, 4.0))), Estimate(*map(np.array, (2.0, 2, 6)))

    assert mean_over_envs([wide, narrow]) == (1.5, 1.5 - 4 / 2, 1.5 + 5 / 2)
    assert mean_over_envs([wide]) == wide


def test_envs_support_a_claim_together_that_none_supports_alone() -> None:
    better = [np.array([5.0, 7, 8, 9, 10]), np.array([50.0, 70, 80, 90, 100])]
    worse = [np.array([1.0, 2, 3, 6, 9.5]), np.array([10.0, 20, 30, 60, 95])]

    assert "no difference" in verdicts({"a": better[:1], "b": worse[:1]})[0]
    assert verdicts({"a": better, "b": worse})[0].startswith("a is better than b")
