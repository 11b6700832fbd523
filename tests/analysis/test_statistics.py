"""Statistics over seeds against hand arithmetic, and the coverage of their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from ml_pipeline.analysis.statistics import (
    iqm,
    mean_improvement,
    performance_profile,
    probability_of_improvement,
    stratified,
    verdict,
    with_interval,
)


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    assert iqm(np.array([100.0, 1.0, 2.0, 3.0, -50.0, 4.0, 5.0, 6.0])) == np.mean([2, 3, 4, 5])
    assert iqm(np.array([1.0, 5.0, 9.0])) == 5.0
    runs = np.arange(8.0)[:, None] * np.array([1.0, 2.0])
    assert iqm(runs).tolist() == [3.5, 7.0]


def test_95_percent_interval_contains_the_true_mean_about_95_percent_of_the_time() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        runs = generator.normal(3.0, 2.0, 30)
        _, low, high = with_interval(runs, lambda values: values.mean(axis=0))
        hits += bool(low <= 3.0 <= high)

    assert 0.88 <= hits / 200 <= 0.99


def test_same_runs_give_the_same_interval() -> None:
    runs = np.array([1.0, 4.0, 2.0, 8.0, 5.0])

    assert with_interval(runs) == with_interval(runs.copy())


def test_single_run_has_no_interval() -> None:
    value, low, high = with_interval(np.array([3.0]))

    assert value == 3.0
    assert np.isnan([low, high]).all()


def test_probability_of_improvement_counts_pairs_and_half_of_ties() -> None:
    value, low, high = probability_of_improvement(np.array([1.0, 2.0]), np.array([1.0, 0.0]))

    assert value == (0.5 + 1.0 + 1.0 + 1.0) / 4
    assert low <= value <= high


def test_performance_profile_is_the_share_of_runs_at_or_above_a_threshold() -> None:
    value, _, _ = performance_profile(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.0, 5.0]))

    assert value.tolist() == [1.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([5.0] * 3, [1.0] * 9, "3 seeds are too few to claim a difference between a and b"),
        ([5.0], [1.0], "1 seed is too few"),
        ([5.0, 6, 7, 8, 9], [1.0, 2, 3, 4, 4], "a is better than b: probability of improvement 1"),
        ([1.0, 2, 3, 4, 4], [5.0, 6, 7, 8, 9], "a is worse than b"),
        ([1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 5], "no difference can be claimed between a and b"),
    ],
)
def test_a_difference_is_claimed_only_if_the_runs_support_it(
    ours: list[float], theirs: list[float], words: str
) -> None:
    assert verdict("a", "b", [(np.array(ours), np.array(theirs))]).startswith(words)


def test_improvement_over_several_envs_is_the_mean_of_the_envs() -> None:
    all_better = np.array([5.0, 6.0]), np.array([1.0, 2.0])
    half_better = np.array([1.0, 9.0]), np.array([2.0, 3.0])

    value, low, high = mean_improvement([all_better, half_better])

    assert value == 0.75
    assert 0.5 <= low < high <= 1.0


def test_interval_over_several_envs_resamples_each_env_on_its_own() -> None:
    equal_runs = [np.zeros(3), np.ones(3)]  # no draw changes how many runs are 0 and 1

    value, low, high = stratified(equal_runs, lambda runs: runs.mean(axis=0))

    assert (value, low, high) == (0.5, 0.5, 0.5)
    assert np.isnan(stratified([np.zeros(1), np.ones(3)]).low)
