"""The habits of a run: when it evaluates, and which checkpoints it keeps."""

from __future__ import annotations

from pathlib import Path

from conftest import read_rows, small

from ml_pipeline.build import train
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder


def test_evaluations_come_every_so_many_steps_and_at_the_end(here: Path) -> None:
    settings = small(total_steps=32 * 7, callbacks__evaluation__eval_every_steps=64)

    rows = read_rows(train(settings).run_dir)

    evaluated = [int(row["env_steps"]) for row in rows if row["eval/episode_return"]]
    assert evaluated == [64, 128, 192, 224]


def test_evaluation_does_not_change_the_training(here: Path) -> None:
    often, never = (
        read_rows(train([*small(total_steps=128), *more]).run_dir)
        for more in (["callbacks.evaluation.eval_every_steps=1"], ["~callbacks.evaluation"])
    )

    strip = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in often]
    assert strip == never


def test_best_is_the_checkpoint_of_the_best_evaluation(here: Path) -> None:
    settings = small(total_steps=320, callbacks__evaluation__eval_every_steps=32)
    run = train([*settings, "agent.learning_rate=0.05"]).run_dir
    rows = read_rows(run)
    returns = [float(row["eval/episode_return"]) for row in rows]

    best = load_checkpoint(RunFolder.open(run), "best")
    latest = load_checkpoint(RunFolder.open(run), "latest")

    assert best["env_steps"] == int(rows[returns.index(max(returns))]["env_steps"])
    assert latest["env_steps"] == 320
    assert best["callbacks"]["checkpoints"]["best_return"] == max(returns)


def test_a_resumed_run_beats_its_old_best_or_keeps_it(here: Path) -> None:
    settings = small(total_steps=320, callbacks__evaluation__eval_every_steps=32)
    run = train([*settings, "agent.learning_rate=0.05"]).run_dir

    train([f"resume={run}", "total_steps=640"])

    rows = read_rows(run)
    best = load_checkpoint(RunFolder.open(run), "best")["callbacks"]["checkpoints"]["best_return"]
    assert best == max(float(row["eval/episode_return"]) for row in rows)


def test_a_resumed_run_follows_the_schedule_it_is_given(here: Path) -> None:
    run = train(small(callbacks__evaluation__eval_every_steps=100_000)).run_dir

    train([f"resume={run}", "total_steps=256", "callbacks.evaluation.eval_every_steps=64"])

    rows = read_rows(run)
    evaluated = [int(row["env_steps"]) for row in rows if row["eval/episode_return"]]
    assert evaluated == [64, 128, 192, 256]
