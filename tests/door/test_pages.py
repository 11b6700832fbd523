"""The code and the counts in the documentation are correct."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, read_rows, small

from ml_pipeline.build import train

DOCS = REPOSITORY / "docs"


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def run_script(folder: Path, code: str) -> str:
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading_path_has_nine_files_and_at_most_1400_lines() -> None:
    table = (DOCS / "read_first.md").read_text().partition("##")[0]
    files = re.findall(r"\]\(\.\./([\w/]+\.py)\)", table)

    n_lines = sum(len((REPOSITORY / file).read_text().splitlines()) for file in files)

    assert len(files) == len(set(files)) == 9
    assert n_lines <= 1_400


@pytest.mark.slow
def test_script_without_hydra_trains_cartpole(here: Path) -> None:
    script = code_blocks("without_hydra.md")[0]

    output = run_script(here, script)

    returns = [float(line.split()[1]) for line in output.splitlines()]
    assert len(script.splitlines()) < 32
    assert len(returns) == 30
    assert returns[-1] > 2 * returns[0]
    assert list(here.iterdir()) == [here / "script.py"]


def test_trained_policy_is_loaded_and_played_in_three_lines(here: Path) -> None:
    run = train(small()).run_dir
    script = code_blocks("without_hydra.md")[1].replace("runs/CartPole-v1/RUN", str(run))

    output = run_script(here, script)

    statements = [line for line in script.splitlines() if line and "import" not in line]
    assert len(statements) == 3
    assert output.startswith("CartPole-v1 ")


def test_loss_of_the_page_trains_and_can_be_swept(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "my_loss.py").write_text(code_blocks("change_the_loss.md")[0])
    monkeypatch.syspath_prepend(str(here))
    target = "agent.loss._target_=my_loss.kl_penalty_loss"
    settings = [[], [target], [target, "+agent.loss.beta=30"]]

    runs = [
        train([*small(agent__learning_rate=0.01, agent__n_epochs=8), *each]).run_dir
        for each in settings
    ]

    kls = [float(read_rows(run)[0]["policy/approx_kl"]) for run in runs]
    assert kls[0] != kls[1]
    assert kls[2] < kls[1]
