"""evaluate: play new episodes with a trained agent and print its returns, or games and results."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ml_pipeline.commands._arguments import (
    ENV_HELP,
    MOST_GAMES,
    RUN_HELP,
    add_shared,
    check_actions,
    chosen_run,
    integer,
    prepare_window,
)
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import counted, shown_return

if TYPE_CHECKING:
    from pathlib import Path

    from ml_pipeline.analysis.evaluate import Evaluation
    from ml_pipeline.assembly.players import Arena, Player
    from ml_pipeline.envs.kinds import MakeEnv
    from ml_pipeline.games.matches import Games
    from ml_pipeline.policy.contracts import Policy

_N_EPISODES, _N_GAMES, _N_SHOWN_GAMES = 20, 200, 2

HELP = "play episodes with a trained agent and print its returns, or games against an opponent"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--episodes", type=integer(1), metavar="N", help=f"default: {_N_EPISODES}")
    parser.add_argument(
        "--opponent",
        metavar="PLAYER",
        help="play games of two players against this one: a scripted opponent of the env, such "
        "as weak or strong, or another run",
    )
    parser.add_argument(
        "--games",
        type=integer(2),
        metavar="N",
        help=f"with --opponent; default: {_N_GAMES}, or {_N_SHOWN_GAMES} with --video or --render",
    )
    parser.add_argument("--env", metavar="NAME_OR_RUN", help=f"{ENV_HELP}; default: that of RUN")
    add_shared(parser, "--deterministic", "--checkpoint")
    parser.add_argument(
        "--seed",
        type=integer(0),
        metavar="N",
        help="seed of the first episode or game; default: derived from the seed of the run; with "
        "--opponent, the same for every run",
    )
    parser.add_argument("--video", action="store_true", help="record each episode as mp4")
    add_shared(parser, "--render", "--root", "--trust")


def run(options: Namespace) -> None:
    if options.video and options.render:
        raise UserError("--video and --render: an env renders in one way; choose one of them")
    if options.opponent is None and options.games is not None:
        raise UserError("--games: needs two players; add --opponent, or use --episodes")
    if options.opponent is not None and options.episodes is not None:
        raise UserError("--episodes: with --opponent, set the number of games with --games")
    prepare_window(options.render)
    if options.opponent is None:
        _play_episodes(options)
    else:
        _play_games(options)


def _render_mode(options: Namespace) -> str | None:
    return "rgb_array" if options.video else options.render


def _play_episodes(options: Namespace) -> None:
    from ml_pipeline.analysis.evaluate import left_out
    from ml_pipeline.assembly.load import load_agent
    from ml_pipeline.assembly.players import chosen_env
    from ml_pipeline.envs.judged import JudgedEnv
    from ml_pipeline.runs.console import user_command
    from ml_pipeline.runs.run_folder import RunFolder
    from ml_pipeline.seeding import stream_seed

    run_dir = chosen_run(options.run, options.root)
    env = None
    if options.env is not None:
        env = chosen_env(chosen_run(options.env, options.root), trust=options.trust)
    trained = load_agent(
        run_dir,
        options.checkpoint,
        render_mode=_render_mode(options),
        env=env,
        trust=options.trust,
    )
    seed = options.seed
    if seed is None:
        seed = stream_seed(trained.seed, "evaluate command")
    n_episodes = options.episodes or _N_EPISODES
    how = {"n_episodes": n_episodes, "seed": seed, "deterministic": options.deterministic}
    if options.video or options.render:
        name = f"{trained.checkpoint}-{trained.env_steps}"
        folder = RunFolder.open(run_dir, trust=options.trust).videos if options.video else None
        how["n_episodes"] = 1 if options.deterministic and trained.is_deterministic else n_episodes
        result = _shown(trained.agent, lambda: trained.env, folder, name, **how)
    else:
        result = trained.evaluate(**how)
    print(
        f"{trained.env_name}, checkpoint {trained.checkpoint} of env step {trained.env_steps:,}, "
        f"{counted(len(result.episodes), 'episode')} from seed {seed}, {_actions(options)} actions"
    )
    if line := left_out(result, n_episodes):
        print(line)
    names = ("mean", "std", "min", "max")
    figures = "  ".join(f"{name} {shown_return(getattr(result, name))}" for name in names)
    print(f"return: {figures}   mean length {result.mean_length:.1f}")
    if result.n_cut:
        limit = f"{result.max_episode_steps:,}"
        print(f"{result.n_cut} episodes did not end and were cut at {limit} steps")
    kind = type(trained.env.unwrapped)
    if isinstance(kind, JudgedEnv):
        command = user_command(kind.judge_command)
        print(f"returns are not a judgement; see: {command} {shlex.quote(run_dir)}")


def _shown(
    policy: Policy, make_env: MakeEnv, folder: Path | None, name: str, **how: Any
) -> Evaluation:
    """Play in one env: record videos in ``folder``, or None: it renders in a window."""
    from ml_pipeline.analysis.evaluate import evaluate
    from ml_pipeline.analysis.video import record_video

    if folder is None:
        with closing(make_env()) as env:
            return evaluate(policy, env, **how)
    result, videos = record_video(policy, make_env, folder, name, **how)
    for path in videos:
        print(path)
    return result


def _actions(options: Namespace) -> str:
    return "greedy" if options.deterministic else "sampled"


def _play_games(options: Namespace) -> None:
    import torch

    from ml_pipeline.analysis.evaluate import MAX_EPISODE_STEPS
    from ml_pipeline.assembly.players import chosen_env, env_of, load_player, open_arena
    from ml_pipeline.device import torch_threads
    from ml_pipeline.games.tournament import DRAWS_HINT, MANY_DRAWS, counts_lines
    from ml_pipeline.seeding import stream_seed

    run_dir = chosen_run(options.run, options.root)
    if options.env is None:
        env = env_of(run_dir, trust=options.trust)
    else:
        env = chosen_env(chosen_run(options.env, options.root), trust=options.trust)
    arena = open_arena(env, render_mode=_render_mode(options))
    seed = stream_seed(0, "games") if options.seed is None else options.seed
    noise = [stream_seed(seed, f"actions of player {number}") for number in range(2)]
    checkpoint, trust = options.checkpoint, options.trust
    first = load_player(run_dir, arena, noise_seed=noise[0], checkpoint=checkpoint, trust=trust)
    rival = chosen_run(options.opponent, options.root)
    second = load_player(rival, arena, noise_seed=noise[1], trust=trust)
    for player in (first, second):
        check_actions(player, deterministic=options.deterministic)
    with torch_threads(torch.device("cpu")):
        games = _played(options, run_dir, arena, (first, second), seed)
    counts = games.counts
    print(f"{first.name} ({first.origin}) against {second.name} ({second.origin})")
    print(f"{arena.name}, {counts.n_games:,} games from seed {seed}, {_actions(options)} actions")
    for line in counts_lines(counts):
        print(line)
    for side, each in enumerate(games[:2]):
        print(f"as player {side}: wins {each.wins}, draws {each.draws}, losses {each.losses}")
    if games.n_cut:
        n_cut = games.n_cut
        print(f"{n_cut} games did not end, were cut at {MAX_EPISODE_STEPS:,} steps, and are draws")
    if counts.draws > MANY_DRAWS * counts.n_games:
        print(f"most games are draws: {DRAWS_HINT}")


def _played(
    options: Namespace, run_dir: str, arena: Arena, players: tuple[Player, Player], seed: int
) -> Games:
    from ml_pipeline.games.matches import Side, play_games, play_sides
    from ml_pipeline.runs.run_folder import RunFolder

    first, second = players
    policies = first.policy, second.policy
    is_shown = options.video or options.render
    n_games = options.games or (_N_SHOWN_GAMES if is_shown else _N_GAMES)
    how = {"deterministic": options.deterministic}
    if not is_shown:
        with closing(arena.make_envs(n_envs=min(n_games, MOST_GAMES))) as envs:
            return play_games(*policies, envs, n_games=n_games, seed=seed, **how)

    folder = RunFolder.open(run_dir, trust=options.trust).videos if options.video else None

    def play(side: Side) -> Evaluation:
        number = int(side.is_swapped)
        name = f"{first.name}-against-{second.name}-as-player-{number}".replace("/", "-")
        place = {"n_episodes": side.n_games, "seed": side.seed, **how}
        return _shown(side.policy, arena.make_env, folder, name, **place)

    return play_sides(*policies, play, n_games=n_games, seed=seed)
