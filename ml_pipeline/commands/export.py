"""export: write the policy of a run to one file and compare it with the agent."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ml_pipeline.commands._arguments import RUN_HELP, add_shared, chosen_run

HELP = "write the policy of a run to one file"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--format", choices=("pt2", "onnx"), default="pt2", help="default: pt2")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: policy.pt2 or policy.onnx in RUN"
    )
    add_shared(parser, "--checkpoint", "--root", "--trust")


def run(options: Namespace) -> None:
    from ml_pipeline.assembly.load import export_run
    from ml_pipeline.runs.console import user_command

    trained, path, policy, agreement = export_run(
        chosen_run(options.run, options.root),
        options.out,
        file_format=options.format,
        checkpoint=options.checkpoint,
        trust=options.trust,
    )
    print(
        f"{trained.env_name}, checkpoint {trained.checkpoint} of env step {trained.env_steps:,}: "
        f"{path} ({path.stat().st_size / 1e3:,.0f} kB)"
    )
    for kind, tensors in (("inputs", policy.inputs), ("outputs", policy.outputs)):
        shown = (f"{k} {v.dtype} {['batch', *v.shape]}" for k, v in tensors.items())
        print(f"{kind + ':':<9} {', '.join(shown).replace(chr(39), '')}")
    ties = agreement.n_other_actions
    actions = f"{ties} ties gave another action" if ties else "actions equal"
    print(
        f"checked on {agreement.n_observations:,} observations: "
        f"max difference {agreement.max_difference:.2g}, {actions}"
    )
    for command in ("serve", "play"):
        print(f"{command + ':':<9} {user_command(command)} {shlex.quote(str(path))}")
    if "market" in policy.metadata:
        print(f"paper:    {user_command('paper')} {shlex.quote(str(path))} --data FILE")
