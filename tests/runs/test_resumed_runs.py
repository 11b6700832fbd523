"""A run that ends early and is resumed equals, bit for bit, one that was never interrupted."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Capture, only_run, read_rows, small, wait_until
from game_boy_roms import write_game
from stopped_runs import assert_same_runs, stopped_run

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import train
from ml_pipeline.metrics import PHASE
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder

# Six iterations of 64 env steps. A checkpoint follows each third, an evaluation the fourth and the
# last, and the run ends after the fifth.
COUNTS = [
    *("n_envs=4", "total_steps=384", "callbacks.checkpoints.every_steps=192"),
    *("callbacks.evaluation.eval_every_steps=200", "vec_env.n_workers=2"),
]
PPO = [*small(), *COUNTS]
REPLAY = [
    *COUNTS,
    *("vec_env=serial", "device=cpu", "logger=none", "network.hidden_sizes=[8]"),
    *("agent.learning_starts=32", "agent.batch_size=8", "agent.iteration_length=16"),
    *("agent.buffer_size=200", "agent.updates_per_env_step=0.25"),
    *("callbacks.evaluation.n_episodes=2", "callbacks.checkpoints.final_episodes=2"),
]
DQN = ["agent=dqn", *REPLAY, "agent.target_every=4"]
PRIORITISED = [*DQN, "agent.priority_exponent=0.6", "agent.n_step=3", "agent.n_quantiles=5"]
SAC = ["agent=sac", *REPLAY]
PENDULUM = [*SAC, "env=pendulum"]
UNSEEN = "~callbacks.evaluation"
FORKED = ["vec_env=parallel", "vec_env.start_method=fork"]  # starts faster than by default

LINE = ["env.target=staged_envs.Line", "env.id=null"]
SWING = ["env.target=staged_envs.Swing", "env.id=null"]
# 4 envs end 32 short episodes per iteration, so the second phase begins after the third one.
PHASES = (
    "+curriculum={phases: {short: {env: {length: 2}, until: {n_episodes: 80}}, "
    "long: {env: {length: 5}, replay: clear}}}"
)
OPPONENTS = (
    "+curriculum={phases: {a: {opponents: {weak: 1.0}, until: {env_steps: 192}}, "
    "b: {opponents: {weak: 0.0}, env: {luck: 0.9}}}}"
)
IN_PHASE_TWO = {PHASE: (2, 2)}

TUG = [
    *("opponent=self_play", "opponent.add_every_steps=64", "opponent.capacity=2"),
    *("+opponent.scripted.weak=0.3", "env.target=two_player_games.TugOfWar"),
    "+env.kwargs={opponent: strong, luck: 0.5}",
]
TORCH_HOCKEY = [
    *("env=torch_hockey", "env.kwargs.mode=shooting", "opponent=self_play", "vec_env=auto"),
    *("opponent.add_every_steps=1024", "opponent.capacity=2", "+opponent.scripted.weak=0.3"),
    *("n_envs=256", "total_steps=24576", "callbacks.checkpoints.every_steps=12288", UNSEEN),
]
POOL = {"opponents/pool_size": (2, 2), "opponents/games": (1, 1e9)}
TORCH_POOL = {"opponents/pool_size": (2, 2), "opponents/weak_win_rate": (0.001, 0.999)}

TRADING = "env.target=trading_envs.SmallTrading"
TORCH_TRADING = "env.target=trading_envs.SmallTorchTrading"
ACCOUNT = "+env.kwargs={episode_bars: 12, window: 2, account: {leverage: 3.0, max_drawdown: 0.05}"
HELD_OUT = "+eval_env.kwargs={random_start: false, symbol: each}"
PORTFOLIO = [f"{ACCOUNT}, positions: null, portfolio: true}}", UNSEEN]

STACK = "+env.wrappers.stack={_target_: gymnasium.wrappers.FrameStackObservation, stack_size: 4}"
FRAMES = [
    *("env.target=tiny_envs.FramesEnv", STACK, "+env.kwargs.shape=[8,8]"),
    *("agent.n_step=3", "agent.stacked_frames=4", UNSEEN),
]


class Case(NamedTuple):
    """A run, how it ends, and metrics of its last iteration that show what it has been through."""

    settings: list[str]
    ending: str
    iteration: int = 5
    shows: Mapping[str, tuple[float, float]] = {}


FAST = {
    "everything that is annealed, normalised or scaled": Case(
        [
            *PPO,
            "agent.normalize_obs=true",
            "agent.scale_reward=true",
            "agent.learning_rate_schedule=adaptive",
            "agent.clip_range_schedule=linear",
            "agent.entropy_coef=0.01",
            "agent.entropy_coef_schedule=cosine",
            "+env.wrappers.learns._target_=gymnasium.wrappers.NormalizeObservation",
            "+callbacks.dice._target_=own_parts.Dice",
        ],
        "kill",
    ),
    "masks, an env with its own state methods, two halves": Case(
        [*PPO, "env.target=tiny_envs.ForbiddingEnv", "collector=double"], "error"
    ),
    "actions of two parts, recurrent": Case([*PPO, "env=lanes", "network=lstm"], "stop"),
    "attention as memory": Case([*PPO, "network=trxl", "network.window=8"], "error"),
    "a recurrent policy in a tensor env": Case(
        [*PPO, "env=torch_cartpole", "vec_env=auto", "network=lstm", "network.cell=mingru"], "kill"
    ),
    "SIGTERM within a rollout": Case(
        [*PPO, UNSEEN, "+env.wrappers.signal={_target_: own_parts.SignalAt, step: 70}"],
        "signal in a rollout",
    ),
    "PQN": Case(
        [*PPO, "agent=pqn", "+env.wrappers.signal={_target_: own_parts.SignalAt, step: 70}"],
        "signal in a rollout",
    ),
    "infos": Case([*PPO, "env.target=tiny_envs.ScoringEnv"], "signal"),
    "prioritised DQN": Case(PRIORITISED, "stop"),
    "self-play": Case([*PPO, *TUG, "opponent.sampling=hard"], "error", shows=POOL),
    "self-play, end at a phase": Case([*PPO, *TUG, OPPONENTS], "stop", 3, {**POOL, **IN_PHASE_TWO}),
}
SLOW = {
    "workers, a recurrent policy, gSDE": Case(
        [
            *PPO,
            "env=pendulum",
            "+env.kwargs.max_episode_steps=20",
            "network=lstm",
            "agent.box_policy=gsde",
            *FORKED,
            "+callbacks.dice._target_=own_parts.Dice",
        ],
        "error",
    ),
    "SAC": Case(PENDULUM, "stop"),
    "SAC with gSDE": Case(
        [*PENDULUM, "agent.box_policy=gsde", "agent.gsde_every_steps=3"], "signal"
    ),
    "discrete SAC": Case(SAC, "error"),
    "DQN in workers": Case([*PRIORITISED, "vec_env=parallel"], "stop"),
    "SAC in workers": Case([*PENDULUM, *FORKED], "kill"),
    "DQN in shared memory": Case([*DQN, "vec_env=shared"], "stop"),
    "DQN in a tensor env": Case([*PRIORITISED, "env=torch_cartpole", "vec_env=auto"], "stop"),
    "DQN with masks in a tensor env": Case(
        [*PRIORITISED, "env.target=tiny_torch_envs.Forbidding", "env.id=null", "vec_env=auto"],
        "stop",
    ),
    "SAC with several observations in a tensor env": Case(
        [
            *(*SAC, "env.target=tiny_torch_envs.Leaves", "env.id=null", "vec_env=auto"),
            "agent.normalize_obs=true",
        ],
        "kill",
    ),
    "PQN in a tensor env": Case([*PPO, "agent=pqn", "env=torch_cartpole", "vec_env=auto"], "kill"),
    "SAC in a tensor env": Case([*SAC, "env=torch_pendulum", "vec_env=auto"], "error"),
    "DQN that stores each frame once": Case([*DQN, *FRAMES], "stop"),
    "DQN, end before a phase": Case([*PRIORITISED, *LINE, PHASES], "stop", 2, IN_PHASE_TWO),
    "DQN, end at a phase": Case([*PRIORITISED, *LINE, PHASES], "stop", 3, IN_PHASE_TWO),
    "DQN, end after a phase": Case([*PRIORITISED, *LINE, PHASES], "stop", 4, IN_PHASE_TWO),
    "PPO, end before a phase": Case([*PPO, *LINE, PHASES], "stop", 2, IN_PHASE_TWO),
    "PPO, end at a phase": Case([*PPO, *LINE, PHASES], "stop", 3, IN_PHASE_TWO),
    "SAC in workers, end at a phase": Case(
        [*SAC, *SWING, *FORKED, PHASES], "stop", 3, IN_PHASE_TWO
    ),
    "SAC in workers, end after a phase": Case(
        [*SAC, *SWING, *FORKED, PHASES], "stop", 4, IN_PHASE_TWO
    ),
    "two halves, end at a phase": Case(
        [*PPO, *LINE, "vec_env=shared", "collector=double", PHASES], "stop", 3, IN_PHASE_TWO
    ),
    "a tensor env, end at a phase": Case(
        [*PPO, "env.target=tiny_torch_envs.Stages", "env.id=null", "vec_env=auto", PHASES],
        "stop",
        3,
        IN_PHASE_TWO,
    ),
    "self-play, end in the second phase": Case(
        [*PPO, *TUG, OPPONENTS], "error", 5, {**POOL, **IN_PHASE_TWO}
    ),
    "self-play in two halves": Case([*PPO, *TUG, "collector=double"], "error", shows=POOL),
    "self-play with DQN": Case(
        [*DQN, *TUG[:-1], "+env.kwargs={opponent: strong, luck: 0.5, discrete: true}"],
        "error",
        shows=POOL,
    ),
    "self-play with SAC": Case([*SAC, *TUG, "opponent.add_at_score=0.4"], "error", shows=POOL),
    "self-play in a tensor env": Case([*PPO, *TORCH_HOCKEY], "error", shows=TORCH_POOL),
    "self-play of SAC in a tensor env": Case(
        [*SAC, *TORCH_HOCKEY, "agent.updates_per_env_step=0.01", "agent.buffer_size=8000"],
        "error",
        shows=TORCH_POOL,
    ),
    "trading": Case([*PPO, TRADING, f"{ACCOUNT}}}", HELD_OUT], "error"),
    "trading in a tensor env": Case(
        [*PPO, TORCH_TRADING, f"{ACCOUNT}}}", HELD_OUT, "vec_env=auto"], "error"
    ),
    "SAC trades a portfolio": Case([*SAC, TRADING, *PORTFOLIO], "error"),
    "SAC trades a portfolio in a tensor env": Case(
        [*SAC, TORCH_TRADING, *PORTFOLIO, "vec_env=auto"], "error"
    ),
    "real hockey": Case([*PPO, "env=real_hockey", UNSEEN], "stop"),
    "Game Boy": Case([*PPO, "env=game_boy", UNSEEN], "stop"),
    "Game Boy in workers": Case([*PPO, "env=game_boy", UNSEEN, *FORKED], "stop"),
}


def settings_of(case: Case, here: Path) -> list[str]:
    """The settings of a case, and the files that it needs."""
    if "env=real_hockey" in case.settings:
        pytest.importorskip("hockey.hockey_env", reason="needs the package hockey-env")
    if "env=game_boy" not in case.settings:
        return case.settings
    files = [f"env.kwargs.{key}={value}" for key, value in write_game(here, "timing").items()]
    game = ["env.kwargs.observation=memory", "env.kwargs.episode_length=12"]
    return [*case.settings, *files, *game]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in FAST.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_resumed_run_equals_an_uninterrupted_one(case: Case, here: Path, capsys: Capture) -> None:
    settings = settings_of(case, here)

    run = stopped_run(settings, case.ending, iteration=case.iteration)
    n_rows = len(read_rows(run))
    capsys.readouterr()
    train([f"resume={run}"])
    output = capsys.readouterr().out
    end = f"+callbacks.end={{_target_: own_parts.EndAt, iteration: {case.iteration}}}"
    whole = train([*settings, end]).run_dir

    assert n_rows == case.iteration
    assert "in the middle of its episodes" in output
    assert_same_runs(run, whole)
    rows = read_rows(whole)
    assert len(rows) == 6
    for name, (lowest, highest) in case.shows.items():
        assert lowest <= float(rows[-1][name]) <= highest


def test_run_that_reaches_its_limit_continues_with_a_new_one(here: Path) -> None:
    settings = [*PPO, "agent.learning_rate_schedule=constant", UNSEEN]

    run = train([*settings, "total_steps=256"]).run_dir
    train([f"resume={run}", "total_steps=384"])

    assert_same_runs(run, train(settings).run_dir)


def _train_in_process(settings: list[str], call: str, n_calls: int) -> None:
    """Train, and SIGKILL this process before its ``n_calls``-th call of os.fsync or os.replace."""
    plain, left = getattr(os, call), [n_calls]

    def counted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args)

    setattr(os, call, counted)
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
    train(settings)


def _saved_steps(here: Path) -> int:
    """The env steps of the latest checkpoint; 0 without one."""
    if not list(here.glob("runs/*/*/checkpoints/latest.pt")):
        return 0
    return int(load_checkpoint(RunFolder.open(only_run(here)), LATEST)["env_steps"])


OFTEN = ["n_envs=2", "callbacks.checkpoints.every_steps=32"]  # an iteration has 16 steps
RING = [*OFTEN, "agent.buffer_size=60", "agent.batch_size=4", "agent.iteration_length=8"]
N_KILLS = int(os.environ.get("KILLS", "12"))


@pytest.mark.slow
@pytest.mark.timeout(200 + 20 * N_KILLS)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize(
    ("settings", "n_kills", "total_steps"),
    [
        pytest.param([*PPO, *OFTEN, UNSEEN, "agent.n_steps=8"], N_KILLS, 512 * N_KILLS, id="PPO"),
        pytest.param([*DQN, *RING, *FRAMES, "agent.priority_exponent=0.6"], 20, 1536, id="DQN"),
    ],
)
def test_run_killed_many_times_repeats_at_most_one_interval_and_equals_an_uninterrupted_one(
    here: Path, settings: list[str], n_kills: int, total_steps: int
) -> None:
    settings = [*settings, f"total_steps={total_steps}"]
    draw = random.Random(7)
    context = multiprocessing.get_context("forkserver")
    modules = ["ml_pipeline.assembly.run", "ml_pipeline.algorithms.dqn.algorithm"]
    context.set_forkserver_preload(modules)
    now, saved = settings, 0
    repeated, n_killed_while_saving = [], 0
    for kill in range(n_kills):
        # Every other kill comes from outside, at any moment; the others hit the writing of files.
        call, n_calls = draw.choice(["fsync", "replace"]), draw.randrange(8, 20)
        from_outside = kill % 2 == 0
        n_calls = 10**9 if from_outside else n_calls
        process = context.Process(target=_train_in_process, args=(now, call, n_calls))
        process.start()
        if from_outside:
            wait_until(lambda last=saved: _saved_steps(here) > last, 60)
            time.sleep(draw.uniform(0.0, 0.15))
            process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"kill {kill}"
        run = only_run(here)
        assert _saved_steps(here) >= saved
        saved, now = _saved_steps(here), [f"resume={run}"]
        repeated.append(int(read_rows(run)[-1]["env_steps"]) - saved)
        n_killed_while_saving += bool(list(run.rglob("*.tmp")))
    train(now)
    whole = train([*settings, "run_root=whole"]).run_dir

    assert max(repeated) <= 32  # the steps between two checkpoints
    assert n_killed_while_saving >= n_kills // 4
    assert saved < total_steps
    assert_same_runs(run, whole)
    assert not list(run.rglob(".*.tmp"))
    assert not (run / "replay").exists() or main(["replay", str(run)]) == 0
