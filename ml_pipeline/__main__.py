"""The door beside training: evaluate, compare, runs, export, serve, play, study."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra

STATUSES = ("running", "finished", "interrupted", "failed", "died", "unknown")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends with one line and exit code 1."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        return getattr(stop, "exit_code", 130)  # 143 where SIGTERM was caught
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ml_pipeline",
        description="Look at what train_ppo.py has trained; search for good settings.",
    )
    commands = parser.add_subparsers(title="commands", required=True)

    evaluate = commands.add_parser("evaluate", help="play episodes with a trained agent")
    evaluate.add_argument("run", help="a run folder, runs/<env>/<date>_<time>_<hex>")
    evaluate.add_argument(
        "--episodes", type=partial(_whole_number, least=1), default=20, help="default: 20"
    )
    evaluate.add_argument(
        "--deterministic", action="store_true", help="the likeliest action, not a sampled one"
    )
    evaluate.add_argument(
        "--checkpoint", choices=("best", "latest"), help="default: best where there is one"
    )
    evaluate.add_argument(
        "--seed",
        type=partial(_whole_number, least=0),
        help="of the first episode; default: from the run's",
    )
    evaluate.add_argument("--video", action="store_true", help="record each episode as mp4")
    evaluate.add_argument("--render", choices=("human",), help="show the episodes in a window")
    evaluate.set_defaults(command=_evaluate)

    compare = commands.add_parser("compare", help="put runs side by side, with a report")
    compare.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders, or wandb:ENTITY/PROJECT[/RUN]"
    )
    compare.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="KEY",
        help="group by this config key, not by all that differ; may be given again",
    )
    compare.add_argument("--metric", help="a column of metrics.csv; default: evaluation's return")
    compare.add_argument(
        "--report", type=Path, metavar="DIR", help="default: runs/reports/<env>_<date>_<time>"
    )
    compare.add_argument("--open", action="store_true", help="open the report in a browser")
    compare.set_defaults(command=_compare)

    runs = commands.add_parser("runs", help="list runs; runs prune: remove some")
    runs.add_argument("action", nargs="?", choices=("list", "prune"), default="list")
    runs.add_argument("--root", type=Path, default=Path("runs"), help="default: runs")
    runs.add_argument("--env", help="only those of this env")
    runs.add_argument(
        "--status", action="append", choices=STATUSES, help="only those; may be given again"
    )
    runs.add_argument("--yes", action="store_true", help="prune: do it, and do not only show it")
    runs.set_defaults(command=_runs)

    export = commands.add_parser("export", help="write the policy of a run as one file")
    export.add_argument("run", help="a run folder")
    export.add_argument("--format", choices=("pt2", "onnx"), default="pt2", help="default: pt2")
    export.add_argument(
        "--out", type=Path, metavar="FILE", help="default: policy.pt2 or policy.onnx in RUN"
    )
    export.add_argument(
        "--checkpoint", choices=("best", "latest"), help="default: best where there is one"
    )
    export.set_defaults(command=_export)

    serve = commands.add_parser("serve", help="answer observations over HTTP")
    serve.add_argument("file", help="what export has written")
    serve.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    serve.add_argument(
        "--port",
        type=partial(_whole_number, least=0, most=65_535),
        default=8321,
        help="default: 8321; 0: any that is free",
    )
    serve.add_argument(
        "--max-batch",
        type=partial(_whole_number, least=1),
        default=64,
        help="observations in one pass of the policy; default: 64",
    )
    serve.set_defaults(command=_serve)

    play = commands.add_parser("play", help="play greedy episodes, one line each")
    play.add_argument("policy", metavar="FILE_OR_RUN", help="what export has written, or a run")
    play.add_argument(
        "--episodes", type=partial(_whole_number, least=1), default=5, help="default: 5"
    )
    play.add_argument(
        "--seed",
        type=partial(_whole_number, least=0),
        default=0,
        help="of the first episode; default: 0",
    )
    play.add_argument("--render", choices=("human",), help="show it in a window")
    play.set_defaults(command=_play)

    study = commands.add_parser("study", help="search for good hyperparameters")
    _add_study_commands(
        study.add_subparsers(
            title="commands", required=True, metavar="start | status | dashboard | best"
        )
    )
    return parser


def _add_study_commands(commands: Any) -> None:
    start = commands.add_parser("start", help="begin a study, join it, or go on with it")
    start.add_argument("name", help="of the study: studies/NAME/")
    start.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="of every trial, as for train_ppo.py; n_trials=, n_jobs= and space= are the study's",
    )
    start.set_defaults(command=_study_start)

    status = commands.add_parser("status", help="trials, best values, trials an hour, ETA")
    status.add_argument("name", nargs="?", help="default: a line for each study")
    status.set_defaults(command=_study_status)

    dashboard = commands.add_parser("dashboard", help="look at a study in a browser")
    dashboard.add_argument("name")
    dashboard.add_argument(
        "--port", type=partial(_whole_number, least=1), default=8080, help="default: 8080"
    )
    dashboard.set_defaults(command=_study_dashboard)

    best = commands.add_parser("best", help="write conf/experiment/best_NAME.yaml")
    best.add_argument("name")
    best.add_argument(
        "--deploy", type=Path, metavar="DIR", help="keep the best policy there, if it is better"
    )
    best.add_argument(
        "--episodes",
        type=partial(_whole_number, least=1),
        default=100,
        help="that decide whether it is better; default: 100",
    )
    best.add_argument(
        "--seed",
        type=partial(_whole_number, least=0),
        help="of the first of them; default: a new one each time",
    )
    best.set_defaults(command=_study_best)

    work = commands.add_parser("work")  # what start starts
    work.add_argument("name")
    work.add_argument("--first", type=int, required=True)
    work.add_argument("--parent", type=int, required=True)
    work.set_defaults(command=_study_work)


def _whole_number(text: str, *, least: int, most: int | None = None) -> int:
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        limit = f"at least {least}" if most is None else f"{least} to {most}"
        raise argparse.ArgumentTypeError(f"must be a whole number of {limit}, got {text}")
    return int(text)


def _evaluate(options: argparse.Namespace) -> None:
    # Imported here: torch takes seconds, and --help must not.
    from ml_pipeline.analysis.evaluate import MAX_EPISODE_STEPS, evaluate
    from ml_pipeline.analysis.video import record_video
    from ml_pipeline.door.load import load_agent
    from ml_pipeline.runs.run_folder import RunFolder
    from ml_pipeline.seeding import stream_seed

    if options.video and options.render:
        raise UserError("--video and --render exclude each other: an env renders in one way")
    render_mode = "rgb_array" if options.video else options.render
    trained = load_agent(options.run, options.checkpoint, render_mode=render_mode)
    seed = options.seed
    if seed is None:
        seed = stream_seed(trained.seed, "evaluate command")
    how = {"n_episodes": options.episodes, "seed": seed, "deterministic": options.deterministic}
    if options.video:
        folder = RunFolder.open(options.run).videos
        name = f"{trained.checkpoint}-{trained.env_steps}"
        result, videos = record_video(trained.agent, lambda: trained.env, folder, name, **how)
        for path in videos:
            print(path)
    else:
        result = evaluate(trained.agent, trained.env, **how)
        trained.env.close()
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


def _compare(options: argparse.Namespace) -> None:
    from ml_pipeline.analysis import compare
    from ml_pipeline.analysis.report import write_report
    from ml_pipeline.extras import MissingExtraError
    from ml_pipeline.runs.console import wide_console

    runs = _read_runs(options.runs)
    compare.check_one_env(runs)
    metric = compare.chosen_metric(runs, options.metric)
    groups = compare.grouped(runs, options.by)
    console = wide_console()
    console.print(compare.comparison_table(runs))
    console.print()
    console.print(compare.groups_table(groups, metric))
    for line in compare.verdicts(groups, metric):
        console.print(line, soft_wrap=True)
    try:
        page = write_report(options.report or _report_folder(runs[0].env), groups, metric)
    except MissingExtraError as error:
        if options.report is not None or options.open:
            raise
        print(error)  # nobody has asked for it by name
        return
    print(f"report: {page}")
    if options.open:
        webbrowser.open(page.resolve().as_uri())


def _runs(options: argparse.Namespace) -> None:
    from ml_pipeline.analysis.listing import find_runs, prune, runs_table
    from ml_pipeline.runs.console import wide_console

    wanted = options.status or STATUSES
    if options.action == "prune" and options.status is None:
        raise UserError("say what to remove: --status failed --status died, for example")
    runs = [
        info
        for info in find_runs(options.root)
        if info.status in wanted and options.env in (None, info.summary.get("env"))
    ]
    if not runs:
        print(f"no such runs in {options.root}")
        return
    wide_console().print(runs_table(runs))
    if options.action == "prune" and not options.yes:
        print(f"nothing is removed yet; to remove these {len(runs)} with all they hold: --yes")
    elif options.action == "prune":
        prune(runs)
        print(f"{len(runs)} runs removed")


def _read_runs(paths: Sequence[str]) -> list[Any]:
    from ml_pipeline.analysis.compare import read_run
    from ml_pipeline.analysis.wandb_runs import PREFIX, download
    from ml_pipeline.door.compose import plain_config

    runs = []
    for given in paths:
        for path in download(given) if given.startswith(PREFIX) else [given]:
            try:
                runs.append(read_run(path, plain_config(path)))
            except UserError as error:  # runs/<env>/* may hold one that was stopped as it began
                print(f"left out: {error}", file=sys.stderr)
    if not runs:
        raise UserError("nothing is left to compare")
    return runs


def _report_folder(env: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", env)
    return Path("runs") / "reports" / f"{name}_{datetime.now():%Y-%m-%d_%H-%M-%S}"


def _export(options: argparse.Namespace) -> None:
    from ml_pipeline.door.load import export_run
    from ml_pipeline.runs.console import python_command

    trained, path, policy, agreement = export_run(
        options.run, options.out, file_format=options.format, checkpoint=options.checkpoint
    )
    print(
        f"{trained.env_name}, checkpoint {trained.checkpoint} of env step {trained.env_steps:,}: "
        f"{path} ({path.stat().st_size / 1e3:,.0f} kB)"
    )
    for kind, tensors in (("inputs", policy.inputs), ("outputs", policy.outputs)):
        shown = (f"{k} {v.dtype} {['batch', *v.shape]}" for k, v in tensors.items())
        print(f"{kind + ':':<9} {', '.join(shown).replace(chr(39), '')}")
    ties = agreement.n_other_actions
    told = f"in {ties} a tie fell to the other action" if ties else "actions equal"
    print(
        f"checked on {agreement.n_observations:,} observations: "
        f"max difference {agreement.max_difference:.2g}, {told}"
    )
    for command in ("serve", "play"):
        line = f"{python_command()} -m ml_pipeline {command} {shlex.quote(str(path))}"
        print(f"{command + ':':<9} {line}")


def _serve(options: argparse.Namespace) -> None:
    from ml_pipeline.deploy.exported import ExportedPolicy
    from ml_pipeline.deploy.serve import serve

    policy = ExportedPolicy.load(options.file)
    serve(policy, host=options.host, port=options.port, max_batch=options.max_batch)


def _play(options: argparse.Namespace) -> None:
    import torch

    from ml_pipeline.analysis.evaluate import MAX_EPISODE_STEPS, evaluate
    from ml_pipeline.door.load import load_policy
    from ml_pipeline.door.parts import torch_threads
    from ml_pipeline.envs.factory import close_env

    policy, env, name = load_policy(options.policy, render=options.render)
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


def _study_start(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.start import start

    start(options.name, options.overrides)


def _study_work(options: argparse.Namespace) -> None:
    from ml_pipeline.study.trials import work

    work(options.name, first=options.first, parent=options.parent)


def _study_status(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.report import print_status

    print_status(options.name)


def _study_dashboard(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.dashboard import show

    show(options.name, port=options.port)


def _study_best(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.best import write_best

    write_best(options.name, deploy=options.deploy, n_episodes=options.episodes, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
