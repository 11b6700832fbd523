"""Runs with opponent=self_play: for every algorithm, resumed bit for bit, mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import only_run, read_rows, small
from stopped_runs import checkpoint_numbers

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.errors import UserError

POOL = [
    *("opponent=self_play", "opponent.add_every_steps=64", "opponent.capacity=2"),
    *("+opponent.scripted.weak=0.3", "env.target=two_player_games.TugOfWar"),
    "+env.kwargs={opponent: strong, luck: 0.5}",
]
PPO = small(n_envs=4, total_steps=384, callbacks__checkpoints__every_steps=192)
REPLAY = [
    *("n_envs=4", "vec_env=serial", "device=cpu", "logger=none", "network.hidden_sizes=[8]"),
    *("agent.learning_starts=32", "agent.batch_size=8", "agent.iteration_length=16"),
    *("agent.buffer_size=200", "total_steps=384", "callbacks.checkpoints.every_steps=192"),
    "callbacks.evaluation.eval_every_steps=200",
]
PHASES = (
    "+curriculum={phases: {a: {opponents: {weak: 1.0}, until: {env_steps: 128}}, "
    "b: {opponents: {weak: 0.0}, env: {luck: 0.9}}}}"
)
CASES = {
    "PPO": [*PPO, "opponent.sampling=hard"],
    "PPO in two halves": [*PPO, "collector=double"],
    "DQN with discrete actions": [*REPLAY, "agent=dqn", "env.kwargs.discrete=true"],
    "SAC": [*REPLAY, "agent=sac", "opponent.add_at_score=0.4"],
    "the second phase of a curriculum": [*PPO, PHASES],
}


MARKS = {name: [pytest.mark.slow] for name in CASES if name != "PPO"}


def settings_of(case: list[str]) -> list[str]:
    kwargs = "+env.kwargs={opponent: strong, luck: 0.5}"
    if "env.kwargs.discrete=true" in case:
        case = [each for each in case if each != "env.kwargs.discrete=true"]
        kwargs = "+env.kwargs={opponent: strong, luck: 0.5, discrete: true}"
    return [*case, *POOL[:-1], kwargs]


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=MARKS.get(name, [])) for name in CASES],
)
def test_a_run_that_crashes_in_the_middle_of_its_games_resumes_bit_for_bit(
    case: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = ["+callbacks.crash._target_=own_parts.CrashAt", "+callbacks.crash.iteration=5"]
    settings = [*settings_of(case), *crash]
    monkeypatch.setenv("CRASH", "raise")
    with pytest.raises(RuntimeError, match="crash at iteration 5"):
        train(settings)
    monkeypatch.delenv("CRASH")
    run = only_run(here)
    train([f"resume={run}"])
    whole = train(settings).run_dir

    assert read_rows(run) == read_rows(whole)
    ours, theirs = checkpoint_numbers(run), checkpoint_numbers(whole)
    names = [name for name in theirs if "['segments']" not in name]  # files have random names
    assert [name for name in names if ours.get(name) != theirs[name]] == []
    last = read_rows(run)[-1]
    assert float(last["opponents/pool_size"]) == 2
    assert float(last["opponents/games"]) > 0
    assert load_agent(run, "latest").env_steps == 384


def test_a_game_without_scripted_players_is_trained_and_rated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = ["opponent=self_play", "env.target=two_player_games.OnlyForTwo"]
    settings = [each for each in small(total_steps=128) if "evaluation" not in each]
    with pytest.raises(UserError, match="needs two players, also in evaluations"):
        train([*small(), *game])
    run = train([*settings, *game, "~callbacks.evaluation"]).run_dir
    with pytest.raises(UserError, match="needs two players; name the other one by --opponent"):
        load_agent(run)

    main(["evaluate", str(run), "--opponent", str(run), "--games", "10"])

    assert "10 games" in capsys.readouterr().out


TENSOR = [
    *("env=torch_hockey", "env.kwargs.mode=shooting", "opponent=self_play", "vec_env=auto"),
    *("opponent.add_every_steps=1024", "opponent.capacity=2", "+opponent.scripted.weak=0.3"),
    "~callbacks.evaluation",
]
TENSOR_CASES = {
    "PPO": small(n_envs=32, total_steps=6144, callbacks__checkpoints__every_steps=2048),
    "SAC": [
        *REPLAY,
        *("agent=sac", "n_envs=32", "total_steps=6144", "callbacks.checkpoints.every_steps=2048"),
        *("agent.updates_per_env_step=0.01", "agent.buffer_size=2000"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TENSOR_CASES.values(), ids=list(TENSOR_CASES))
def test_self_play_in_a_tensor_env_resumes_bit_for_bit(
    case: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = [each for each in case if not each.startswith("callbacks.evaluation")]
    crash = ["+callbacks.crash._target_=own_parts.CrashAt", "+callbacks.crash.iteration=9"]
    monkeypatch.setenv("CRASH", "raise")
    with pytest.raises(RuntimeError, match="crash at iteration 9"):
        train([*case, *TENSOR, *crash])
    monkeypatch.delenv("CRASH")
    run = only_run(here)
    train([f"resume={run}"])
    whole = train([*case, *TENSOR, *crash]).run_dir

    assert read_rows(run) == read_rows(whole)
    ours, theirs = checkpoint_numbers(run), checkpoint_numbers(whole)
    names = [name for name in theirs if "['segments']" not in name]  # files have random names
    assert [name for name in names if ours.get(name) != theirs[name]] == []
    last = read_rows(run)[-1]
    assert float(last["opponents/pool_size"]) == 2
    assert 0 < float(last["opponents/weak_win_rate"]) < 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=cartpole"], "CartPole-v1 is not a two-player env"),
        (["env=torch_cartpole"], "TorchCartPole is not a two-player env"),
        (["+opponent.scripted.wek=0.5", *POOL[-2:]], "wek: neither a run folder nor an opponent"),
        (["network=lstm", "agent.n_minibatches=1", *POOL[-2:]], "cannot be recurrent"),
        (["opponent.sampling=best", *POOL[-2:]], "opponent.sampling"),
        (
            ["+curriculum={phases: {a: {opponents: {wek: 1}}}}", *POOL[-2:]],
            "curriculum.phases.a.opponents.wek: this env has no such player, only weak, strong",
        ),
    ],
)
def test_mistakes_are_refused_before_a_folder_exists(
    overrides: list[str], message: str, here: Path
) -> None:
    vec_env = ["vec_env=auto"] if "env=torch_cartpole" in overrides else []
    with pytest.raises(UserError, match=message):
        train([*small(), *vec_env, "opponent=self_play", *overrides])
    assert not (here / "runs").exists()
