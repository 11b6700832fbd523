"""Tab completion of the console command, asked directly and in a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Capture

from ml_pipeline.__main__ import main
from ml_pipeline.commands.completion import completions

RUN = "runs/CartPole-v1/2026-01-01_12-00-00_ab12"


@pytest.fixture
def folder(here: Path) -> Path:
    """A folder with a run, a study and an env of its own."""
    for name in (f"{RUN}/config.yaml", "studies/lander/study.yaml", "conf/env/maze.yaml"):
        path = here / name
        path.parent.mkdir(parents=True)
        path.touch()
    return here


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ml-pipeline ev", ["evaluate"]),
        ("ml-pipeline check", ["check-env"]),
        ("ml-pipeline evaluate --determ", ["--deterministic"]),
        ("ml-pipeline runs --status f", ["finished", "failed"]),
        ("ml-pipeline runs pr", ["prune"]),
        ("ml-pipeline evaluate ", ["latest", RUN]),
        ("ml-pipeline evaluate runs/C", [RUN]),
        ("ml-pipeline evaluate --episodes 3 runs/", [RUN]),
        ("ml-pipeline compare a b runs/", [RUN]),
        ("ml-pipeline evaluate --episodes ", []),
        ("ml-pipeline study st", ["start", "status"]),
        ("ml-pipeline study status l", ["lander"]),
        ("ml-pipeline study start lander n_t", ["n_trials="]),
        ("ml-pipeline study start lander env=cartp", ["env=cartpole"]),
        ("ml-pipeline train env=cartp", ["env=cartpole"]),
        ("ml-pipeline train env=maz", ["env=maze"]),
        ("ml-pipeline train seed=1 agent.learning_rate_", ["agent.learning_rate_schedule="]),
        ("ml-pipeline train agent.tau", []),
        ("ml-pipeline train agent=sac agent.tau", ["agent.tau="]),
        ("ml-pipeline train callbacks.check", ["callbacks.checkpoints."]),
        ("ml-pipeline train ~callbacks.check", ["~callbacks.checkpoints."]),
        ("ml-pipeline train agent.normalize_obs=", [
            "agent.normalize_obs=true", "agent.normalize_obs=false",
        ]),
        ("ml-pipeline train resume=r", [f"resume={RUN}"]),
        ("ml-pipeline train --config-d", ["--config-dir"]),
        ("ml-pipeline nothing ", []),
        ("ml-pipeline train 'env=cartp", []),
    ],
)  # fmt: skip
def test_words_that_may_end_a_line(line: str, found: list[str], folder: Path) -> None:
    assert completions(line)[1] == found


def test_keys_are_offered_one_level_at_a_time(folder: Path) -> None:
    _, found = completions("ml-pipeline train ")

    assert {"env=", "env.", "agent=", "agent.", "seed=", "total_steps="} <= set(found)
    assert all(word.endswith(("=", ".")) for word in found)


def test_completion_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom ml_pipeline.commands.completion import completions\n"
        "assert completions('ml-pipeline train agent.ga')[1]\nprint('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )

    assert result.stdout == "False\n", result.stderr


def test_script_of_each_shell_is_printed(capsys: Capture) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert f"completion {shell} --line" in capsys.readouterr().out


def in_shell(shell: str, script: str, folder: Path) -> str:
    """The output of a script in a shell that finds the console command."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = folder / "bin" / "ml-pipeline"
    command.parent.mkdir()
    code = "import sys; from ml_pipeline.__main__ import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    result = subprocess.run(
        [program, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.stderr == ""
    return result.stdout


@pytest.mark.slow
def test_bash_completes_commands_runs_and_what_follows_an_equals_sign(folder: Path) -> None:
    script = """
eval "$(ml-pipeline completion bash)"
complete -p ml-pipeline
compopt() { echo "compopt $1 $2"; }  # it works only while the user types
ask() {
    COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDS=(ml-pipeline)
    _ml_pipeline
    echo "${COMPREPLY[@]}"
}
ask "ml-pipeline eval"
ask "ml-pipeline evaluate runs/C"
ask "ml-pipeline train env=cartp"
ask "ml-pipeline train agent.gam"
"""

    lines = in_shell("bash", script, folder).splitlines()

    assert lines == [
        "complete -o default -F _ml_pipeline ml-pipeline",
        *("evaluate", RUN, "cartpole", "compopt -o nospace", "agent.gamma="),
    ]


@pytest.mark.slow
def test_fish_completes_settings(folder: Path) -> None:
    script = 'ml-pipeline completion fish | source; complete -C "ml-pipeline train env=cartp"'

    assert in_shell("fish", script, folder).splitlines() == ["env=cartpole"]
