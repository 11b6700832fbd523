"""Rules of the house that a linter of imports cannot see."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY


@pytest.mark.parametrize(
    "statement",
    [
        "import ml_pipeline.envs.env_worker, ml_pipeline.envs.factory, ml_pipeline.envs.vec_env",
        "import ml_pipeline.config, ml_pipeline.protocols",
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


def test_the_readmes_map_shows_every_module_and_nothing_else() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    block = readme.partition("## The map of the house")[2].partition("```")[2].partition("```")[0]
    shown = set(re.findall(r"[\w_]+\.py", block))

    modules = {file.name for file in (REPOSITORY / "ml_pipeline").rglob("*.py")}
    assert shown == (modules - {"__init__.py"}) | {"train_ppo.py"}
