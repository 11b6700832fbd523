"""A world in an installed package joins by an entry point, with its commands and configs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, call


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages: ``maze``, which registers itself as a world."""
    files = {
        "maze/__init__.py": "",
        "maze/commands/__init__.py": "",
        "maze/commands/walk.py": (
            "HELP = 'walk through a maze'\n"
            "def add_arguments(parser): parser.add_argument('name')\n"
            "def run(options): print('walking', options.name)\n"
        ),
        "maze/conf/env/maze.yaml": "id: CartPole-v1\nkwargs:\n  max_episode_steps: 77\n",
        "maze-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: maze\nVersion: 1.0\n",
        "maze-1.0.dist-info/entry_points.txt": "[ml_pipeline.worlds]\nmaze = maze\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def command(site: Path, *words: str) -> tuple[int, str]:
    path = os.pathsep.join([str(site), str(REPOSITORY)])
    done = call(sys.executable, "-m", "ml_pipeline", *words, cwd=site, PYTHONPATH=path)
    return done.returncode, done.stdout + done.stderr


def test_commands_and_configs_of_an_installed_world_are_found(site: Path) -> None:
    assert command(site, "walk", "west") == (0, "walking west\n")

    code, output = command(site, "train", "env=maze", "--cfg", "job")

    assert code == 0
    assert "max_episode_steps: 77" in output


def test_world_that_cannot_be_imported_is_named_in_one_line(site: Path) -> None:
    (site / "maze/__init__.py").write_text("raise RuntimeError('no map')\n")

    code, output = command(site, "runs")

    assert code == 1
    assert output.startswith("the entry point ml_pipeline.worlds of maze does not work: Runtime")
    assert output.count("\n") == 1


def test_second_command_of_the_same_name_is_refused(site: Path) -> None:
    (site / "maze/commands/walk.py").rename(site / "maze/commands/train.py")

    code, output = command(site, "runs")

    assert (code, output) == (
        1,
        "maze.commands.train: ml_pipeline.commands.train has this name\n",
    )
