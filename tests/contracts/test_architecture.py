"""Rules of the house that a linter of imports cannot see."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPOSITORY


@pytest.mark.parametrize(
    "statement",
    [
        "import ml_pipeline.envs.workers.worker, ml_pipeline.envs.vec_env",
        "import ml_pipeline.config.train, ml_pipeline.protocols",
        "import runpy; runpy.run_path('train_ppo.py', run_name='__mp_main__')",
    ],
)
def test_importing_what_a_worker_imports_leaves_torch_and_wandb_out(statement: str) -> None:
    code = f"import sys; {statement}; print([m for m in ('torch', 'wandb') if m in sys.modules])"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


def test_package_files_are_empty() -> None:
    for file in (REPOSITORY / "ml_pipeline").rglob("__init__.py"):
        assert file.read_text() == "", file


def test_the_readmes_map_names_every_folder_of_the_package() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    package = REPOSITORY / "ml_pipeline"

    folders = {file.parent for file in package.rglob("*.py")} - {package}

    assert [each.name for each in folders if f"{each.name}/" not in readme] == []
