"""replay: check the replay buffer of a run, and print what is in it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ml_pipeline.commands._arguments import RUN_HELP, add_shared, chosen_run
from ml_pipeline.errors import UserError

HELP = "check the replay buffer of an off-policy run and print what is in it"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_shared(parser, "--root", "--trust")


def run(options: Namespace) -> None:
    from ml_pipeline.algorithms.replay.audit import audit
    from ml_pipeline.algorithms.replay.commands._load import load_replay_buffer

    path = chosen_run(options.run, options.root)
    buffer, env_steps, sizes = load_replay_buffer(path, trust=options.trust)
    found = audit(buffer)
    n = max(found.n_transitions, 1)
    in_files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
    on_disk = sum(sizes)
    print(f"{path}, checkpoint latest of env step {env_steps:,}")
    for name, value in (
        ("transitions", f"{found.n_transitions:,}"),
        ("rows", f"{found.n_transitions // buffer.n_envs:,} of {buffer.n_envs} envs"),
        ("terminated", f"{found.n_terminated:,} ({found.n_terminated / n:.2%})"),
        ("truncated", f"{found.n_truncated:,} ({found.n_truncated / n:.2%})"),
        ("final observations", f"{found.n_finals:,}"),
        ("priorities outside the buffer", f"{found.n_outside:,}"),
        ("windows over the write head", f"{found.n_over_head:,}"),
        ("windows over the end of an episode", f"{found.n_over_end:,}"),
        ("next observations of a reset", f"{found.n_resets:,}"),
        ("in memory", f"{buffer.n_bytes / 1e6:,.2f} MB"),
        ("on disk", f"{on_disk / 1e6:,.2f} MB in {in_files}, checksums match"),
    ):
        print(f"  {name:<36}{value}")
    if found.fault:
        raise UserError(f"{path}: {found.fault}; do not train from this replay buffer")
