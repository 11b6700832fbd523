"""Documentation matches the code: its links, files, scripts, figures and counts are correct."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, call, read_rows, small

from ml_pipeline.assembly.compose import compose_config
from ml_pipeline.assembly.run import train

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)]+)\)")
FILE = re.compile(r"(?<![\w/])(?:ml_pipeline|tests|benchmarks|conf|docs)/[\w/.-]+\.\w+")


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_their_anchors_resolve(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]

    assert [link for link in links if not resolves(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page: Path) -> None:
    files = [file for file in FILE.findall(page.read_text()) if "NAME" not in file]

    assert [file for file in files if not (REPOSITORY / file).exists()] == []


def test_readme_links_every_page_of_the_docs() -> None:
    links = LINK.findall(README.read_text())

    assert [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in links] == []


def test_speed_chart_shows_figures_of_the_benchmarks_page() -> None:
    figures = re.findall(r">([\d.]+x|[\d,]+ steps)", (DOCS / "speed.svg").read_text())
    benchmarks = (DOCS / "benchmarks.md").read_text()

    assert len(figures) == 6
    assert [each for each in figures if each.replace(" steps", "/s") not in benchmarks] == []


def test_config_reference_matches_the_dataclasses() -> None:
    page = runpy.run_path(str(DOCS / "config_reference.py"))["page"]()

    assert (DOCS / "config.md").read_text() == page + "\n"


GROUP_METRIC = re.compile(
    r'"((?:rollout|loss|policy|value|eval|time|workers|gpu|curriculum|opponents)/\w+)"'
)


def documented_metrics() -> set[str]:
    table = (DOCS / "config.md").read_text().partition("\n## Metrics\n")[2]
    return set(re.findall(r"^\| `([\w/]+)` \|", table, flags=re.MULTILINE))


def test_every_metric_of_a_run_or_in_the_code_is_documented_and_no_other(here: Path) -> None:
    in_code = {
        name
        for path in (REPOSITORY / "ml_pipeline").rglob("*.py")
        for name in GROUP_METRIC.findall(path.read_text())
    }
    settings = [
        ["env.target=tiny_envs.ScoringEnv", "vec_env=parallel", "vec_env.start_method=fork"],
        ["env=torch_cartpole", "vec_env=auto"],
    ]
    logged: set[str] = set()
    replay = ["agent=sac", "env=pendulum", "n_envs=1", "total_steps=64", "logger=none"]
    for each in [*([*small(), *each] for each in settings), replay]:
        run = train(each).run_dir
        header = (run / "metrics.csv").read_text().splitlines()[0]
        logged |= {re.sub(r"^(\w+/info)/.+", r"\1/NAME", name) for name in header.split(",")}

    assert "workers/busy" in logged
    assert in_code | logged == documented_metrics()


def test_config_page_has_the_keys_of_every_part_and_no_other() -> None:
    page = (DOCS / "config.md").read_text()
    documented = set(re.findall(r"^\| `((?:callbacks|logger)\.\w+\.\w+)` \|", page, re.MULTILINE))
    composed = compose_config(
        ["callbacks=[scaling,video,early_stopping]", "logger=[wandb,tensorboard,trackio,mlflow]"]
    )

    keys = {
        f"{group}.{name}.{key}"
        for group in ("callbacks", "logger")
        for name, entry in composed[group].items()
        for key in entry
        if key != "_target_"
    }
    assert documented == keys


def test_quickstart_has_every_extra_and_its_command() -> None:
    listed = (
        (REPOSITORY / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    )
    extras = re.findall(r"^(\w+) = \[", listed[2].partition("\n[")[0], flags=re.MULTILINE)
    table = (DOCS / "quickstart.md").read_text().partition("\n## Extras\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| `(.+?)`", table, flags=re.MULTILINE)

    assert sorted(name for name, _ in rows) == sorted(extras)
    for name, command in rows:
        expected = "make box2d" if name == "box2d" else f'pip install -e ".[{name}]"'
        assert command == expected
    assert "\nbox2d: " in (REPOSITORY / "Makefile").read_text()


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def run_script(folder: Path, code: str) -> str:
    (folder / "script.py").write_text(code)
    command = sys.executable, "script.py"
    done = call(*command, cwd=folder, timeout=280, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)  # 12 s, but workers and many other programs on few cores slow it down
def test_script_without_hydra_trains_cartpole(here: Path) -> None:
    script = code_blocks("without_hydra.md")[0]

    output = run_script(here, script)

    returns = [float(line.split()[1]) for line in output.splitlines()]
    assert len(returns) == 30
    assert returns[-1] > 2 * returns[0]
    assert list(here.iterdir()) == [here / "script.py"]


@pytest.mark.slow
def test_dqn_of_the_page_learns_without_hydra(here: Path) -> None:
    output = run_script(here, code_blocks("without_hydra.md")[1])

    losses = [float(line.split()[1]) for line in output.splitlines() if "None" not in line]
    assert len(losses) > 20


@pytest.mark.slow
def test_trained_policy_is_loaded_and_played_in_three_lines(finished_run: Path, here: Path) -> None:
    script = code_blocks("without_hydra.md")[2]

    output = run_script(here, script.replace("runs/CartPole-v1/RUN", str(finished_run)))

    statements = [line for line in script.splitlines() if line and "import" not in line]
    assert len(statements) == 3
    assert output.startswith("CartPole-v1 ")


@pytest.mark.slow
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


NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


# ``make notebooks`` runs them.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_starts_with_text_and_plots(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]

    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert any("plt." in "".join(cell["source"]) for cell in code)
