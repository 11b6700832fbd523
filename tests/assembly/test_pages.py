"""Documentation matches the code: its links, files, scripts, figures and counts are correct."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, call, read_rows, small

from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.assembly.entry import with_agent
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


TRAINING = re.compile(r"(?:^|[`&] ?)python (train_\w+)\.py((?: [^\n`#]*)?)", flags=re.MULTILINE)
PLACEHOLDERS = ("--", "job", "resume=", "init_from=", "hydra.", "sweep=")
OWN = ("my_", "own_", "NAME", "RUN", "...", "reinforce", "env=shaped", "env=mine")


def training_commands(page: Path) -> list[tuple[str, list[str]]]:
    """Agent and overrides of each command; of a sweep, its first run."""
    text = page.read_text().replace("\\\n", " ")
    commands = []
    for script, rest in TRAINING.findall(text):
        words = [word for word in shlex.split(re.split(r"  | && ", rest)[0]) if word != "-m"]
        words = [word for word in words if not word.startswith(PLACEHOLDERS)]
        words = [re.sub(r"range\((\d+),\d+\)", r"\1", word) for word in words]
        words = [word if set(word) & set("[{") else word.partition(",")[0] for word in words]
        if not any(own in word for own in OWN for word in words):
            commands.append((script.removeprefix("train_"), words))
    return commands


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_of_a_training_command_exists(page: Path) -> None:
    for agent, words in training_commands(page):
        checked_config(compose_config(with_agent(words, agent)))


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
    (here / "my_loss.py").write_text(code_blocks("ideas.md")[0])
    monkeypatch.syspath_prepend(str(here))
    target = "agent.loss._target_=my_loss.kl_penalty_loss"
    settings = [[], [target], [target, "agent.loss.beta=30"]]

    runs = [
        train([*small(agent__learning_rate=0.01, agent__n_epochs=8), *each]).run_dir
        for each in settings
    ]

    kls = [float(read_rows(run)[0]["policy/approx_kl"]) for run in runs]
    assert kls[0] != kls[1]
    assert kls[2] < kls[1]


OTHER_IDEAS = {
    "critic": ["network.critic.hidden_sizes=[256,256]"],
    "critic's keys": [
        *("env=cartpole", "agent.obs_groups.actor=[obs]", "+env.wrappers.critic.hidden=[1,3]"),
        "+env.wrappers.critic._target_=ml_pipeline.envs.wrappers.for_critic.ForCritic",
    ],
    "optimiser": ["agent.optimizer._target_=my_ideas.slow_heads"],
    "advantages": ["agent.advantage._target_=my_ideas.td_zero"],
    "schedule": ["agent.learning_rate_schedule=my_ideas.warm_up"],
    "rollout": ["agent.on_rollout._target_=my_ideas.shift_rewards", "agent.on_rollout.offset=-2"],
}


def test_every_place_of_the_page_takes_its_example(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "my_ideas.py").write_text("\n\n".join(code_blocks("ideas.md")[1:]))
    monkeypatch.syspath_prepend(str(here))

    losses = {
        name: [row["loss/value"] for row in read_rows(train([*small(), *words]).run_dir)]
        for name, words in {"": [], **OTHER_IDEAS}.items()
    }

    assert len({tuple(each) for each in losses.values()}) == len(losses)


NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


# ``make notebooks`` runs them.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_starts_with_text_and_plots(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]

    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert any("plt." in "".join(cell["source"]) for cell in code)


def test_every_section_of_the_benchmarks_links_its_raw_file_or_says_that_none_was_kept() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]

    words = "](../benchmarks/results/", "raw file not kept"
    assert [each.splitlines()[0] for each in sections if not any(w in each for w in words)] == []


@pytest.mark.slow
def test_vec_env_benchmark_draws_its_chart_again_from_its_raw_file(tmp_path: Path) -> None:
    script = str(REPOSITORY / "benchmarks" / "vec_env.py")
    environment = {"PYTHONPATH": str(REPOSITORY)}
    raw, chart = tmp_path / "raw.json", tmp_path / "chart.png"
    short = ["--n-envs", "2", "--repeats", "1", "--seconds", "0.01", "--json", str(raw)]

    measured = call(sys.executable, script, "speed", "--envs", "synth:1us", *short, **environment)
    redraw = ["redraw", "--json", str(raw), "--plot", str(chart)]
    drawn = call(sys.executable, script, *redraw, **environment)

    assert (measured.returncode, drawn.returncode) == (0, 0), measured.stderr + drawn.stderr
    content = json.loads(raw.read_text())
    assert content["command"].startswith("python benchmarks/vec_env.py speed --envs synth:1us ")
    assert content["figures"]["synth:1us, 2 envs"]["shared"] > 0
    assert chart.stat().st_size > 10_000
