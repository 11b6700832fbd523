"""Resume: a run that was killed goes on bit for bit, and nothing that is not trusted is run."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, TESTS, Door, door_command, only_run, read_rows, small, wait_until

from ml_pipeline.build import load_agent, train
from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.runs.checkpoint import LATEST, CheckpointError, load_checkpoint, save_checkpoint
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
CASES: dict[str, list[str]] = {
    "everything that is annealed, normalised or scaled": [
        "agent.normalize_obs=true",
        "agent.scale_reward=true",
        "agent.learning_rate_schedule=adaptive",
        "agent.clip_range_schedule=linear",
        "agent.entropy_coef=0.01",
        "agent.entropy_coef_schedule=cosine",
        "vec_env=serial",
        "+env.wrappers.learns._target_=gymnasium.wrappers.NormalizeObservation",
    ],
    "workers, a memory, gSDE": [
        "env=pendulum",
        "network=lstm",
        "agent.box_policy=gsde",
        "vec_env=parallel",
        "vec_env.start_method=fork",
    ],
    "an env that gives its state, with masks": [
        "env.target=tiny_envs.ForbiddingEnv",
        "collector=double",
        "vec_env=serial",
    ],
}


def all_numbers(state: Any, path: str = "") -> dict[str, Any]:
    """Every number of a checkpoint by its path; what names this run alone is left out."""
    if isinstance(state, dict):
        parts = {str(name): part for name, part in state.items()}
    elif isinstance(state, (list, tuple)):
        parts = {str(place): part for place, part in enumerate(state)}
    else:
        return {path: state.tolist() if isinstance(state, torch.Tensor) else state}
    skipped = ("config", "env_snapshots") if not path else ()
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if name not in skipped:
            found |= all_numbers(part, f"{path}/{name}")
    return found


@pytest.mark.parametrize("overrides", CASES.values(), ids=list(CASES))
def test_ten_iterations_are_five_and_a_kill_and_five_more(
    overrides: list[str], door: Door, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["+callbacks.kill._target_=own_parts.KillAt", "+callbacks.kill.iteration=8"]
    settings = [*RUN, *more, "+callbacks.dice._target_=own_parts.Dice", *overrides]

    killed = door(*settings, PYTHONPATH=str(TESTS), KILL="1")
    run_dir = only_run(here)
    resumed = train([f"resume={run_dir}"])
    whole = train(settings)

    assert killed.returncode == -signal.SIGKILL
    assert read_rows(resumed.run_dir) == read_rows(whole.run_dir)
    assert len(read_rows(whole.run_dir)) == 10
    ours, theirs = (
        all_numbers(load_checkpoint(RunFolder.open(each.run_dir), LATEST))
        for each in (resumed, whole)
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.slow
def test_a_stop_signal_waits_for_the_iteration_so_that_the_resume_is_exact(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*RUN, "env.target=tiny_envs.SlowEnv", "+env.kwargs.seconds=0.005"]
    settings += ["vec_env=serial", "~callbacks.evaluation"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(door_command(*settings), cwd=here, env=environment)
    wait_until(lambda: len(list(here.glob("runs/*/*/metrics.csv"))) == 1, 60)
    run_dir = only_run(here)
    wait_until(lambda: len(read_rows(run_dir)) >= 2, 60)

    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    seconds = time.monotonic() - begin
    n_rows = len(read_rows(run_dir))
    train([f"resume={run_dir}"])
    whole = train(settings)

    assert code == 143
    assert seconds < 10
    assert 2 <= n_rows < 10
    assert "in the midst of its episodes" in capsys.readouterr().out
    assert read_rows(run_dir) == read_rows(whole.run_dir)


def test_an_env_that_cannot_be_saved_is_said_once_and_resumed_at_a_reset(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train([*RUN, "env.target=tiny_envs.Unpicklable", "total_steps=320"])
    said = capsys.readouterr().out
    resumed = train([f"resume={result.run_dir}", "total_steps=640"])

    assert said.count("a resume of this run will begin new episodes: TypeError: cannot") == 1
    assert "resumed at env step 320 with new episodes: the envs were not saved with it" in (
        capsys.readouterr().out
    )
    assert resumed.env_steps == 640


@pytest.fixture
def trained(here: Path) -> RunFolder:
    """A run of five iterations with a checkpoint and its envs."""
    return RunFolder.open(train([*RUN, "total_steps=320", "~callbacks.evaluation"]).run_dir)


def resume(run: RunFolder, *more: str) -> Path:
    return train([f"resume={run.path}", "total_steps=640", *more]).run_dir


@pytest.mark.parametrize("doubt", ["another user's", "changed", "the folder says trust: true"])
def test_envs_that_this_user_did_not_save_stop_the_resume_and_nothing_is_lost(
    doubt: str, trained: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (path,) = trained.checkpoints.glob("*.envs")
    if doubt == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"X")
    else:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    if doubt == "the folder says trust: true":
        text = trained.config.read_text()
        trained.config.write_text(text.replace("trust: false", "trust: true"))
    before = {each: each.read_bytes() for each in (path, trained.config, trained.metrics)}

    with pytest.raises(UntrustedSnapshotError, match="were not saved by this user, or have"):
        resume(trained, "agent.gamma=0.5")

    assert {each: each.read_bytes() for each in before} == before


def test_without_the_envs_that_were_saved_new_episodes_begin(
    trained: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = trained.checkpoints.glob("*.envs")
    path.unlink()

    resume(trained)

    assert f"with new episodes: {path.name} is missing" in capsys.readouterr().out


def test_the_best_checkpoint_can_take_the_place_of_the_latest(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.open(train([*RUN, "total_steps=320"]).run_dir)
    shutil.copy(run.checkpoints / "best.pt", run.checkpoints / "latest.pt")

    resume(run)

    assert "with new episodes: the envs were not saved with it" in capsys.readouterr().out


def test_trust_takes_the_envs_of_another_user(
    trained: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))

    resume(trained, "trust=true")

    assert "resumed at env step 320 in the midst of its episodes" in capsys.readouterr().out
    assert "trust: false" in trained.config.read_text()  # said once, for this command


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('exploded').touch()",)


def test_evaluation_never_reads_the_envs(trained: RunFolder, here: Path) -> None:
    (path,) = trained.checkpoints.glob("*.envs")
    path.write_bytes(pickle.dumps(Bomb()))

    load_agent(trained.path)
    resume(trained)  # it is no file of ours: new episodes

    assert not (here / "exploded").exists()


def test_another_number_of_envs_begins_new_episodes(
    trained: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(trained, "n_envs=2")

    assert "with new episodes: 4 envs were saved, and there are 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["+env.kwargs.max_episode_steps=50"], "the env's settings have changed"),
        (["collector=double"], "the collector is another one"),
    ],
)
def test_what_has_changed_begins_new_episodes_and_is_said(
    change: list[str], words: str, trained: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(trained, *change)

    assert f"resumed at env step 320 with new episodes: {words}" in capsys.readouterr().out


def test_a_resume_beside_a_live_run_removes_nothing_of_its(trained: RunFolder) -> None:
    litter = trained.checkpoints / ".latest.pt.0123abcd.tmp"
    litter.write_bytes(b"half")

    with trained.locked(), pytest.raises(RunFolderError, match="is being trained by another"):
        resume(trained)

    assert litter.exists()


def test_the_weights_are_saved_when_a_worker_is_lost(here: Path) -> None:
    settings = [*RUN, "vec_env=parallel", "vec_env.start_method=fork", "~callbacks.evaluation"]

    with pytest.raises(WorkerError, match="SIGKILL"):
        train([*settings, "+callbacks.kill._target_=own_parts.KillAWorkerAt"])

    run = RunFolder.open(only_run(here))
    assert load_checkpoint(run, LATEST)["iteration"] == 3
    assert train([f"resume={run.path}"]).env_steps == 640


@pytest.mark.slow
def test_a_stop_amid_a_long_rollout_keeps_the_checkpoint_that_is_as_new(here: Path) -> None:
    settings = [*RUN, "env.target=tiny_envs.SlowEnv", "+env.kwargs.seconds=0.1"]
    settings += ["vec_env=serial", "~callbacks.evaluation", "n_envs=2", "agent.n_steps=40"]
    settings += ["callbacks.checkpoints.every_steps=1", "total_steps=800"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(door_command(*settings), cwd=here, env=environment)
    wait_until(lambda: len(list(here.glob("runs/*/*/checkpoints/latest.pt"))) == 1, 60)
    run = RunFolder.open(only_run(here))
    time.sleep(0.5)  # into the second rollout, of 8 seconds

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 143
    state = load_checkpoint(run, LATEST)
    assert state["iteration"] == 1
    assert load_snapshots(run, state["env_snapshots"], trust=False)


def test_the_key_is_made_once_and_for_this_user_alone(tmp_path: Path, config_home: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    tokens = [save_snapshots(run, [b"one", b"", b"three"]) for _ in range(2)]

    key = config_home / "ml_pipeline" / "snapshot.key"
    assert key.stat().st_mode & 0o777 == 0o600
    for token in tokens:
        assert load_snapshots(run, token, trust=False) == [b"one", b"", b"three"]
    key.write_bytes(b"")
    with pytest.raises(SnapshotError, match="were not saved by this user"):
        load_snapshots(run, tokens[0], trust=False)


@pytest.mark.parametrize("content", [b"", b"hello", b"ml_pipeline envs 2\n" + b"x" * 40])
def test_damaged_snapshots_are_refused_even_if_they_are_trusted(
    content: bytes, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    snapshot_path(run, "abc").write_bytes(content)

    with pytest.raises(SnapshotError, match=r"abc\.envs is damaged"):
        load_snapshots(run, "abc", trust=True)


def test_without_a_place_for_the_key_the_run_goes_on_and_says_what_that_means(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "a file"))

    train([*RUN, "total_steps=320"])

    assert "the envs could not be saved; a resume would begin new episodes: there is no key" in (
        capsys.readouterr().out
    )


def test_what_a_kill_has_left_is_swept_at_the_next_start(trained: RunFolder) -> None:
    litter = [
        trained.checkpoints / ".latest.pt.0123abcd.tmp",
        trained.path / ".summary.json.0123abcd.tmp",
        trained.checkpoints / "0123456789abcdef.envs",
    ]
    for path in litter:
        path.write_bytes(b"half")

    resume(trained)

    assert not [path for path in litter if path.exists()]
    assert len(list(trained.checkpoints.glob("*.envs"))) == 1


def test_a_flipped_byte_anywhere_is_refused(trained: RunFolder) -> None:
    path = trained.checkpoints / "latest.pt"
    whole = path.read_bytes()
    places = {0, len(whole) - 1, len(whole) - 40, *random.Random(1).sample(range(len(whole)), 40)}

    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 0x10
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"latest\.pt (is damaged|is no checkpoint)"):
            load_checkpoint(trained, LATEST)


def test_one_file_holds_weights_normaliser_spaces_and_config(here: Path) -> None:
    result = train([*RUN, "total_steps=64", "agent.normalize_obs=true"])

    # As anybody can read it, without this package.
    state = torch.load(result.run_dir / "checkpoints" / "latest.pt", weights_only=True)

    assert state["agent"]["model"]["actor.layers.0.weight"].shape == (64, 4)
    assert state["agent"]["model"]["preprocess.moments.0.mean"].shape == (4,)
    assert state["agent"]["spaces"]["action_space"] == {"kind": "Discrete", "n": 2, "start": 0}
    assert "normalize_obs: true" in state["config"]


def test_a_resumed_run_keeps_its_folder_and_its_wandb_id(here: Path) -> None:
    settings = [*small(logger="wandb"), "logger.wandb.mode=offline"]
    result = train(settings)
    resumed = train([f"resume={result.run_dir}", "total_steps=128"])

    def ids() -> list[str]:
        files = result.run_dir.glob("wandb/offline-run-*/run-*.wandb")
        return [path.stem.removeprefix("run-") for path in files]

    assert resumed.run_dir == result.run_dir
    wait_until(lambda: len(ids()) == 2, 20)  # W&B's own process writes them
    assert set(ids()) == {result.run_dir.name}


N_KILLS = int(os.environ.get("KILLS", "12"))  # KILLS=100 for the promised two hundred in all

SAVING = """
import sys, torch
from pathlib import Path
from ml_pipeline.runs.checkpoint import LATEST, save_checkpoint
from ml_pipeline.runs.env_snapshots import save_snapshots, sweep_snapshots
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

run = RunFolder(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 10**9):
    token = save_snapshots(run, [b"x" * 10_000, str(number).encode()])
    save_checkpoint(run, LATEST, {"number": number, "weights": torch.full((10_000,), number),
                                  "env_snapshots": token})
    sweep_snapshots(run, keep=token)
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * N_KILLS)
def test_kills_while_saving_leave_a_whole_checkpoint_each_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    save_checkpoint(run, LATEST, {"number": -1, "env_snapshots": None})
    chance, number = random.Random(1), -1
    for _ in range(N_KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(run.path), str(number + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline()  # it saves now, again and again
        time.sleep(chance.random() * 0.02)
        process.kill()
        told = [number, *(int(line) for line in process.stdout.read().split())]
        process.wait()

        state = load_checkpoint(run, LATEST)
        assert state["number"] >= told[-1]  # what was said to be saved is
        number = state["number"]
        assert set(state["weights"].tolist()) == {float(number)}
        snapshots = load_snapshots(run, state["env_snapshots"], trust=False)
        assert snapshots[1] == str(number).encode()
        run.sweep()
        assert not list(run.checkpoints.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * N_KILLS)
def test_kills_while_training_lose_at_most_one_interval(here: Path) -> None:
    """Each leg is killed at a random moment; the run that comes out is that of no kill at all."""
    total = 128 * 40 * N_KILLS  # more than the legs get done
    settings = [*RUN, f"total_steps={total}", "callbacks.checkpoints.every_steps=128"]
    settings += ["~callbacks.evaluation", "vec_env=serial"]
    chance = random.Random(2)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from ml_pipeline.build import train; "
        "train(sys.argv[2:])"
    )
    leg = [sys.executable, "-u", "-c", script, str(REPOSITORY)]
    arguments, lost, env_steps = settings, [], 0
    for _ in range(N_KILLS):
        process = subprocess.Popen([*leg, *arguments], cwd=here, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("run folder:"):
                break
        else:
            raise AssertionError(f"a leg has ended by itself, after env step {env_steps}")
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
            shutil.rmtree(run_dir)  # killed before its first checkpoint: begun anew
    assert len(lost) > N_KILLS // 2
    assert max(lost) <= 128 + 64  # an interval, and the iteration that was to be saved
    assert 0 < env_steps < total
    resumed = train(arguments)
    whole = train(settings)
    assert read_rows(resumed.run_dir) == read_rows(whole.run_dir)
    assert not list(resumed.run_dir.rglob(".*.tmp"))
