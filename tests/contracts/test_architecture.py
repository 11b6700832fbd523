"""Rules of the package that import-linter cannot check."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY


@pytest.mark.parametrize(
    "statement",
    [
        "import ml_pipeline.envs.workers.worker, ml_pipeline.envs.vec_env",
        "import ml_pipeline.config.train, ml_pipeline.training.contracts",
        "import runpy; runpy.run_path('train_ppo.py', run_name='__mp_main__')",
    ],
)
def test_importing_what_a_worker_imports_leaves_torch_and_wandb_out(statement: str) -> None:
    code = f"import sys; {statement}; print([m for m in ('torch', 'wandb') if m in sys.modules])"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


def test_package_files_are_empty_apart_from_the_public_names() -> None:
    package = REPOSITORY / "ml_pipeline"

    files = [file for file in package.rglob("__init__.py") if file.read_text() != ""]

    assert files == [package / "__init__.py"]


def test_the_readmes_map_names_every_folder_of_the_package() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    package = REPOSITORY / "ml_pipeline"

    folders = {file.parent for file in package.rglob("*.py")} - {package}

    assert [each.name for each in folders if f"{each.name}/" not in readme] == []


def test_the_core_names_no_algorithm() -> None:
    package = REPOSITORY / "ml_pipeline"
    own = {
        *package.glob("algorithms/**/*.py"),
        package / "moved.py",
        package / "targets.py",  # the algorithm of runs from before agent.algorithm
        package / "__init__.py",  # PPO, DQN and SAC as objects,
        package / "assembly" / "model.py",  # for users of Python
        package / "assembly" / "words.py",  # what users of other libraries type
    }

    others = [file for file in package.rglob("*.py") if file not in own]

    named = [str(file) for file in others if re.search(r"PPO|\bppo", file.read_text())]
    assert named == []
