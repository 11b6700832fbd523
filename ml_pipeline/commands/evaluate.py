"""evaluate: play new episodes with a trained agent and print its returns."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing

from ml_pipeline.commands._arguments import RUN_HELP, add_root, add_trust, chosen_run, integer
from ml_pipeline.errors import UserError

_MOST_ENVS = 8  # played at the same time

HELP = "play episodes with a trained agent and print its returns"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--episodes", type=integer(1), default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--deterministic", action="store_true", help="take the most likely action; default: sample"
    )
    parser.add_argument(
        "--checkpoint", choices=("best", "latest"), help="default: best if saved, else latest"
    )
    parser.add_argument(
        "--seed",
        type=integer(0),
        metavar="N",
        help="seed of the first episode; default: derived from the seed of the run",
    )
    parser.add_argument("--video", action="store_true", help="record each episode as mp4")
    parser.add_argument("--render", choices=("human",), help="show the episodes in a window")
    add_root(parser)
    add_trust(parser)


def run(options: Namespace) -> None:
    from ml_pipeline.analysis.evaluate import evaluate, evaluate_batch
    from ml_pipeline.analysis.video import record_video
    from ml_pipeline.door.load import load_agent
    from ml_pipeline.envs.evaluation import MAX_EPISODE_STEPS
    from ml_pipeline.runs.run_folder import RunFolder
    from ml_pipeline.seeding import stream_seed

    if options.video and options.render:
        raise UserError("--video and --render: an env renders in one way; choose one of them")
    render_mode = "rgb_array" if options.video else options.render
    run_dir = chosen_run(options.run, options.root)
    trained = load_agent(run_dir, options.checkpoint, render_mode=render_mode, trust=options.trust)
    seed = options.seed
    if seed is None:
        seed = stream_seed(trained.seed, "evaluate command")
    how = {"n_episodes": options.episodes, "seed": seed, "deterministic": options.deterministic}
    if options.video:
        folder = RunFolder.open(run_dir).videos
        name = f"{trained.checkpoint}-{trained.env_steps}"
        result, videos = record_video(trained.agent, lambda: trained.env, folder, name, **how)
        for path in videos:
            print(path)
    elif options.render:
        result = evaluate(trained.agent, trained.env, **how)
        trained.env.close()
    else:
        n_envs = min(options.episodes, _MOST_ENVS)
        with closing(trained.make_envs(n_envs=n_envs)) as envs:
            result = evaluate_batch(trained.agent, envs, **how)
    actions = "greedy" if options.deterministic else "sampled"
    print(
        f"{trained.env_name}, checkpoint {trained.checkpoint} of env step {trained.env_steps:,}, "
        f"{options.episodes} episodes from seed {seed}, {actions} actions"
    )
    print(
        f"return: mean {result.mean:.1f}  std {result.std:.1f}  "
        f"min {result.min:.1f}  max {result.max:.1f}   mean length {result.mean_length:.1f}"
    )
    if result.n_cut:
        print(f"{result.n_cut} episodes did not end and were cut at {MAX_EPISODE_STEPS:,} steps")
