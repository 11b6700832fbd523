"""Curriculum: when phases end, what they change, lost workers, and wrong phases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from conftest import Capture, read_rows, small

from ml_pipeline.assembly.phases import EPISODE_METRICS, EVALUATION_METRICS
from ml_pipeline.assembly.run import train
from ml_pipeline.callbacks.curriculum import Curriculum
from ml_pipeline.config.curriculum import CurriculumConfig, PhaseConfig, UntilConfig
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import PHASE
from ml_pipeline.runs.loggers import read_metrics

LINE = [*small(), "env.target=staged_envs.Line", "env.id=null", "total_steps=128"]
REPLAY = [
    *("n_envs=2", "device=cpu", "logger=none", "network.hidden_sizes=[8]", "env.id=null"),
    *("agent.learning_starts=16", "agent.batch_size=4", "agent.iteration_length=8"),
    *("agent.buffer_size=1000", "vec_env=serial", "total_steps=160"),
    *("callbacks.evaluation.n_episodes=2", "callbacks.evaluation.eval_every_steps=64"),
    *("callbacks.checkpoints.every_steps=32", "callbacks.checkpoints.final_episodes=2"),
]
DQN = ["agent=dqn", "env.target=staged_envs.Line", *REPLAY]
SAC = ["agent=sac", "env.target=staged_envs.Swing", *REPLAY]
TWO = "+curriculum={phases: {short: {env: {length: 2}, until: {n_episodes: 20}}, "
TWO += "long: {env: {length: 5}, replay: clear}}}"


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in read_metrics(run / "metrics.csv") if row[name]]


class Iterations:
    """The part of a loop that the callback uses."""

    trainer = None

    def __init__(
        self,
        callback: Curriculum,
        env_steps: int = 0,
        n_episodes: int = 0,
        envs: tuple[Any, ...] = (),
    ) -> None:
        self.callback = callback
        self.envs = envs
        self.env_steps = env_steps
        self.n_episodes = n_episodes
        callback.on_train_start(self)  # type: ignore[arg-type]

    def add(self, *, env_steps: int = 10, n_episodes: int = 0, **metrics: float) -> str:
        """One iteration; returns the phase after it."""
        self.env_steps += env_steps
        self.n_episodes += n_episodes
        counted = {"n_completed_episodes": n_episodes, "rollout/total_episodes": self.n_episodes}
        all_metrics = {**counted, **{k.replace("__", "/"): v for k, v in metrics.items()}}
        self.callback.on_iteration_logged(self, all_metrics)  # type: ignore[arg-type]
        return self.callback.phase


def phases(*untils: dict[str, Any]) -> Curriculum:
    names = "abc"[: len(untils) + 1]
    every = [*(UntilConfig(**each) for each in untils), UntilConfig()]
    config = {n: PhaseConfig(until=each) for n, each in zip(names, every, strict=True)}
    return Curriculum(CurriculumConfig(config))


def test_episodes_and_env_steps_are_counted_from_the_start_of_the_phase() -> None:
    loop = Iterations(phases({"n_episodes": 3}, {"env_steps": 20}))

    after = [loop.add(n_episodes=2) for _ in range(5)]

    assert after == ["a", "b", "b", "c", "c"]


def test_the_first_goal_that_is_reached_ends_the_phase() -> None:
    loop = Iterations(phases({"n_episodes": 100, "env_steps": 20}))

    assert [loop.add(), loop.add()] == ["a", "b"]


def test_patience_counts_values_in_a_row_and_only_iterations_with_the_metric() -> None:
    until = {"metric": "eval/episode_return", "threshold": 5.0, "patience": 2}
    loop = Iterations(phases(until))

    values = [5.0, 4.9, 6.0, math.nan, 7.0]
    assert [loop.add(eval__episode_return=value) for value in values] == ["a"] * 5
    assert loop.add() == "a"
    assert loop.add(eval__episode_return=5.0) == "b"


@pytest.mark.parametrize("metric", ["rollout/info/winner", "rollout/episode_return_mean_100"])
def test_a_mean_of_100_episodes_counts_once_all_of_them_are_of_the_phase(metric: str) -> None:
    until = {"metric": metric, "threshold": 0.5}
    loop = Iterations(phases({"n_episodes": 10}, until))
    value = {metric.replace("/", "__"): 1.0}

    assert loop.add(n_episodes=10, **value) == "b"
    assert [loop.add(n_episodes=49, **value) for _ in range(3)] == ["b", "b", "c"]


def test_a_curriculum_that_a_resumed_run_adds_counts_from_there() -> None:
    loop = Iterations(phases({"n_episodes": 3, "env_steps": 1000}), env_steps=5000, n_episodes=500)

    assert [loop.add(n_episodes=2), loop.add(n_episodes=2)] == ["a", "b"]


@pytest.mark.parametrize("settings", [LINE, DQN, SAC], ids=["ppo", "dqn", "sac"])
def test_every_env_uses_the_new_settings_from_its_next_episode_on(
    here: Path, capsys: Capture, settings: list[str]
) -> None:
    run = train([*settings, TWO]).run_dir

    lengths = column(run, "rollout/episode_length")
    numbers = column(run, PHASE)
    switch = numbers.index(2.0)
    assert numbers == sorted(numbers)
    assert lengths[:switch] == [2.0] * switch
    assert lengths[-1] == 5.0
    assert column(run, "eval/episode_length") == [4.0] * len(column(run, "eval/episode_length"))
    said = capsys.readouterr().out
    assert "curriculum: starts with phase 1 of 2, short" in said
    assert "curriculum: phase 2 of 2, long starts at env step" in said


def test_replay_is_cleared_by_the_word_of_the_phase_and_fills_before_learning_continues(
    here: Path,
) -> None:
    runs = [train([*DQN, TWO]).run_dir, train([*DQN, TWO.replace("clear", "keep")]).run_dir]
    cleared, kept = (column(run, "replay/size") for run in runs)
    updates = column(runs[0], "time/updates_per_env_step")
    first = column(runs[0], PHASE).index(2.0)

    assert cleared[first:] == [16.0 * (n + 1) for n in range(len(cleared) - first)]
    assert kept == [16.0 * (n + 1) for n in range(len(kept))]
    # learning_starts=16: the 8 steps of the next iteration, of two envs, fill the buffer.
    assert updates[first] == 0.0 < updates[first + 1] == updates[first - 1]


TENSOR = [*small(vec_env="auto"), "env.target=tiny_torch_envs.Stages", "env.id=null"]


def test_a_tensor_env_gets_its_settings_in_place(here: Path) -> None:
    run = train([*TENSOR, "total_steps=128", TWO]).run_dir

    lengths = column(run, "rollout/episode_length")
    assert (lengths[0], lengths[-1]) == (2.0, 5.0)


@pytest.mark.slow
def test_a_worker_that_is_killed_continues_in_the_current_phase(here: Path) -> None:
    settings = [*LINE, "vec_env=parallel", "vec_env.n_workers=2", "vec_env.start_method=fork"]
    settings += ["vec_env.on_worker_death=restart", "total_steps=160", "~callbacks.evaluation"]
    kill = "+callbacks.kill={_target_: own_parts.KillAWorkerAt}"

    with pytest.warns(RuntimeWarning, match="restart 1 of 10"):
        run = train([*settings, TWO, kill]).run_dir

    assert column(run, PHASE)[:3] == [1.0, 1.0, 2.0]
    # A new env has length 4, so the mean of the last iteration would differ.
    assert column(run, "rollout/episode_length")[-1] == 5.0


def test_the_metrics_that_a_phase_may_name_are_logged(here: Path) -> None:
    columns = read_rows(train([*LINE, "total_steps=64"]).run_dir)[-1].keys()

    assert {*EPISODE_METRICS, *EVALUATION_METRICS} <= columns


def curriculum(until: str = "n_episodes: 3", env: str = "length: 3") -> str:
    return f"+curriculum={{phases: {{a: {{env: {{{env}}}, until: {{{until}}}}}, b: {{}}}}}}"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+curriculum={phases: {}}", "curriculum.phases is empty; name at least one"),
        ("+curriculum={phases: []}", "curriculum.phases is a list; write phases:"),
        ("+curriculum={phases: {a: {}, b: {}}}", "phases.a.until is empty, so phase b would never"),
        (
            curriculum(env="lenght: 3"),
            "a.env.lenght: the env has no attribute .*; did you",
        ),
        (curriculum(env="reset: 3"), "a.env.reset: the env has no attribute of this name"),
        (curriculum(env="length: 0"), r"a.env: env Line fails with .* length=0: must be at"),
        (
            curriculum("metric: rollout/episode_retrun, threshold: 1"),
            "did you mean rollout/episode_",
        ),
        (curriculum("metric: rollout/info/winner, threshold: 1"), "nothing logs this metric"),
        (curriculum("metric: is_success, threshold: 1"), "did you mean rollout/info/is_success"),
        (curriculum("metric: mine/score, threshold: 1"), "nothing logs this metric"),
        (curriculum("metric: eval/episode_return"), "a.until.threshold=null: metric and threshold"),
        (curriculum("n_episodes: 0"), "a.until.n_episodes=0.0: must be an integer of at least 1"),
        (curriculum("patience: 0, n_episodes: 3"), "a.until.patience=0: must be at least 1"),
        ("+curriculum={phases: {a: {replay: drop}}}", "a.replay=drop: must be keep | clear"),
        (
            "+curriculum={phases: {a: {opponents: {weak: 1.5}}}}",
            "a.opponents.weak=1.5: must be between 0 and 1",
        ),
    ],
)
def test_wrong_phases_are_refused_before_a_run_folder_exists(
    here: Path, override: str, words: str
) -> None:
    with pytest.raises(UserError, match=words.replace("|", r"\|")) as refused:
        train([*LINE, override])

    assert "\n" not in str(refused.value)
    assert not (here / "runs").exists()


def test_a_metric_of_an_own_callback_is_accepted(here: Path) -> None:
    own = "+callbacks.talk={_target_: own_parts.Talk}"

    train([*LINE, curriculum("metric: mine/score, threshold: 1"), own])


TUG = [
    *small(n_envs=4, total_steps=512, agent__n_steps=32),
    *("opponent=self_play", "env.target=two_player_games.TugOfWar", "env.id=null"),
    "+env.kwargs={opponent: strong}",
]
MIXES = "+curriculum={phases: {a: {opponents: {weak: 1}, until: {env_steps: 128}}, "
MIXES += "b: {opponents: {strong: 1}}}}"


def opponents(name: str) -> str:
    return f"+curriculum={{phases: {{a: {{opponents: {{{name}: 1}}}}}}}}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            [*LINE, "vec_env=parallel", "vec_env.start_method=fork", curriculum(env="length: 0")],
            "a.env: env Line fails .*length=0: must be at least 1",
        ),
        (
            [
                *LINE,
                curriculum("metric: eval/episode_return, threshold: 1"),
                "~callbacks.evaluation",
            ],
            "the run has no evaluation; add",
        ),
        ([*TENSOR, curriculum(env="size: 3")], "env.size=3: size: Stages has no such setting"),
        ([*LINE, opponents("weak")], "a.opponents.weak: the run has no opponents to choose"),
        ([*TUG, opponents("odd")], "a.opponents.odd: this env has no such player, only weak"),
        (
            [*small(), "env=hockey", "opponent=self_play", "curriculum=hockey"],
            "weak.env.opponent=weak: with self-play .* shares",
        ),
    ],
    ids=["workers", "evaluation", "tensor env", "no opponents", "unknown opponent", "self-play"],
)
def test_phases_that_do_not_fit_the_run_are_refused(
    here: Path, settings: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(settings)

    assert not (here / "runs").exists()


def test_a_phase_chooses_the_opponents_of_self_play(here: Path) -> None:
    run = train([*TUG, MIXES]).run_dir

    assert column(run, PHASE) == [1.0, 2.0, 2.0, 2.0]
    first, *_, last = read_rows(run)
    assert first["opponents/weak_win_rate"]
    assert not first["opponents/strong_win_rate"]
    assert last["opponents/strong_win_rate"]


def test_a_phase_that_a_resumed_run_has_lost_is_named(here: Path) -> None:
    run = train([*LINE, TWO]).run_dir

    with pytest.raises(UserError, match="the run was in phase long, which is not in the config"):
        train([f"resume={run}", "total_steps=256", "+curriculum={phases: {other: {}}}"])


def test_hockey_goes_through_all_of_its_phases(here: Path) -> None:
    names = "shooting", "defence", "weak"
    soon = [f"curriculum.phases.{name}.until.env_steps=1" for name in names]
    settings = ["env=hockey", "curriculum=hockey", *soon, "~callbacks.evaluation"]
    sizes = [*small(agent__n_steps=256, total_steps=2048), "agent.n_epochs=1"]

    run = train([*sizes, *settings]).run_dir

    assert column(run, PHASE) == [1.0, 2.0, 3.0, 4.0]
    assert column(run, "rollout/info/shaping_return")[0] != 0.0
