"""play: play greedy episodes with an exported policy or a run, and print one line each."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ml_pipeline.commands._arguments import RUN_HELP, add_root, add_trust, chosen_run, integer

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
    parser.add_argument("--render", choices=("human",), help="show the episodes in a window")
    add_root(parser)
    add_trust(parser)


def run(options: Namespace) -> None:
    import torch

    from ml_pipeline.analysis.evaluate import evaluate
    from ml_pipeline.door.load import load_policy
    from ml_pipeline.door.parts import torch_threads
    from ml_pipeline.envs.evaluation import MAX_EPISODE_STEPS
    from ml_pipeline.envs.factory import close_env

    path = chosen_run(options.policy, options.root)
    policy, env, name = load_policy(path, render=options.render, trust=options.trust)
    print(f"{name}, greedy actions")
    returns = []
    try:
        with torch_threads(torch.device("cpu")):
            for seed in range(options.seed, options.seed + options.episodes):
                result = evaluate(policy, env, n_episodes=1, seed=seed, deterministic=True)
                cut = f", cut at {MAX_EPISODE_STEPS:,} steps" if result.n_cut else ""
                (episode,) = result.episodes
                returns.append(episode.episode_return)
                line = f"seed {seed}: return {returns[-1]:.1f}, length {episode.length}{cut}"
                print(line, flush=True)
    finally:
        close_env(env)
    print(f"mean return of {len(returns)}: {sum(returns) / len(returns):.1f}")
