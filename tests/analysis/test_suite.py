"""Runs of several envs: groups that all envs share, their scores, and the charts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_compare import run_data

from ml_pipeline.analysis.paper_files import write_suite_files
from ml_pipeline.analysis.report import write_suite_report
from ml_pipeline.analysis.run_data import RunData
from ml_pipeline.analysis.suite import (
    Suite,
    make_suite,
    suite_cells,
    suite_charts,
    suite_verdicts,
)
from ml_pipeline.metrics import EVAL_RETURN


def runs_of(env: str, settings: dict[str, Any], start: float, ends: list[float]) -> list[RunData]:
    """A run per seed, from ``start`` to its end."""
    return [
        run_data(
            {"env.id": env, "env.target": None, "seed": seed, **settings},
            [start, end],
            name=f"{env}-{seed}",
        )
        for seed, end in enumerate(ends)
    ]


FAST, SLOW = {"agent.lr": 0.1}, {"agent.lr": 0.01}
# In "a", the best group goes from 0 to 10; in "b", from 100 to 300.
RUNS = [
    *runs_of("a", SLOW, 0.0, [5.0] * 5),
    *runs_of("a", FAST, 0.0, [10.0] * 5),
    *runs_of("b", SLOW, 100.0, [150.0] * 5),
    *runs_of("b", FAST, 100.0, [300.0] * 5),
]


def suite_of(runs: list[RunData]) -> Suite:
    return make_suite(runs, EVAL_RETURN)


def test_score_is_0_at_the_start_and_1_where_the_best_group_ends() -> None:
    suite = suite_of(RUNS)

    scores = {name: [part.tolist() for part in parts] for name, parts in suite.scores.items()}
    assert scores == {"lr=0.1": [[1.0] * 5, [1.0] * 5], "lr=0.01": [[0.5] * 5, [0.25] * 5]}
    assert suite.remarks == []
    titles, rows = suite_cells(suite, EVAL_RETURN)
    assert titles == ["group", "score", "95 % interval", "a", "b"]
    # Of ten runs, the middle six: three with 0.25 and three with 0.5.
    assert rows[1] == ["lr=0.01", "0.38", "0.38 to 0.38", "5.0", "150.0"]
    (claim,) = suite_verdicts(suite)
    assert claim.startswith("lr=0.1 is better than lr=0.01: probability of improvement 1.00")


def test_presets_of_envs_do_not_split_the_groups_of_two_algorithms() -> None:
    runs = [
        run
        for env, rates in (("a", (0.1, 0.2)), ("b", (0.3, 0.4)))
        for algorithm, rate in zip(("m.PPO", "m.SAC"), rates, strict=True)
        for run in runs_of(env, {"agent.algorithm": algorithm, "agent.lr": rate}, 0.0, [rate, 1.0])
    ]

    assert sorted(suite_of(runs).scores) == ["PPO", "SAC"]


def test_group_of_one_env_has_no_score_and_is_named() -> None:
    only_in_a = runs_of("a", {"agent.lr": 1.0}, 0.0, [99.0] * 5)

    suite = suite_of([*RUNS, *only_in_a])

    assert list(suite.scores) == ["lr=0.1", "lr=0.01"]
    assert suite.remarks == ["without a score, as they lack runs of an env: lr=1"]
    assert [group.name for group in suite.groups["a"]] == ["lr=0.1", "lr=0.01", "lr=1"]


def test_env_without_progress_does_not_count() -> None:
    suite = suite_of([*RUNS, *runs_of("c", FAST, 9.0, [8.0] * 5)])

    assert suite.remarks == ["left out of the scores: c, as no group ends above its start"]
    assert list(suite.scores) == ["lr=0.1", "lr=0.01"]


def test_seed_counts_in_each_env_and_repeats_do_not() -> None:
    suite = suite_of([*RUNS, *runs_of("a", FAST, 0.0, [7.0])])

    assert [len(group.seeds) for group in suite.all_groups] == [5, 5, 5, 5]
    assert sum(len(group.repeats) for group in suite.all_groups) == 1


def test_charts_show_scores_improvement_and_the_profile() -> None:
    scores, improvement, profile = suite_charts(suite_of(RUNS))

    assert [(bar.label, bar.value) for bar in scores.bars] == [("lr=0.1", 1.0), ("lr=0.01", 0.375)]
    assert [(bar.label, bar.value) for bar in improvement.bars] == [("lr=0.01", 1.0)]
    slow = profile.lines[1]
    at_04 = slow.y[(slow.x > 0.3) & (slow.x < 0.45)]
    assert set(at_04.tolist()) == {0.5}  # all runs of "a" and none of "b"


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_report_and_paper_files_of_several_envs(tmp_path: Path) -> None:
    suite = suite_of(RUNS)

    page = write_suite_report(tmp_path / "report", suite, EVAL_RETURN)
    only_a = suite._replace(groups={"a": suite.groups["a"]})  # drawing takes seconds
    folder = write_suite_files(tmp_path / "paper", only_a, EVAL_RETURN)

    drawn = {path.stem for path in page.parent.glob("*.png")}
    of_envs = {f"{env}_{name}" for env in "ab" for name in ("curves", "final")}
    assert drawn == {"scores", "score_improvement", "score_profile", *of_envs}
    assert "20 runs" in page.read_text()
    assert (folder / "score_profile.svg").is_file()
    assert (folder / "a" / "curves.pdf").is_file()
    assert r"lr=0.01 & 0.38 & 0.38 to 0.38 & 5.0 \\" in (folder / "groups.tex").read_text()
