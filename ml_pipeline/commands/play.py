"""play: play greedy episodes with an exported policy or a run, and print one line each."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ml_pipeline.commands._arguments import (
    RUN_HELP,
    add_shared,
    chosen_run,
    integer,
    prepare_window,
)
from ml_pipeline.metrics import shown_return

if TYPE_CHECKING:
    from ml_pipeline.envs.kinds import AnyEnv
    from ml_pipeline.policy.contracts import Policy

_OUTCOMES = {1: "won", 0: "drawn", -1: "lost"}

HELP = "play greedy episodes with a run or an exported policy"


def add_arguments(parser: ArgumentParser) -> None:
    help_text = f"file that export wrote, or {RUN_HELP}"
    parser.add_argument("policy", metavar="FILE_OR_RUN", help=help_text)
    parser.add_argument("--episodes", type=integer(1), default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--seed",
        type=integer(0),
        default=0,
        metavar="N",
        help="seed of the first episode; default: 0",
    )
    parser.add_argument(
        "--opponent",
        metavar="PLAYER",
        help="play as player 0 of two, against a scripted opponent of the env, such as weak or "
        "strong, or against another file or run",
    )
    add_shared(parser, "--render", "--root", "--trust")


def run(options: Namespace) -> None:
    import torch

    from ml_pipeline.analysis.evaluate import evaluate
    from ml_pipeline.assembly.load import load_policy
    from ml_pipeline.device import torch_threads
    from ml_pipeline.envs.factory import close_env
    from ml_pipeline.games.matches import winner_of

    path = chosen_run(options.policy, options.root)
    prepare_window(options.render)
    if options.opponent is None:
        policy, env, name = load_policy(path, render=options.render, trust=options.trust)
    else:
        policy, env, name = _load_pair(path, options)
    print(f"{name}, greedy actions")
    returns, winners = [], []
    try:
        with torch_threads(torch.device("cpu")):
            for seed in range(options.seed, options.seed + options.episodes):
                result = evaluate(policy, env, n_episodes=1, seed=seed, deterministic=True)
                limit = result.max_episode_steps
                cut = f", cut at {limit:,} steps" if result.n_cut else ""
                (episode,) = result.episodes
                returns.append(episode.episode_return)
                outcome = ""
                if options.opponent is not None:
                    winners.append(winner_of(episode, limit))
                    outcome = f"{_OUTCOMES[winners[-1]]}, "
                gained = shown_return(returns[-1])
                line = f"seed {seed}: {outcome}return {gained}, length {episode.length}"
                print(f"{line}{cut}", flush=True)
    finally:
        close_env(env)
    print(f"mean return of {len(returns)}: {shown_return(sum(returns) / len(returns))}")
    if winners:
        counts = (f"{word} {winners.count(each)}" for each, word in _OUTCOMES.items())
        print(", ".join(counts))


def _load_pair(path: str, options: Namespace) -> tuple[Policy, AnyEnv, str]:
    """Both players as one policy, the two-player env, and a title."""
    from ml_pipeline.assembly.players import env_of, load_player, open_arena
    from ml_pipeline.games.matches import PairPolicy

    arena = open_arena(env_of(path, trust=options.trust), render_mode=options.render)
    rival = chosen_run(options.opponent, options.root)
    # Both act greedily, so the seed of their noise does not matter.
    first, second = (
        load_player(each, arena, noise_seed=0, trust=options.trust) for each in (path, rival)
    )
    title = f"{arena.name}, {first.name} against {second.name}"
    return PairPolicy(first.policy, second.policy), arena.make_env(), title
