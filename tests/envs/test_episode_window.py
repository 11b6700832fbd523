"""EpisodeWindow: means over the episodes of an iteration and over the last 100."""

from __future__ import annotations

from typing import Any

import pytest

from ml_pipeline.envs.episode_stats import Episode, EpisodeWindow


def test_means_weight_each_entry_by_its_number_of_episodes() -> None:
    metrics = EpisodeWindow().add([Episode(10.0, 4.0, 3), Episode(30.0, 8.0, 1)])

    assert metrics == {
        "n_completed_episodes": 4,
        "rollout/episode_return": (3 * 10.0 + 30.0) / 4,
        "rollout/episode_length": (3 * 4.0 + 8.0) / 4,
        "rollout/episode_return_mean_100": (3 * 10.0 + 30.0) / 4,
        "rollout/episode_length_mean_100": (3 * 4.0 + 8.0) / 4,
        "rollout/total_episodes": 4,
    }


def test_the_mean_is_absent_if_no_episode_ended() -> None:
    metrics = EpisodeWindow().add([])

    assert metrics == {"n_completed_episodes": 0, "rollout/total_episodes": 0}


@pytest.mark.parametrize(
    ("counts", "n_latest"),
    [
        ([1] * 150, 100),
        ([60, 60, 60], 2),  # 60 are too few, 120 are enough
        ([60, 40, 60], 2),
        ([500, 1, 99], 2),
        ([500, 1, 98], 3),
        ([7, 500], 1),
        ([3, 4], 2),
    ],
)
def test_the_last_100_episodes_are_in_the_newest_entries(counts: list[int], n_latest: int) -> None:
    window = EpisodeWindow()
    episodes = [Episode(float(place), 1.0, n) for place, n in enumerate(counts)]
    for episode in episodes:
        metrics = window.add([episode])

    latest = episodes[len(episodes) - n_latest :]
    mean = sum(each.n * each.episode_return for each in latest) / sum(each.n for each in latest)
    assert metrics["rollout/episode_return_mean_100"] == pytest.approx(mean)
    assert metrics["rollout/total_episodes"] == sum(counts)


def test_a_loaded_window_continues_like_the_saved_one() -> None:
    saved, loaded = EpisodeWindow(), EpisodeWindow()
    saved.add([Episode(1.0, 2.0)] * 120)
    loaded.load_state_dict(saved.state_dict())

    assert len(saved.state_dict()["recent_episodes"]) == 100
    assert loaded.add([Episode(5.0, 6.0)]) == saved.add([Episode(5.0, 6.0)])


def test_older_checkpoints_have_episodes_without_a_number() -> None:
    window = EpisodeWindow()
    state: dict[str, Any] = {"n_episodes": 1, "recent_episodes": [[10.0, 4.0]]}

    window.load_state_dict(state)

    assert window.state_dict()["recent_episodes"] == [[10.0, 4.0, 1]]
