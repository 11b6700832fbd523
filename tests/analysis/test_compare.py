"""python -m ml_pipeline compare: groups, independent seeds, supported claims, and bad input."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Capture, small

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.compare import Group, figures, grouped, remarks, runs_table, verdicts
from ml_pipeline.analysis.run_data import (
    ComparisonError,
    RunData,
    chosen_metric,
    with_chosen_networks,
)
from ml_pipeline.analysis.wandb_runs import WandbError, download
from ml_pipeline.assembly.run import train
from ml_pipeline.assembly.sweeps import JobNote
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.loggers import Column, Columns
from ml_pipeline.runs.run_folder import RunFolder

pytestmark = pytest.mark.xdist_group("compare")  # the runs are trained once


def run_data(
    config: dict[str, Any],
    returns: list[float] | None = None,
    metric: str = EVAL_RETURN,
    *,
    name: str = "x",
    loss: float | None = None,
    seconds: str = "0.5",
) -> RunData:
    rows = [
        {"env_steps": str(100 * (i + 1)), metric: str(each), "time/iteration_seconds": seconds}
        for i, each in enumerate(returns or [1.0])
    ]
    if loss is not None:
        rows[0]["loss/policy"] = str(loss)
    columns = {}
    for key in rows[0]:
        values = np.array([float(row.get(key, "nan")) for row in rows])
        columns[key] = Column(values, np.array([key in row for row in rows]))
    metrics = Columns(list(rows[0]), rows[0], columns)
    return RunData(RunFolder(Path("runs") / name), config, {}, metrics)


def runs_of(gamma: float, seeds: list[int | None], first_return: float) -> list[RunData]:
    """A run per seed; its return grows with its position, so copies differ from each other."""
    return [
        run_data(
            {"agent.gamma": gamma} | ({} if seed is None else {"seed": seed}),
            [first_return + position],
            name=f"{gamma}-{position}",
        )
        for position, seed in enumerate(seeds)
    ]


def summary(groups: list[Group]) -> list[tuple[str, int]]:
    return [(group.name, len(group.seeds)) for group in groups]


def test_runs_that_differ_only_by_seed_form_a_group_and_the_best_group_is_first() -> None:
    configs = [
        {"seed": seed, "agent.gamma": gamma, "vec_env.n_workers": seed, "agent.n_steps": 16}
        for gamma in (0.9, 0.99)
        for seed in (1, 2)
    ]
    runs = [run_data(config, [config["agent.gamma"]]) for config in configs]

    assert summary(grouped(runs, EVAL_RETURN)) == [("gamma=0.99", 2), ("gamma=0.9", 2)]
    assert [g.label for g in grouped(runs, EVAL_RETURN, ["seed"])] == ["seed=1", "seed=2"]
    assert [g.label for g in grouped(runs[:2], EVAL_RETURN)] == ["all runs"]


OURS = {"callbacks.media._target_": "ml_pipeline.callbacks.media.Media"}


@pytest.mark.parametrize(
    ("settings", "n_groups"),
    [
        ([{"callbacks.checkpoints.keep": 0}, {"callbacks.checkpoints.keep": 5}], 1),
        ([{**OURS, "callbacks.media.video": True}, {**OURS, "callbacks.media.video": False}], 1),
        ([OURS, {}], 1),
        ([{"rank_timeout_seconds": 300.0}, {"rank_timeout_seconds": 60.0}], 1),
        ([OURS, {"callbacks.media._target_": "mine.Media"}], 2),
        ([{"callbacks.mediator.x": 1}, {"callbacks.mediator.x": 2}], 2),
        ([{"callbacks.evaluation.n_episodes": 1}, {"callbacks.evaluation.n_episodes": 9}], 2),
    ],
)
def test_settings_that_only_record_do_not_split_a_group(
    settings: list[dict[str, Any]], n_groups: int
) -> None:
    runs = [
        run_data({**settings[seed % 2], "seed": seed}, [float(seed)], name=str(seed))
        for seed in range(4)
    ]

    assert len(grouped(runs, EVAL_RETURN)) == n_groups


def test_groups_of_two_algorithms_are_labelled_by_the_keys_that_both_have() -> None:
    runs = [
        run_data({"agent.algorithm": "x.PPO", "agent.gamma": 0.9, "agent.clip_range": 0.2}, [2.0]),
        run_data({"agent.algorithm": "x.SAC", "agent.gamma": 0.8, "agent.tau": 0.5}, [1.0]),
    ]

    groups = grouped(runs, EVAL_RETURN)

    assert [g.label for g in groups] == ["algorithm=PPO, gamma=0.9", "algorithm=SAC, gamma=0.8"]
    assert remarks(groups) == ["left out: agent. keys that not all of PPO, SAC have"]


@pytest.mark.parametrize("key", ["name", "logger.wandb.group"])
def test_groups_with_names_of_their_own_are_called_by_them(key: str) -> None:
    runs = [
        run_data({"seed": seed, "agent.gamma": gamma, key: f"g{gamma}"}, [gamma])
        for gamma in (0.9, 0.99)
        for seed in (1, 2)
    ]
    unnamed = run_data({"seed": 3, "agent.gamma": 0.9}, [0.9])

    assert names(runs) == ["g0.99", "g0.9"]
    assert [group.label for group in grouped(runs, EVAL_RETURN)] == ["gamma=0.99", "gamma=0.9"]
    assert names([*runs, unnamed]) == ["gamma=0.99", "gamma=0.9"]
    assert names(runs[:2]) == ["all runs"]


def names(runs: list[RunData]) -> list[str]:
    return [group.name for group in grouped(runs, EVAL_RETURN)]


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        # One key that tells all apart is enough.
        ([{"a.x": 1, "a.y": 1}, {"a.x": 1, "a.y": 2}, {"a.x": 2, "a.y": 3}], ["y=1", "y=2", "y=3"]),
        # Of several, those that help; x and z always change together.
        (
            [{"x": x, "z": x, "y": y} for x in (1, 2) for y in (1, 2)],
            ["x=1 y=1", "x=1 y=2", "x=2 y=1", "x=2 y=2"],
        ),
        ([{"agent.algorithm": "m.PPO"}, {"agent.algorithm": "m.SAC"}], ["PPO", "SAC"]),
        ([{}, {"network._target_": "m.Net"}], ["-", "Net"]),
        # Cut and numbered, if their values start alike.
        ([{"x": "v" * 40 + end} for end in "ab"], [f"x={'v' * 29}…", f"x={'v' * 29}… (2)"]),
        (
            [{"name": "n" * 50, "x": 1}, {"name": "\x1b[31m", "x": 2}],
            [f"{'n' * 39}…", "\ufffd[31m"],
        ),
    ],
)
def test_names_of_groups_are_short_and_unique(
    configs: list[dict[str, Any]], expected: list[str]
) -> None:
    runs = [run_data(config, [-float(rank)]) for rank, config in enumerate(configs)]

    assert names(runs) == expected


def test_copies_of_one_seed_support_no_claim() -> None:
    runs = [*runs_of(0.9, [1] * 5, 10.0), *runs_of(0.99, [1] * 5, 50.0)]

    groups = grouped(runs, EVAL_RETURN)

    assert summary(groups) == [("gamma=0.99", 1), ("gamma=0.9", 1)]
    assert remarks(groups) == [
        "left out: 8 runs with the same settings and the same seed or origin as another: "
        "runs/0.99-1, runs/0.99-2, runs/0.99-3, runs/0.99-4, runs/0.9-1 and 3 more"
    ]
    assert verdicts(groups, EVAL_RETURN) == [
        "fewer than 5 seeds, too few to claim a difference: gamma=0.99, gamma=0.9; "
        "train 5 or more of each"
    ]


@pytest.mark.parametrize(
    ("seeds", "n_seeds", "claim"),
    [
        ([1, 2, 3, 4, 5], 5, "gamma=0.99 is better than gamma=0.9: "),
        ([1, 2, 3, 4, 5, 5, 1], 5, "gamma=0.99 is better than gamma=0.9: "),
        ([1, 2, 3, 4, 4, 4, 4], 4, "fewer than 5 seeds, too few to claim a difference: gamma=0.9;"),
        ([1, 2, 3, 4], 4, "fewer than 5 seeds, too few to claim a difference: gamma=0.9;"),
        ([1, 2, 3, 4, None, None, None], 5, "gamma=0.99 is better than gamma=0.9: "),
        ([None] * 6, 1, "fewer than 5 seeds, too few to claim a difference: gamma=0.9;"),
    ],
    ids=["distinct", "some repeated", "too few", "missing", "one unknown", "all unknown"],
)
def test_a_claim_needs_five_distinct_seeds(
    seeds: list[int | None], n_seeds: int, claim: str
) -> None:
    runs = [*runs_of(0.9, seeds, 10.0), *runs_of(0.99, [6, 7, 8, 9, 10], 50.0)]

    groups = grouped(runs, EVAL_RETURN)

    assert [len(group.seeds) for group in groups] == [5, n_seeds]
    assert len(groups[1].repeats) == len(seeds) - n_seeds
    (line,) = verdicts(groups, EVAL_RETURN)
    assert line.startswith(claim)


def test_of_repeated_runs_the_longest_counts() -> None:
    stopped = run_data({"seed": 1, "vec_env.n_workers": 2}, [1.0, 2.0])
    resumed = run_data({"seed": 1, "vec_env.n_workers": 4}, [1.0, 2.0, 3.0])

    (group,) = grouped([stopped, resumed], EVAL_RETURN)

    assert group.finals(EVAL_RETURN).tolist() == [3.0]
    assert group.repeats == [stopped]


def test_copies_that_were_resumed_with_other_seeds_are_one_run() -> None:
    copies = [run_data({"seed": seed}, [1.0, float(seed)], loss=0.25) for seed in (1, 2)]
    another = run_data({"seed": 3}, [1.0, 3.0], loss=0.5)

    (group,) = grouped([*copies, another], EVAL_RETURN)

    assert group.seeds == [[copies[0]], [another]]
    assert group.repeats == [copies[1]]


def test_runs_of_one_seed_that_by_puts_together_are_averaged() -> None:
    runs = [
        run_data({"agent.gamma": 0.9, "n_envs": n_envs, "seed": seed}, [float(seed + n_envs)])
        for n_envs in (2, 4)
        for seed in (10, 20)
    ]

    (group,) = grouped(runs, EVAL_RETURN, ["agent.gamma"])

    assert group.finals(EVAL_RETURN).tolist() == [13.0, 23.0]
    assert remarks([group]) == [
        "runs of the same seed count as one, their mean: all runs (4 runs of 2 seeds)"
    ]


def test_verdicts_compare_the_best_group_with_the_next_five() -> None:
    seeds = [1, 2, 3, 4, 5, 6, 7]
    runs = [
        run
        for rank in range(9)
        for run in runs_of(rank / 10, seeds[:4] if rank == 8 else seeds, 10.0 * rank)
    ]

    *lines, hidden, few = verdicts(grouped(runs, EVAL_RETURN), EVAL_RETURN)

    assert [line.partition(":")[0] for line in lines] == [
        f"gamma=0.7 is better than gamma=0.{each}" for each in (6, 5, 4, 3, 2)
    ]
    assert hidden == "not listed: gamma=0.7 against 2 lower groups"
    assert few.startswith("fewer than 5 seeds, too few to claim a difference: gamma=0.8;")


def test_many_groups_of_few_seeds_support_no_claim_and_a_line_says_how_many_would() -> None:
    runs = [run for rank in range(5) for run in runs_of(rank / 10, [1, 2, 3, 4, 5], 10.0 * rank)]

    *lines, needed = verdicts(grouped(runs, EVAL_RETURN), EVAL_RETURN)

    assert all(
        line.startswith("no difference can be claimed between gamma=0.4 and") for line in lines
    )
    assert needed == (
        "5 groups are 10 comparisons: a claim needs 6 or more seeds of each group; "
        "train more, or compare fewer groups"
    )


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"n_envs": 8}, True),  # of a version without env_seeds
        ({"n_envs": 8, "env_seeds": "adjacent"}, True),
        ({"n_envs": 1, "env_seeds": "adjacent"}, False),
        ({"n_envs": 8, "env_seeds": "spread"}, False),
    ],
)
def test_runs_that_share_env_seeds_are_named(settings: dict[str, Any], share: bool) -> None:
    runs = [run_data({**settings, "seed": seed}, [float(seed)]) for seed in (1, 2, 3)]

    lines = remarks(grouped(runs, EVAL_RETURN))

    assert [line.partition(" (")[0] for line in lines] == (
        ["runs that share env seeds: all runs"] if share else []
    )


def test_runs_with_other_env_seeds_belong_to_one_group() -> None:
    runs = [run_data({"seed": n, "env_seeds": kind}, [1.0 * n]) for n, kind in enumerate("ab")]

    assert len(grouped(runs, EVAL_RETURN)) == 1


def test_runs_table_shows_what_differs_within_groups_and_names_what_does_not_fit() -> None:
    configs = [{"agent.gamma": n, "seed": s, "device": f"cuda:{s}"} for n in (1, 2) for s in (1, 2)]
    groups = grouped([run_data(config) for config in configs], EVAL_RETURN)

    columns, hidden = runs_table(groups, width=250)
    titles = list(columns)
    assert titles[:4] == ["run", "group", "seed", "status"]
    assert titles[-1] == "device"
    assert "gamma" not in titles  # the table of the groups has it
    assert hidden == []
    assert runs_table(groups, width=83)[1] == ["device"]
    assert runs_table(groups, width=81)[1] == ["seconds", "device"]


def test_speed_and_time_count_all_rows() -> None:
    run = run_data({}, [1.0, 2.0, 3.0])

    assert run.steps_per_second() == 200.0
    assert run.seconds(EVAL_RETURN).tolist() == [0.5, 1.0, 1.5]


def test_speed_of_a_group_is_the_interquartile_mean_as_in_the_chart() -> None:
    times = ("1.0", "0.5", "0.25", "0.02")  # 100, 200, 400 and 5000 steps/s
    runs = [run_data({"seed": seed}, seconds=each) for seed, each in enumerate(times)]
    (group,) = grouped(runs, EVAL_RETURN)

    assert figures(group, EVAL_RETURN)[-1] == "300"  # the mean of the middle two


def test_default_metric_is_the_runs_best_metric_if_all_have_it() -> None:
    old, other = run_data({}), run_data({"best_metric": "eval/win"}, metric="eval/win")

    assert chosen_metric([old, old], None) == EVAL_RETURN
    assert chosen_metric([other, other], None) == "eval/win"
    assert chosen_metric([old, other], None) == MEAN_RETURN


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two runs that differ by gamma, and one of another env."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("compared"))
        return {
            name: str(train([*small(), *more]).run_dir.absolute())
            for name, more in {
                "run": ["agent.gamma=0.9"],
                "second": ["agent.gamma=0.99"],
                "other": ["env.target=tiny_envs.CountingEnv"],
            }.items()
        }


@pytest.fixture
def run(runs: dict[str, str], here: Path) -> str:
    return runs["run"]


def test_tables_show_runs_groups_and_the_supported_claims(
    run: str, runs: dict[str, str], capsys: Capture
) -> None:
    assert main(["compare", run, runs["second"], "--report", "report"]) == 0

    header, *lines, _, title, _, first, second, few, report = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["run", "group", "seed"]
    both = ["gamma=0.9", "gamma=0.99"]
    assert sorted(line.split()[1] for line in lines) == both
    assert title == f"final {EVAL_RETURN}, interquartile mean (IQM) over the seeds:"
    assert sorted([first.split()[0], second.split()[0]]) == both
    assert few.startswith("fewer than 5 seeds, too few to claim a difference: gamma=")
    assert report == "report: report/report.html"


def test_runs_of_several_envs_have_scores_a_report_and_files_for_a_paper(
    runs: dict[str, str], here: Path, capsys: Capture
) -> None:
    given = [runs["run"], runs["second"], runs["other"], "--metric", MEAN_RETURN]
    assert main(["compare", *given, "--report", "report", "--paper", "paper"]) == 0

    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("group "))
    assert header.split()[:2] == ["group", "score"]
    assert header.split()[-2:] == ["CartPole-v1", "tiny_envs.CountingEnv"]
    text = Path("report/report.html").read_text()
    assert "<h1>2 envs</h1>" in text
    assert "<h2>CartPole-v1</h2>" in text
    assert Path("report/CartPole-v1_curves.png").is_file()
    assert Path("paper/groups.tex").read_text().count("CartPole-v1") == 1
    assert Path("paper/tiny_envs.CountingEnv/curves.pdf").is_file()


def test_star_that_the_shell_left_is_expanded(
    runs: dict[str, str], here: Path, capsys: Capture
) -> None:
    paths = local(runs)
    Path("runs/CartPole-v1/notes.txt").touch()

    given = ["runs/*/*", "runs/none*"]
    assert main(["compare", *given, "--report", "report"]) == 0

    printed = capsys.readouterr()
    shown = [line.split()[0] for line in printed.out.splitlines() if line.startswith("runs/")]
    assert sorted(shown) == paths
    (left_out,) = printed.err.splitlines()
    assert left_out.startswith("left out: runs/none* is not a run folder: it does not exist")


def test_latest_stands_for_the_run_started_last(
    runs: dict[str, str], here: Path, capsys: Capture
) -> None:
    paths = local(runs)

    assert main(["compare", "latest", "--report", "report"]) == 0

    named, *lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("runs/")]
    assert shown == [named.removeprefix("latest: ")]
    assert shown[0] in paths


@pytest.mark.parametrize("given", ["runs/CartPole-v1", "runs/*", "runs/CartPole-v1/*"])
def test_folder_of_runs_stands_for_its_runs(
    runs: dict[str, str], here: Path, given: str, capsys: Capture
) -> None:
    paths = local(runs)

    assert main(["compare", given, "--report", "report"]) == 0

    printed = capsys.readouterr()
    shown = [line.split()[0] for line in printed.out.splitlines() if line.startswith("runs/")]
    assert sorted(shown) == paths
    assert printed.err == ""


@pytest.mark.parametrize("old_path", [False, True])
def test_auto_and_the_network_that_it_chose_are_one_group(
    run: str, old_path: bool, capsys: Capture
) -> None:
    """``run`` has network=auto; its copy names the same network, as older runs do."""
    copy = Path("copy")
    shutil.copytree(run, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    target = f"ml_pipeline.{'agents' if old_path else 'policy'}.networks.MLP"
    config["network"] = {"_target_": target, "hidden_sizes": [64, 64], "activation": "tanh"}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    (copy / "summary.json").unlink()

    assert main(["compare", run, "copy", "--report", "report"]) == 0

    line = "left out: 1 run with the same settings and the same seed or origin as another: copy"
    assert line in capsys.readouterr().out.splitlines()


def test_auto_without_a_record_follows_a_run_that_has_one() -> None:
    auto = {
        "network._target_": "ml_pipeline.policy.auto_network.auto",
        "network.hidden_sizes": None,
    }
    chosen = {"_target_": "ml_pipeline.policy.networks.MLP", "hidden_sizes": [64, 64]}
    recorded = run_data({"env.id": "a", **auto})._replace(summary={"network": chosen})
    unrecorded, other_env = run_data({"env.id": "a", **auto}), run_data({"env.id": "b", **auto})

    _, second, third = with_chosen_networks([recorded, unrecorded, other_env])

    assert second.config["network._target_"] == chosen["_target_"]
    assert second.config["network.hidden_sizes"] == [64, 64]
    assert third.config == other_env.config


@pytest.mark.slow
def test_folder_given_twice_through_a_link_counts_once(run: str, capsys: Capture) -> None:
    Path("link").symlink_to(run)

    assert main(["compare", run, "link", "--report", "report"]) == 0

    lines = capsys.readouterr().out.splitlines()
    line = "left out: 1 run with the same settings and the same seed or origin as another: link"
    assert line in lines
    assert "one seed: an interval needs at least two" in lines
    assert line in Path("report/report.html").read_text()


def local(runs: dict[str, str]) -> list[str]:
    """Copies of two runs at the relative paths that a sweep and a study record."""
    paths = [f"runs/CartPole-v1/{name}" for name in ("run", "second")]
    for path in paths:
        shutil.copytree(runs[Path(path).name], path)
    return paths


def record_sweep(run_dirs: list[str]) -> str:
    """The records of jobs: one for each run, and one that failed before it had a folder."""
    folder = Path("runs/sweeps/2026-11-15_12-00-00")
    for number, path in enumerate(run_dirs):
        note = JobNote(folder, number, [])
        note.started(path)
        note.finished(1.0)
    failed = JobNote(folder, len(run_dirs), [])
    failed.started("runs/CartPole-v1/none")
    failed.failed(ComparisonError("no such env"))
    return str(folder)


def record_study(run_dirs: list[str]) -> str:
    optuna = pytest.importorskip("optuna", reason="needs the extra: pip install -e '.[study]'")
    from ml_pipeline.study.folder import StudyFolder, StudySettings

    study = StudyFolder("mine")
    study.make()
    study.write(StudySettings([], {}, 3, 1, EVAL_RETURN))
    for path in run_dirs:
        trial = optuna.trial.create_trial(value=1.0, user_attrs={"run_dir": path})
        study.study().add_trial(trial)
    study.study().add_trial(optuna.trial.create_trial(value=1.0))  # a trial that has no folder yet
    return str(study.path)


@pytest.mark.parametrize("record", [record_sweep, record_study])
@pytest.mark.slow
def test_folder_of_a_sweep_or_a_study_stands_for_its_runs(
    runs: dict[str, str],
    here: Path,
    record: Callable[[list[str]], str],
    capsys: Capture,
) -> None:
    paths = local(runs)
    folder = record(paths)

    assert main(["compare", folder, "--report", "report"]) == 0

    printed = capsys.readouterr()
    shown = [line.split()[0] for line in printed.out.splitlines() if line.startswith("runs/")]
    assert sorted(shown) == paths
    assert "gamma=0.99" in printed.out
    missing = [
        "left out: runs/CartPole-v1/none is not a run folder: it does not exist; "
        "python -m ml_pipeline runs lists the runs"
    ]
    lines = [line.replace(f"{here}/", "") for line in printed.err.splitlines()]
    assert lines == (missing if record is record_sweep else [])


@pytest.mark.slow
def test_sweep_is_found_from_another_folder_and_a_study_is_refused(
    runs: dict[str, str],
    here: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = local(runs)
    sweep, study = record_sweep(paths), record_study(paths)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")

    assert main(["compare", f"../{sweep}", "--report", "report"]) == 0
    assert str(here / paths[0]) in capsys.readouterr().out
    assert main(["compare", f"../{study}"]) == 1
    assert "not in studies/ here; change to the folder that has it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "left to compare"),
        (["{run}", "--by", "agent.gama"], "--by agent.gama: not a config key of these runs; did"),
        (["{run}", "--metric", "eval/return"], "--metric eval/return: not in metrics.csv of every"),
        (["{run}", "--report", "taken"], "cannot write the report into taken"),
        (["wandb:here"], "wandb:here is not a W&B address; write wandb:ENTITY/PROJECT"),
        (["wandb:me/mine"], "wandb:me/mine needs a W&B key"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_code_1(
    runs: dict[str, str],
    here: Path,
    arguments: list[str],
    words: str,
    capsys: Capture,
) -> None:
    Path("taken").touch()

    assert main(["compare", *(each.format(**runs) for each in arguments)]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1]
    assert all(line.startswith("left out: ") for line in lines[:-1])


def test_other_folders_and_empty_or_damaged_runs_are_left_out_and_named(
    run: str, capsys: Capture
) -> None:
    Path("half").mkdir()
    shutil.copytree(run, "empty")
    Path("empty/metrics.csv").write_text("env_steps\n")
    shutil.copytree(run, "bad")
    Path("bad/metrics.csv").write_text("env_steps,a\n32,much\n")

    assert main(["compare", run, "half", "empty", "bad"]) == 0

    printed = capsys.readouterr()
    assert run in printed.out
    assert "one seed: an interval needs at least two" in printed.out
    half, empty, bad = printed.err.splitlines()
    assert half.startswith("left out: half is ")
    assert empty == "left out: empty has no rows in metrics.csv: no iteration has finished"
    assert bad.startswith("left out: bad/metrics.csv is damaged: ValueError")


def test_without_the_packages_for_a_report_the_tables_are_shown(
    run: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if not installed

    assert main(["compare", run]) == 0
    assert 'the report needs plotly, which is not installed: pip install "ml_pipeline[plots]"' in (
        capsys.readouterr().out
    )
    assert main(["compare", run, "--report", "report"]) == 1


@pytest.mark.slow
def test_wandb_runs_are_downloaded_into_folders_that_compare_reads(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A stand-in for W&B's client returns the data that a run has logged."""
    config = yaml.safe_load((Path(run) / "config.yaml").read_text())
    with (Path(run) / "metrics.csv").open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    theirs = SimpleNamespace(
        id="abc",
        config={**config, "env_name": "CartPole-v1", "agent_name": "ppo", "_wandb": {}},
        scan_history=lambda: iter([{"_step": 1, "system": "x"}, *rows]),
        state="finished",
        commit="0123",
        summary={"_runtime": 12.0},
        url="somewhere",
    )
    api = SimpleNamespace(runs=lambda path: [theirs] if path == "me/mine" else [])
    monkeypatch.setattr("wandb.Api", lambda timeout: api)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)

    assert main(["compare", run, "wandb:me/mine", "--report", "report"]) == 0

    assert re.search(r"runs/wandb/mine/abc +all runs, repeat +1 +finished", capsys.readouterr().out)
    with pytest.raises(WandbError, match="wandb:me/other has no runs"):
        download("wandb:me/other")
