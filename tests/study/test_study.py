"""Studies: shared, killed, continued and pruned; their status, and their best trial deployed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stdout
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from conftest import (
    REPOSITORY,
    TESTS,
    Capture,
    Door,
    error_line,
    is_running,
    read_rows,
    small,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.xdist_group("study")  # its module fixture takes seconds

optuna = pytest.importorskip("optuna", reason="needs the extra: pip install -e '.[study]'")

from optuna.storages.journal import JournalFileBackend  # noqa: E402
from optuna.trial import FrozenTrial, TrialState  # noqa: E402

from ml_pipeline.__main__ import main  # noqa: E402
from ml_pipeline.assembly.compose import plain_config  # noqa: E402
from ml_pipeline.assembly.run import RunResult, train  # noqa: E402
from ml_pipeline.callbacks.pruning import Pruning  # noqa: E402
from ml_pipeline.deploy.exported import ExportedPolicy  # noqa: E402
from ml_pipeline.runs.loggers import read_metrics  # noqa: E402
from ml_pipeline.runs.run_folder import RunFolder  # noqa: E402
from ml_pipeline.study import best  # noqa: E402
from ml_pipeline.study.folder import StudyError, StudyFolder, finished, running  # noqa: E402
from ml_pipeline.study.journal import HOST, JournalLock  # noqa: E402
from ml_pipeline.study.report import trials_per_hour  # noqa: E402
from ml_pipeline.study.trials import recorded_value  # noqa: E402

SPACE = """
agent.learning_rate: {low: 1e-4, high: 1e-2, log: true}
agent.gamma: {choices: [0.9, 0.99]}
"""


@pytest.fixture
def space(here: Path) -> str:
    (here / "space.yaml").write_text(SPACE)
    return "space=space.yaml"


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a study command whose workers can import this repository and the tiny envs."""
    return subprocess.Popen(
        [sys.executable, "-m", "ml_pipeline", "study", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def complete(folder: Path, *arguments: str) -> None:
    process = begin(folder, "start", *arguments)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output


def trials_of(name: str) -> list[FrozenTrial]:
    if not StudyFolder(name).journal.is_file():
        return []
    return StudyFolder(name).study().get_trials(deepcopy=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["start", "a/b", "n_trials=1"], "'a/b': use only letters, digits, _ and -"),
        (["start", "a"], "study a is new; say how many trials it gets: n_trials=100"),
        (["start", "a", "n_trial=1"], "n_trial=1: unknown key; did you mean n_trials?"),
        (["start", "a", "n_trials=1", "n_job=2"], "n_job=2: unknown key; did you mean n_jobs?"),
        (["start", "a", "n_trials=1", "space=nope"], "space=nope: .*; existing: dqn, ppo, sac"),
        (["start", "a", "n_trials=1", "env=nope"], "env=nope: no such option"),
        (["start", "a", "n_trials=1", "agent.gama=1"], "agent.gama"),
        (["start", "a", "n_trials=1", "--config-dir", "no"], "config_dir=no: no such folder"),
        (["start", "a", "n_trials=1", "--config-dir"], "--config-dir: name a folder after it"),
        (["start", "a", "--multirun", "n_trials=1"], "--multirun: not possible in a study"),
        (["status", "a"], "study a does not exist in studies/; existing: none"),
        (["best", "a"], "study a does not exist"),
    ],
)
def test_mistake_prints_one_line_and_creates_no_files(
    here: Path, arguments: list[str], words: str, capsys: Capture
) -> None:
    assert main(["study", *arguments]) == 1

    assert re.search(words, error_line(capsys))
    assert not (here / "studies").exists()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a study of four trials, and the output of its two processes."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "space.yaml").write_text(SPACE)
    settings = [*small(seed=7), "env=cartpole", "space=space.yaml", "n_trials=4"]
    other = begin(folder, "start", "mine", *settings)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as own:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{TESTS}")
        assert main(["study", "start", "mine", *settings]) == 0
    output, _ = other.communicate(timeout=100)
    assert other.returncode == 0, output
    return folder, [output, own.getvalue()]


@pytest.fixture
def mine(done: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(done[0])
    return done[0]


def test_processes_that_start_the_same_study_share_its_trials(
    mine: Path, done: tuple[Path, list[str]]
) -> None:
    trials = trials_of("mine")

    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    for output in done[1]:
        assert "study mine has all 4 trials" in output


def test_each_trial_is_a_run_with_its_own_seed_and_the_drawn_values(mine: Path) -> None:
    trials = trials_of("mine")

    runs = [Path(trial.user_attrs["run_dir"]) for trial in trials]
    assert sorted(runs) == sorted(Path("runs/CartPole-v1").iterdir())
    for trial, run in zip(trials, runs, strict=True):
        config = plain_config(run)
        assert config["agent"]["learning_rate"] == trial.params["agent.learning_rate"]
        assert config["agent"]["gamma"] == trial.params["agent.gamma"]
        assert config["seed"] == trial.user_attrs["seed"]
        assert trial.value == float(read_rows(run)[-1]["eval/episode_return"])
    assert len({trial.user_attrs["seed"] for trial in trials}) == 4


def test_status_shows_states_pace_and_the_best_trial(mine: Path, capsys: Capture) -> None:
    assert main(["study", "status"]) == 0
    assert main(["study", "status", "mine"]) == 0

    out = capsys.readouterr().out
    words = " ".join(out.split())  # long settings continue on another line
    _, row, *_ = out.splitlines()
    assert row.split()[:4] == ["mine", "4", "4", "0"]
    _, title, details = words.partition("study mine: 4 of 4 trials, objective eval/episode_return")
    assert title
    _, names, counts = details.partition("complete pruned failed running stopped trials/hour ETA")
    assert names
    assert counts.split()[:5] == ["4", "0", "0", "0", "0"]
    assert counts.split()[6] == "done"
    winner = max(trials_of("mine"), key=lambda trial: trial.value)
    assert winner.user_attrs["run_dir"] in out.partition("\nbest\n")[2].splitlines()[1]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("total_steps=128", "was started with total_steps=64, not total_steps=128; leave it out"),
        ("agent.clip_range=0.1", "was started without agent.clip_range=0.1; leave it out"),
        ("seed=8", "was started with seed=7, not seed=8"),
        ("--config-dir=.", "was started without --config-dir; leave it out"),
        ("space=ppo", "was started with another space, agent.learning_rate: {'low': 0.0001"),
    ],
)
def test_argument_that_contradicts_the_study_is_refused(
    mine: Path, argument: str, words: str, capsys: Capture
) -> None:
    before = (mine / "studies/mine/study.yaml").read_text()

    assert main(["study", "start", "mine", "n_trials=9", argument]) == 1

    assert words in error_line(capsys)
    assert (mine / "studies/mine/study.yaml").read_text() == before


def test_complete_study_starts_no_trial(mine: Path, capsys: Capture) -> None:
    assert main(["study", "start", "mine", "seed=7", "env=cartpole", "space=space.yaml"]) == 0

    printed = capsys.readouterr().out
    assert "study mine has all 4 trials" in printed
    assert "-m ml_pipeline compare studies/mine" in printed
    assert len(trials_of("mine")) == 4


def test_best_trial_becomes_an_experiment(
    here: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["study", "best", "mine"]) == 0

    assert not (REPOSITORY / "conf" / "experiment" / "best_mine.yaml").exists()
    assert "train experiment=best_mine" in capsys.readouterr().out
    first, second, *_ = Path("conf/experiment/best_mine.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    assert second.startswith("# python -m ml_pipeline train experiment=best_mine   trial ")
    winner = max(trials_of("mine"), key=lambda trial: trial.value)
    its = plain_config(winner.user_attrs["run_dir"])
    shutil.copytree("conf", here / "conf")
    monkeypatch.chdir(here)
    machine = ["device=cpu", "logger=none", "vec_env=serial"]
    config = plain_config(train(["experiment=best_mine", *machine]).run_dir)
    assert {**config, "seed": 0, "objective": ""} == {**its, "seed": 0, "objective": ""}


@pytest.mark.slow
def test_dashboard_shows_the_study_and_ends_with_ctrl_c(mine: Path) -> None:
    pytest.importorskip("optuna_dashboard", reason="needs the extra: pip install -e '.[study]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = begin(mine, "dashboard", "mine", "--port", str(port))
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"http://127.0.0.1:{port}/")

    def answer() -> bytes:
        try:
            return urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=5).read()
        except OSError:
            return b""

    try:
        wait_until(lambda: b'"mine"' in answer(), 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()


def test_missing_optuna_is_reported_with_the_install_command(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)

    assert main(["study", "start", "mine"]) == 1

    words = 'study needs optuna, which is not installed: pip install "ml_pipeline[study]"'
    assert error_line(capsys) == words


LEARNS = ["total_steps=10_000", "device=cpu", "logger=none", "vec_env=serial"]


def deployed(target: Path) -> dict[str, Any]:
    return dict(json.loads((target / "deployed.json").read_text()))


@pytest.mark.slow
def test_policy_is_deployed_only_if_it_is_better_on_new_episodes(
    finished_run: Path, here: Path, capsys: Capture
) -> None:
    beginner = RunFolder(finished_run)
    trained = RunFolder(train(["experiment=cartpole", *LEARNS]).run_dir)
    target = here / "live" / "cartpole"

    best.deploy_run(beginner, target, {"trial": 1}, n_episodes=5, seed=100)
    first = deployed(target)
    assert ExportedPolicy.load(target / "policy.pt2").metadata["run"]
    best.deploy_run(trained, target, {"trial": 2}, n_episodes=5, seed=100)
    second = deployed(target)
    best.deploy_run(beginner, target, {"trial": 3}, n_episodes=5, seed=None)

    assert first["mean_of_the_one_before"] is None
    assert (first["seed"], first["n_episodes"]) == (100, 5)
    assert second["mean"] > second["mean_of_the_one_before"] == first["mean"]
    assert deployed(target) == second
    assert f"kept {target}: trial 3 reaches" in capsys.readouterr().out
    saved = (target / "checkpoints" / "best.pt").read_bytes()
    assert saved == (trained.checkpoints / "best.pt").read_bytes()
    assert main(["evaluate", str(target), "--episodes", "1"]) == 0  # it is a run folder
    # The link and the folder it points to: older folders are removed.
    assert len([each for each in target.parent.iterdir() if each.is_dir()]) == 2


@pytest.mark.slow
def test_folder_with_other_files_or_a_policy_of_another_env_is_not_replaced(
    finished_run: Path, here: Path
) -> None:
    run = RunFolder(train([*small(), "env.target=tiny_envs.CountingEnv"]).run_dir)
    other = RunFolder(finished_run)
    (here / "photos").mkdir()
    (here / "photos" / "cat.png").touch()
    best.deploy_run(run, here / "live", {"trial": 1}, n_episodes=1, seed=1)

    with pytest.raises(StudyError, match="photos: has other files"):
        best.deploy_run(run, here / "photos", {}, n_episodes=1, seed=1)
    with pytest.raises(StudyError, match="live: has a policy for another env"):
        best.deploy_run(other, here / "live", {"trial": 2}, n_episodes=1, seed=1)


def train_trial(trial: optuna.Trial, total_steps: int, reported: set[int]) -> RunResult:
    """Train a trial with an evaluation every 32 env steps; its episodes return 60."""
    pruning = Pruning(trial, every_steps=32, reported=reported)
    settings = small(total_steps=total_steps, callbacks__evaluation__eval_every_steps=32)
    own_env = "env.target=tiny_envs.CountingEnv"
    return train([*settings, own_env, "vec_env=serial"], callbacks={"pruning": pruning})


def test_bad_trial_is_pruned_at_its_first_evaluation(here: Path) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    good = study.ask()
    for point in range(1, 5):
        good.report(1000.0, point)
    study.tell(good, 1000.0)

    result = train_trial(study.ask(), 128, reported=set())

    assert result.env_steps == 32
    assert study.trials[1].intermediate_values == {1: 60.0}
    assert study.trials[1].user_attrs["pruned"] is True
    assert (result.run_dir / "checkpoints" / "latest.pt").is_file()


def test_resumed_run_does_not_report_a_point_again(here: Path) -> None:
    study = optuna.create_study(direction="maximize")
    trial = study.ask()
    trial.report(7.0, 1)

    train_trial(trial, 96, reported={1})

    assert study.trials[0].intermediate_values == {1: 7.0, 2: 60.0}


@pytest.mark.slow
def test_study_uses_the_config_dir_in_its_trials_and_for_its_best_trial(
    door: Door, here: Path, capsys: Capture
) -> None:
    for group, text in (
        ("env/mine", "{id: null, target: tiny_envs.CountingEnv, kwargs: {length: 4}}"),
        ("study/rate", "agent.learning_rate: {low: 1e-4, high: 1e-2}"),
    ):
        (here / f"my_conf/{group}.yaml").parent.mkdir(parents=True)
        (here / f"my_conf/{group}.yaml").write_text(text)
    settings = [*small(), "env=mine", "space=rate", "n_trials=1", "name=tried"]

    complete(here, "own", "--config-dir", "my_conf/", *settings)
    assert main(["study", "start", "own", "--config-dir", "my_conf"]) == 0
    assert main(["study", "best", "own"]) == 0

    assert "train --config-dir my_conf experiment=best_own" in capsys.readouterr().out
    result = door("--config-dir", "my_conf", "experiment=best_own", PYTHONPATH=str(TESTS))
    assert result.returncode == 0, result.stderr
    trial, again = sorted(here.glob("runs/CountingEnv/*"))
    assert trial.name.endswith("_tried")
    (rate,) = trials_of("own")[0].params.values()
    for run in (trial, again):
        config = plain_config(run)
        assert config["env"]["kwargs"] == {"length": 4}
        assert config["agent"]["learning_rate"] == rate


LATE_ERROR = """
from tiny_envs import CountingEnv

class Fragile(CountingEnv):
    left = 20

    def reset(self, *, seed=None, options=None):
        if seed == 0:  # the trial before training, which must pass
            self.left = 10**6
        return super().reset(seed=seed)

    def step(self, action):
        self.left -= 1
        if not self.left:
            raise ValueError("puck left the table\\nat x=3; lower env.kwargs.speed")
        return super().step(action)
"""


@pytest.mark.slow
def test_failed_trial_is_shown_with_its_whole_error(here: Path, space: str) -> None:
    (here / "fragile.py").write_text(LATE_ERROR)
    settings = [*small(), "env.target=fragile.Fragile", "vec_env=serial", space, "n_trials=1"]

    process = begin(here, "start", "bad", *settings)
    output, _ = process.communicate(timeout=110)

    assert process.returncode == 1
    error = r"env \d \(seed \d+\) raised: ValueError: puck left the table; at x=3; lower env.kwargs"
    trial, end = output.splitlines()[-2:]
    assert re.match(f"trial 0: failed, {error}", trial)
    assert re.match(f"study bad: all 1 trials failed: {error}", end)
    (log,) = StudyFolder("bad").logs.iterdir()
    assert "fragile.py" in log.read_text()  # the traceback


@pytest.mark.slow
def test_env_that_changes_the_folder_does_not_move_a_study(here: Path, space: str) -> None:
    (here / "elsewhere").mkdir()
    env = ["env.target=own_parts.Wanderer", f"+env.kwargs.folder={here}/elsewhere"]
    evaluation = ["vec_env=serial", "callbacks.evaluation.eval_every_steps=32"]

    complete(here, "moved", *small(), *env, *evaluation, space, "n_trials=2", "run_root=my/runs")

    trials = trials_of("moved")
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
    assert [len(trial.intermediate_values) for trial in trials] == [1, 1]
    assert {Path(trial.user_attrs["run_dir"]) for trial in trials} == set(
        Path().glob("my/runs/Wanderer/*")
    )
    assert not list((here / "elsewhere").iterdir())


@pytest.mark.slow
def test_study_whose_first_trials_all_fail_stops_with_the_reason(here: Path, space: str) -> None:
    settings = [*small(), "env.id=Nope-v0", space, "n_trials=50"]

    process = begin(here, "start", "bad", *settings)
    output, _ = process.communicate(timeout=110)

    assert process.returncode == 1
    assert "its first trials all failed: env.id=Nope-v0" in output
    assert "Traceback" not in output
    assert [trial.state for trial in trials_of("bad")] == [TrialState.FAIL] * 3


def test_journal_survives_a_writer_that_was_killed(here: Path) -> None:
    folder = StudyFolder("torn")
    folder.make()
    folder.study()
    with folder.journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    Path(f"{folder.journal}.lock").write_text(HOST)  # Optuna alone would wait for 30 s
    study = StudyFolder("torn").study()

    started = time.monotonic()
    study.tell(study.ask(), 1.0)

    assert time.monotonic() - started < 15
    assert [trial.value for trial in trials_of("torn")] == [1.0]
    assert all(json.loads(line) for line in folder.journal.read_bytes().splitlines())


def test_journal_waits_for_the_lock_of_another_machine(here: Path) -> None:
    lock = here / "journal.log.lock"
    lock.write_text("elsewhere")
    code = "import os, sys, time; time.sleep(0.3); os.unlink(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)])

    path = here / "journal.log"
    journal = JournalFileBackend(str(path), lock_obj=JournalLock(path))
    journal.append_logs([{"a": 1}, {"b": 2}])

    assert process.wait() == 0  # it found its lock
    assert list(journal.read_logs(0)) == [{"a": 1}, {"b": 2}]
    assert not lock.exists()


def test_trial_without_a_lock_or_a_heartbeat_is_dead(here: Path) -> None:
    folder = StudyFolder("locks")
    folder.make()
    study = folder.study()
    study.ask().set_user_attr("host", HOST)
    study.ask().set_user_attr("host", "elsewhere")
    ours, theirs = study.trials

    lock = folder.claim(ours)
    assert lock is not None
    assert folder.is_alive(ours)
    lock.release()
    assert not folder.is_alive(ours)
    assert folder.is_alive(theirs)  # its lock may not be visible here
    (folder.trials / "1.lock").touch()
    os.utime(folder.trials / "1.lock", (1, 1))
    assert not folder.is_alive(theirs)


def test_study_uses_public_names_of_optuna_only() -> None:
    for path in (REPOSITORY / "ml_pipeline" / "study").glob("*.py"):
        private = r"optuna[\w.]*\._|(study|storage|trial)\._[a-z]"
        assert not re.search(private, path.read_text()), path


def test_pace_leaves_out_the_time_without_training() -> None:
    noon = datetime(2026, 1, 1, 12)

    def trial(begin: float, end: float, **attrs: Any) -> FrozenTrial:
        made = optuna.trial.create_trial(value=1.0, user_attrs=attrs)
        made.datetime_start = noon + timedelta(minutes=begin)
        made.datetime_complete = noon + timedelta(minutes=end)
        return made

    side_by_side = [trial(0, 10), trial(0, 10)]
    continued = trial(20, 620, deaths=1, seconds=600)  # ten minutes, and a pause

    assert trials_per_hour([]) is None
    assert trials_per_hour(side_by_side) == 12
    assert trials_per_hour([*side_by_side, continued]) == 9


LONG = {
    "total_steps": 2048,
    "callbacks__checkpoints__every_steps": 64,
    "callbacks__evaluation__eval_every_steps": 512,
}


def kill_everything(process: subprocess.Popen[str], name: str) -> None:
    """Kill a study and its workers at once, like a power cut."""
    workers = [trial.user_attrs["pid"] for trial in running(trials_of(name))]
    for pid in (process.pid, *workers):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    wait_until_gone(workers)


def has_begun(name: str, n_finished: int) -> bool:
    """Whether this many trials have ended and another one has a checkpoint."""
    trials = trials_of(name)
    runs = [trial.user_attrs.get("run_dir") for trial in running(trials)]
    saved = [run for run in runs if run and (Path(run) / "checkpoints" / "latest.pt").is_file()]
    return len(finished(trials)) >= n_finished and bool(saved)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_study_killed_twice_ends_with_the_same_trials_as_one_that_was_not(
    here: Path, space: str
) -> None:
    settings = [*small(**LONG), space, "n_trials=12"]  # Optuna draws the first ten at random
    killed = []
    for n_finished in (3, 7):
        process = begin(here, "start", "killed", *settings)
        wait_until(lambda n=n_finished: has_begun("killed", n), 100)
        kill_everything(process, "killed")
        killed += [trial.number for trial in running(trials_of("killed"))]
    assert len(killed) == 2

    complete(here, "killed", *settings)
    complete(here, "whole", *settings)

    trials, whole = trials_of("killed"), trials_of("whole")
    assert [trial.number for trial in trials] == list(range(12))
    assert all(t.state in (TrialState.COMPLETE, TrialState.PRUNED) for t in trials)
    assert all(trials[number].user_attrs["deaths"] == 1 for number in killed)
    assert len({trial.user_attrs["run_dir"] for trial in trials}) == 12
    assert len(list(here.glob("runs/CartPole-v1/*"))) == 24
    assert [t.params for t in trials] == [t.params for t in whole]
    assert [(t.state, t.value) for t in trials] == [(t.state, t.value) for t in whole]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stopped_study_saves_its_trials_and_continues(here: Path, space: str) -> None:
    gate = here / "gate"  # no trial ends before it exists
    env = [*("env.id=null", "env.target=faulty_envs.GatedLater"), f"+env.kwargs.gate={gate}"]
    settings = [*small(**LONG), space, "n_trials=4", "n_jobs=2"]
    process = begin(here, "start", "mine", *settings, *env, "+env.kwargs.n_free=600")
    wait_until(lambda: has_begun("mine", 0), 100)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)

    assert process.returncode == 130
    assert "nothing is lost\ncontinue: " in output
    stopped = running(trials_of("mine"))
    begun = [trial for trial in stopped if "run_dir" in trial.user_attrs]
    assert begun
    assert all(trial.user_attrs["stopped"] for trial in begun)
    assert not any(is_running(trial.user_attrs["pid"]) for trial in stopped)

    gate.touch()
    complete(here, "mine")

    trials = trials_of("mine")
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert all(trial.state.is_finished() and "error" not in trial.user_attrs for trial in trials)
    assert len(list(here.glob("runs/GatedLater/*"))) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trial_that_is_stopped_while_it_begins_is_recorded_when_the_journal_is_free(
    here: Path, space: str
) -> None:
    begun = here / "begun"
    env = ["env.id=null", "env.target=faulty_envs.WaitsToBegin", f"+env.kwargs.begun={begun}"]
    process = begin(here, "start", "mine", *small(), space, "n_trials=1", *env)
    wait_until(begun.exists, 100)
    journal = JournalLock(StudyFolder("mine").journal)

    journal.acquire()
    process.send_signal(signal.SIGTERM)
    time.sleep(4.0)  # a signal that has not arrived is raised again after 2 seconds
    journal.release()
    process.communicate(timeout=100)

    assert process.returncode == 143
    (trial,) = trials_of("mine")
    assert trial.user_attrs["stopped"]


@pytest.mark.slow
def test_killed_worker_is_replaced_and_workers_end_with_their_parent(
    here: Path, space: str
) -> None:
    process = begin(here, "start", "mine", *small(**LONG), space, "n_trials=6")
    wait_until(lambda: has_begun("mine", 0), 60)
    (victim,) = running(trials_of("mine"))
    os.kill(victim.user_attrs["pid"], signal.SIGKILL)

    wait_until(lambda: has_begun("mine", 2), 60)
    assert trials_of("mine")[victim.number].state.is_finished()
    worker = trials_of("mine")[-1].user_attrs["pid"]
    process.kill()
    output, _ = process.communicate()

    assert "a worker died with exit code -9; a new worker continues its trial" in output
    wait_until_gone([worker], 30)


def test_interrupted_last_evaluation_is_repeated(finished_run: Path) -> None:
    run = RunFolder(finished_run)
    rows = read_metrics(run.metrics)
    value = float(rows[-1]["eval/episode_return"])
    columns = [name for name in rows[0] if not name.startswith("eval/")]
    lines = [",".join(columns), *(",".join(row[name] for name in columns) for row in rows)]
    run.metrics.write_text("\n".join(lines) + "\n")

    assert recorded_value(run, "eval/episode_return") == value


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trial_whose_worker_dies_five_times_fails(
    here: Path, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDING", "kill")
    crash = "+callbacks.crash={_target_: own_parts.EndAt, iteration: 1}"

    process = begin(here, "start", "bad", *small(), space, "n_trials=1", crash)
    output, _ = process.communicate(timeout=280)

    assert output.count("a worker died with exit code -9") == 5
    assert "all 1 trials failed: its worker died 5 times" in output
    assert process.returncode == 1


@pytest.mark.slow
def test_trained_trial_without_a_result_is_not_trained_again(here: Path, space: str) -> None:
    complete(here, "mine", *small(), space, "n_trials=1")
    before = trials_of("mine")
    journal = StudyFolder("mine").journal
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    assert b'"values":[' in last
    journal.write_bytes(b"".join(lines))
    assert trials_of("mine")[0].state == TrialState.RUNNING
    run = Path(before[0].user_attrs["run_dir"])
    summary = (run / "summary.json").read_text()

    complete(here, "mine")

    assert [trial.value for trial in trials_of("mine")] == [trial.value for trial in before]
    assert (run / "summary.json").read_text() == summary
