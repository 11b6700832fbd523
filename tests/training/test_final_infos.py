"""Numbers in the info of an episode's last step are logged as means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import read_rows, small

from ml_pipeline.assembly.run import train
from ml_pipeline.envs.episode_stats import Episode, EpisodeWindow, final_numbers, info_means

SCORING = [*small(total_steps=96), "env.target=tiny_envs.ScoringEnv"]


def infos_of(row: dict[str, str]) -> dict[str, float]:
    prefix = "rollout/info/"
    return {name.removeprefix(prefix): float(row[name]) for name in row if name.startswith(prefix)}


@pytest.mark.parametrize(
    "mode", ["serial", pytest.param("parallel", marks=pytest.mark.slow), "shared"]
)
def test_final_numbers_are_logged_in_every_mode(here: Path, mode: str) -> None:
    way = [f"vec_env={mode}", "vec_env.start_method=fork"]

    run = train([*SCORING, *way, "~callbacks.evaluation"]).run_dir

    rows = read_rows(run)
    # 16 steps are 5 episodes of 3 steps in each of 2 envs, and episodes 2 and 4 succeed.
    assert infos_of(rows[0]) == {"is_success": 0.4, "n_goals": 3.0, "speed": 0.5}
    assert infos_of(rows[2]) == {"is_success": 0.5, "n_goals": 8.5, "speed": 0.5}


def test_only_finite_numbers_and_bools_count() -> None:
    info: dict[Any, Any] = {
        "won": True,
        "n": np.int64(3),
        "x": np.float32(0.5),
        "nan": np.nan,
        "text": "a",
        "vector": np.ones(1),
        "bad\nname": 1,
        7: 1,
    }

    assert final_numbers(info) == {"won": 1.0, "n": 3.0, "x": 0.5}


def test_at_most_20_names_are_logged_over_a_whole_run() -> None:
    window = EpisodeWindow()
    assert len(final_numbers({f"n{i}": i for i in range(100)})) == 20

    logged: set[str] = set()
    for place in range(40):  # an env with another name in every episode
        metrics = window.add([Episode(1.0, 1, 1, {f"n{place}": 1.0, "won": 1.0})])
        logged |= {name for name in metrics if name.startswith("rollout/info/")}
        loaded = EpisodeWindow()
        loaded.load_state_dict(window.state_dict())
        window = loaded

    assert len(logged) == 20
    assert "rollout/info/won" in logged


def test_mean_is_over_the_episodes_that_have_the_number() -> None:
    episodes = [Episode(0.0, 1, 1, {"won": 1.0}), Episode(0.0, 1), Episode(0.0, 1, 1, {"won": 0.0})]

    assert info_means(episodes) == {"won": 0.5}
    assert info_means([]) == {}


def test_without_numbers_metrics_and_state_are_as_before() -> None:
    window = EpisodeWindow()
    metrics = window.add([Episode(1.0, 2)])

    assert not any("info" in name for name in metrics)
    assert window.state_dict() == {"n_episodes": 1, "recent_episodes": [[1.0, 2, 1]]}
