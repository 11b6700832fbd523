"""Resume: a stopped or killed run continues bit for bit, and untrusted files are never executed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import (
    TESTS,
    Capture,
    Door,
    Start,
    Trap,
    await_line,
    contents,
    only_run,
    read_rows,
    small,
    wait_until,
)
from stopped_runs import checkpoint_numbers

from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.env_snapshots import (
    SnapshotError,
    UntrustedSnapshotError,
    load_snapshots,
    save_snapshots,
    snapshot_path,
)
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

# 10 iterations of 4 envs x 16 steps; a checkpoint after every fifth.
RUN = small(
    n_envs=4,
    total_steps=640,
    callbacks__checkpoints__every_steps=320,
    callbacks__evaluation__eval_every_steps=200,
)
SLOW_ENV = ["env.target=tiny_envs.SlowEnv", "vec_env=serial", "~callbacks.evaluation"]

# The overrides of each case, and how its run ends. A SIGKILL needs a process of its own.
CASES: dict[str, tuple[list[str], str]] = {
    "everything that is annealed, normalised or scaled": (
        [
            "agent.normalize_obs=true",
            "agent.scale_reward=true",
            "agent.learning_rate_schedule=adaptive",
            "agent.clip_range_schedule=linear",
            "agent.entropy_coef=0.01",
            "agent.entropy_coef_schedule=cosine",
            "vec_env=serial",
            "+env.wrappers.learns._target_=gymnasium.wrappers.NormalizeObservation",
        ],
        "kill",
    ),
    "workers, a recurrent policy, gSDE": (
        [
            "env=pendulum",
            "+env.kwargs.max_episode_steps=20",
            "network=lstm",
            "agent.box_policy=gsde",
            "vec_env=parallel",
            "vec_env.start_method=fork",
        ],
        "raise",
    ),
    "an env with its own state methods and masks": (
        ["env.target=tiny_envs.ForbiddingEnv", "collector=double", "vec_env=serial"],
        "raise",
    ),
}


@pytest.mark.parametrize(
    ("overrides", "ending"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * ("workers" in name))
        for name, case in CASES.items()
    ],
)
def test_run_that_crashes_and_resumes_equals_an_uninterrupted_run(
    overrides: list[str], ending: str, door: Door, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Six iterations; a checkpoint after every third, an evaluation after the fourth and the last.
    length = ["total_steps=384", "callbacks.checkpoints.every_steps=192"]
    crash = ["+callbacks.crash._target_=own_parts.CrashAt", "+callbacks.crash.iteration=5"]
    settings = [*RUN, *length, *crash, "+callbacks.dice._target_=own_parts.Dice", *overrides]

    if ending == "kill":
        crashed = door(*settings, PYTHONPATH=str(TESTS), CRASH="kill")
        assert crashed.returncode == -signal.SIGKILL
    else:
        monkeypatch.setenv("CRASH", "raise")
        with pytest.raises(RuntimeError, match="crash at iteration 5"):
            train(settings)
        monkeypatch.delenv("CRASH")
    run_dir = only_run(here)
    resumed = train([f"resume={run_dir}"])
    complete = train(settings)

    assert resumed.run_dir == run_dir
    assert read_rows(run_dir) == read_rows(complete.run_dir)
    assert len(read_rows(run_dir)) == 6
    ours, theirs = (checkpoint_numbers(each.run_dir) for each in (resumed, complete))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.slow
def test_stop_signal_waits_for_the_iteration_so_that_the_resume_is_exact(
    started: Start, here: Path, capsys: Capture
) -> None:
    settings = [*RUN, *SLOW_ENV, "+env.kwargs.seconds=0.005"]
    process = started(*settings)
    wait_until(lambda: len(list(here.glob("runs/*/*/metrics.csv"))) == 1, 60)
    run_dir = only_run(here)
    wait_until(lambda: len(read_rows(run_dir)) >= 2, 60)

    process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    n_rows = len(read_rows(run_dir))
    train([f"resume={run_dir}"])
    complete = train(settings)

    assert code == 143
    assert 2 <= n_rows < 10
    assert "in the middle of its episodes" in capsys.readouterr().out
    assert read_rows(run_dir) == read_rows(complete.run_dir)


@pytest.mark.slow
def test_stop_during_a_long_rollout_keeps_the_checkpoint_of_the_last_iteration(
    started: Start, here: Path
) -> None:
    settings = [*RUN, *SLOW_ENV, "+env.kwargs.seconds=0.1", "n_envs=2", "agent.n_steps=40"]
    process = started(*settings, "callbacks.checkpoints.every_steps=1", "total_steps=800")
    wait_until(lambda: len(list(here.glob("runs/*/*/checkpoints/latest.pt"))) == 1, 60)
    run = RunFolder.open(only_run(here))
    time.sleep(0.5)  # into the second rollout, which takes 8 seconds

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 143
    state = load_checkpoint(run, LATEST)
    assert state["iteration"] == 1
    assert load_snapshots(run, state["env_snapshots"], trust=False)


def test_weights_are_saved_when_a_worker_dies(here: Path) -> None:
    settings = [*RUN, "vec_env=parallel", "vec_env.start_method=fork", "~callbacks.evaluation"]

    with pytest.raises(WorkerError, match="SIGKILL"):
        train([*settings, "+callbacks.kill._target_=own_parts.KillAWorkerAt"])

    run = RunFolder.open(only_run(here))
    assert load_checkpoint(run, LATEST)["iteration"] == 3
    assert train([f"resume={run.path}"]).env_steps == 640


@pytest.fixture
def trained(finished_run: Path) -> RunFolder:
    return RunFolder.open(finished_run)


def resume(run: RunFolder, *more: str) -> Path:
    """Train one more iteration."""
    return train([f"resume={run.path}", "total_steps=96", *more]).run_dir


def envs_file(run: RunFolder) -> Path:
    (path,) = run.checkpoints.glob("*.envs")
    return path


def test_env_that_cannot_be_saved_is_reported_once_and_resumes_with_new_episodes(
    here: Path, capsys: Capture
) -> None:
    result = train([*RUN, "env.target=own_parts.Unpicklable", "total_steps=320"])
    output = capsys.readouterr().out
    resumed = train([f"resume={result.run_dir}", "total_steps=640"])

    assert output.count("new episodes: TypeError: cannot") == 1
    assert "resumed at env step 320 with new episodes: the checkpoint was saved without" in (
        capsys.readouterr().out
    )
    assert resumed.env_steps == 640


@pytest.mark.parametrize(
    ("cause", "overrides", "reason"),
    [
        ("envs deleted", [], "{envs} is missing"),
        ("best copied", [], "the checkpoint was saved without the envs"),
        ("n_envs", ["n_envs=1"], "the checkpoint has 2 envs, this run 1"),
        ("settings", ["+env.kwargs.max_episode_steps=50"], "the env's settings have changed"),
        ("collector", ["collector=double"], "the collector setting has changed"),
    ],
)
def test_resume_that_cannot_continue_the_episodes_says_why(
    cause: str, overrides: list[str], reason: str, trained: RunFolder, capsys: Capture
) -> None:
    envs = envs_file(trained)
    if cause == "envs deleted":
        envs.unlink()
    elif cause == "best copied":
        shutil.copy(trained.checkpoints / "best.pt", trained.checkpoints / "latest.pt")

    resume(trained, *overrides)

    words = f"with new episodes: {reason.format(envs=envs.name)}"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("doubt", ["another user's", "changed", "the folder says trust: true"])
def test_untrusted_envs_stop_the_resume_and_nothing_changes(
    doubt: str, trained: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = envs_file(trained)
    if doubt == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"X")
    else:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    if doubt == "the folder says trust: true":
        text = trained.config.read_text()
        trained.config.write_text(text.replace("trust: false", "trust: true"))
    before = {each: each.read_bytes() for each in (path, trained.config, trained.metrics)}

    with pytest.raises(UntrustedSnapshotError, match="was not saved by this user, or has changed"):
        resume(trained, "agent.gamma=0.5")

    assert {each: each.read_bytes() for each in before} == before


def test_trust_accepts_the_envs_of_another_user_for_one_command(
    trained: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))

    resume(trained, "trust=true")

    assert "resumed at env step 64 in the middle of its episodes" in capsys.readouterr().out
    assert "trust: false" in trained.config.read_text()


def test_evaluation_never_reads_the_envs_and_resume_refuses_a_plain_pickle(
    trained: RunFolder, here: Path
) -> None:
    envs_file(trained).write_bytes(pickle.dumps(Trap()))

    load_agent(trained.path)
    resume(trained)

    assert not (here / "sprung").exists()


def test_resume_removes_unfinished_files_but_changes_nothing_in_a_live_run(
    trained: RunFolder,
) -> None:
    leftovers = [
        trained.checkpoints / ".latest.pt.0123abcd.tmp",
        trained.path / ".summary.json.0123abcd.tmp",
        trained.checkpoints / "0123456789abcdef.envs",
    ]
    for path in leftovers:
        path.write_bytes(b"half")
    before = contents(trained.path)

    with trained.locked(), pytest.raises(RunFolderError, match="is being trained by another"):
        resume(trained)
    assert contents(trained.path) == before

    resume(trained)
    assert not any(path.exists() for path in leftovers)
    assert envs_file(trained).exists()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.make()
    return run


def test_key_is_made_once_and_only_this_user_can_read_it(run: RunFolder, config_home: Path) -> None:
    (config_home / "ml_pipeline" / "snapshot.key").unlink()
    tokens = [save_snapshots(run, [b"one", b"", b"three"]) for _ in range(2)]

    key = config_home / "ml_pipeline" / "snapshot.key"
    assert key.stat().st_mode & 0o777 == 0o600
    for token in tokens:
        assert load_snapshots(run, token, trust=False) == [b"one", b"", b"three"]
    key.write_bytes(b"")
    with pytest.raises(UntrustedSnapshotError, match="was not saved by this user"):
        load_snapshots(run, tokens[0], trust=False)


@pytest.mark.parametrize("content", [b"", b"hello", b"ml_pipeline envs 2\n" + b"x" * 40])
def test_damaged_snapshots_are_refused_even_if_trusted(content: bytes, run: RunFolder) -> None:
    snapshot_path(run, "abc").write_bytes(content)

    with pytest.raises(SnapshotError, match=r"abc\.envs is damaged"):
        load_snapshots(run, "abc", trust=True)


def test_run_that_cannot_store_the_key_trains_and_warns_that_a_resume_starts_new_episodes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (here / "a file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "a file"))

    train([*RUN, "total_steps=320", "vec_env=serial", "~callbacks.evaluation"])

    assert "could not save the envs; a resume will start new episodes: no key to seal" in (
        capsys.readouterr().out
    )


N_KILLS = int(os.environ.get("KILLS", "12"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * N_KILLS)
def test_kills_at_random_moments_lose_at_most_one_interval_and_change_no_number(
    started: Start, here: Path
) -> None:
    total = 128 * 40 * N_KILLS  # more than the killed processes can train
    settings = [*RUN, f"total_steps={total}", "callbacks.checkpoints.every_steps=128"]
    settings += ["~callbacks.evaluation", "vec_env=serial"]
    chance = random.Random(2)
    arguments, lost, env_steps = settings, [], 0
    for _ in range(N_KILLS):
        process = started(*arguments)
        await_line(process, "run folder:")
        time.sleep(0.3 * chance.random())
        process.kill()
        process.communicate()
        run_dir = next(here.glob("runs/*/*/config.yaml")).parent
        run = RunFolder.open(run_dir)
        if (run.checkpoints / "latest.pt").exists():
            env_steps = load_checkpoint(run, LATEST)["env_steps"]
            lost.append(int(read_rows(run_dir)[-1]["env_steps"]) - env_steps)
            arguments = [f"resume={run_dir}"]
        else:
            shutil.rmtree(run_dir)  # killed before its first checkpoint
    assert len(lost) > N_KILLS // 2
    assert max(lost) <= 128 + 64  # an interval, and the iteration that was not saved yet
    assert 0 < env_steps < total
    resumed = train(arguments)
    complete = train(settings)
    assert read_rows(resumed.run_dir) == read_rows(complete.run_dir)
    assert not list(resumed.run_dir.rglob(".*.tmp"))
