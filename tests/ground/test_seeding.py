"""Seeds of training envs: runs with different seeds share no env."""

from __future__ import annotations

import numpy as np
import pytest

from ml_pipeline.seeding import first_env_seed


@pytest.mark.parametrize("is_adjacent", [False, True])
def test_runs_with_different_seeds_share_no_env_unless_their_seeds_are_adjacent(
    is_adjacent: bool,
) -> None:
    starts = [first_env_seed(seed, is_adjacent=is_adjacent) for seed in range(1, 6)]
    envs = [set(range(start, start + 8)) for start in starts]

    shared = 5 * 8 - len(set.union(*envs))

    assert shared == (28 if is_adjacent else 0)


def test_first_envs_of_any_two_seeds_are_far_apart() -> None:
    starts = np.sort([first_env_seed(seed) for seed in range(5_000)])

    assert np.diff(starts).min() > 131_072  # the envs of the largest benchmark on a GPU
    assert starts[0] == 0
    assert starts[-1] < 2**31 - 1


def test_resumed_run_has_envs_of_its_own_whatever_the_kind() -> None:
    resumed = first_env_seed(3, env_steps=512)

    assert resumed == first_env_seed(3, env_steps=512, is_adjacent=True)
    assert resumed != first_env_seed(3)
    assert resumed != first_env_seed(3, env_steps=1024)
