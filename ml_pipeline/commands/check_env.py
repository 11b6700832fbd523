"""check-env: try an env as training would use it, and print what to correct."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ml_pipeline.errors import UserError
from ml_pipeline.metrics import counted

HELP = "try an env and print what to correct before training in it"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "env", help="id such as CartPole-v1, class such as my_module.MyEnv, or preset: env=gymnax"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train: +env.kwargs.size=3"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="how long to play; default: 2"
    )


def run(options: Namespace) -> None:
    from ml_pipeline.analysis.check_env import check_env
    from ml_pipeline.assembly.agent import mask_key
    from ml_pipeline.assembly.build import build_env_factory
    from ml_pipeline.assembly.compose import checked_config, compose_config, find_modules_in_cwd
    from ml_pipeline.envs.trial import slow_trial
    from ml_pipeline.runs.console import say_if_slow

    find_modules_in_cwd()
    key = "env.id" if _is_id(options.env) else "env.target"
    word = options.env if options.env.startswith("env=") else f"{key}={options.env}"
    config = checked_config(compose_config([word, *options.overrides]))
    slow = slow_trial(config.env.name, config.vec_env, in_worker=True)
    with say_if_slow(slow, seconds=options.seconds + 10.0):
        found = check_env(
            build_env_factory(config.env),
            config.env.name,
            config.vec_env,
            mask_key=mask_key(config),
            seconds=options.seconds,
        )
    for fact in found.facts:
        print(fact)
    for remark in found.remarks:
        print(f"remark: {remark}")
    if found.faults:
        raise UserError("\n".join(f"fault: {fault}" for fault in found.faults))
    with_remarks = f", with {counted(len(found.remarks), 'remark')}"
    print("ready to train" + (with_remarks if found.remarks else ""))


def _is_id(name: str) -> bool:
    """``CartPole-v1``, ``ALE/Pong-v5`` and ``my_module:Mine-v0`` are ids; a class has dots only."""
    import gymnasium as gym

    return any(mark in name for mark in "-/:") or name in gym.registry
