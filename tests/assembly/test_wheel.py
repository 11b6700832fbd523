"""The wheel: conf/, py.typed and the command ml-pipeline, used without a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY, call, only_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, because setuptools leaves build/ in the source folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ml_pipeline", "conf"):
        shutil.copytree(REPOSITORY / name, source / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip("wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """A new virtual environment with the wheel.

    It reads torch and the other dependencies from this interpreter's packages: a second copy
    would cost gigabytes. Python ignores .pth files there, so the clone is not importable.
    """
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    # pip may find the clone among the dependencies, and would then skip the wheel.
    install = ["install", "--ignore-installed", "--no-deps", "--no-index", str(wheel)]
    pip("--python", str(folder / "bin" / "python"), *install)
    return folder


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def output_of(*command: str | Path) -> str:
    result = call(*command, PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_wheel_contains_the_config_and_the_type_marker_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    presets = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("conf/**/*.yaml")}
    assert {f"ml_pipeline/{preset}" for preset in presets} <= set(names)
    of_worlds = REPOSITORY.glob("ml_pipeline/worlds/*/conf/**/*.yaml")
    assert {str(path.relative_to(REPOSITORY)) for path in of_worlds} <= set(names)
    assert "ml_pipeline/py.typed" in names
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"ml_pipeline"}


def test_installed_package_trains_and_resumes_from_an_empty_folder(
    environment: Path, here: Path
) -> None:
    where = output_of(
        environment / "bin" / "python", "-c", "import ml_pipeline as m; print(m.__file__)"
    )
    assert Path(where).is_relative_to(environment)
    program = environment / "bin" / "ml-pipeline"

    output = output_of(
        program, "train", "env=cartpole", "n_envs=8", "total_steps=2048", "vec_env=parallel"
    )

    run = only_run(here).relative_to(here)
    assert "finished at env step 2,048 of 2,048" in output
    assert f"{program} train resume={run} total_steps=4096" in output
    assert f"{program} evaluate {run} --deterministic" in output
    assert f"{program} train env=cartpole" in (run / "summary.json").read_text()
    assert '"git_commit": null' in (run / "summary.json").read_text()
    assert "env step 4,096 of 4,096" in output_of(
        program, "train", f"resume={run}", "total_steps=4096"
    )
    assert "mean return of 2" in output_of(program, "play", run, "--episodes", "2")
    assert "ml-pipeline train -m seed=1,2,3" in output_of(program, "train", "--help")
