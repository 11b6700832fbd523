"""make: arguments reach training, and a second call installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY, call

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return call("make", "-C", REPOSITORY, *arguments)


def test_arguments_reach_training(tmp_path: Path) -> None:
    result = make("-n", "train", f"VENV={tmp_path}", "ARGS=n_envs=8 seed=3")

    assert f"{tmp_path}/bin/python train_ppo.py n_envs=8 seed=3" in result.stdout
    assert "-m pip install" in result.stdout


def test_nothing_is_installed_if_the_stamp_is_newer_than_the_project_file(tmp_path: Path) -> None:
    for stamp in (".installed", ".installed-dev"):
        (tmp_path / stamp).touch()

    result = make("-n", "train", "test", f"VENV={tmp_path}")

    assert "pip install" not in result.stdout
    assert "train_ppo.py" in result.stdout


def test_old_python_is_refused_in_one_line_before_anything_is_created(
    tmp_path: Path, old_python: str
) -> None:
    result = make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old_python}")

    assert result.returncode != 0
    assert "ml_pipeline needs Python 3.10 or newer, this is 3." in result.stderr
    assert not (tmp_path / "venv").exists()
