"""Resume: what a run saves, when it starts new episodes, and that no untrusted file is executed."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from conftest import (
    Capture,
    Trap,
    contents,
    only_run,
    small,
)
from stopped_runs import stopped_run

from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.env_snapshots import (
    SnapshotError,
    load_snapshots,
    save_snapshots,
    snapshot_path,
)
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError
from ml_pipeline.runs.signatures import UntrustedError

# 10 iterations of 4 envs x 16 steps; a checkpoint after every fifth.
RUN = small(
    n_envs=4,
    total_steps=640,
    callbacks__checkpoints__every_steps=320,
    callbacks__evaluation__eval_every_steps=200,
)


@pytest.mark.slow
def test_stop_during_a_long_rollout_keeps_the_checkpoint_of_the_last_iteration(here: Path) -> None:
    hang = "{_target_: own_parts.SignalAt, step: 20, hang_seconds: 60}"  # in the second rollout
    settings = [*RUN, "callbacks.checkpoints.every_steps=1", "~callbacks.evaluation"]

    path = stopped_run([*settings, f"+env.wrappers.hang={hang}"], "signal in a rollout")

    run = RunFolder.open(path)
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
    (trained.checkpoints / "0123456789abcdef.envs").write_bytes(b"unused")
    before = contents(trained.path)

    with pytest.raises(UntrustedError, match="was not saved by this user, or has changed"):
        resume(trained, "agent.gamma=0.5", "logger=tensorboard")

    assert contents(trained.path) == before


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
    with pytest.raises(UntrustedError, match="was not saved by this user"):
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
