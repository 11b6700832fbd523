"""The audit of a replay buffer: what it counts, and that it finds damage."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Capture, error_line, only_run
from torch import Tensor

from ml_pipeline.__main__ import main
from ml_pipeline.algorithms.replay.audit import audit
from ml_pipeline.algorithms.replay.commands._load import load_replay_buffer
from ml_pipeline.algorithms.replay.windows import Windows
from ml_pipeline.assembly.run import train
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint, read_sealed, write_sealed
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.checks import BadValueError

COMMON = [
    *("agent=dqn", "n_envs=2", "vec_env=serial", "device=cpu", "logger=none"),
    *("agent.buffer_size=60", "agent.learning_starts=32", "agent.batch_size=4", "agent.n_step=3"),
    *("agent.iteration_length=8", "agent.priority_exponent=0.6", "network.hidden_sizes=[8]"),
    "~callbacks.evaluation",
]
# Episodes of 5 steps, which are truncated; the buffer holds the last 30 steps of each env.
RUN = [
    *COMMON,
    *("env.target=tiny_envs.CountingEnv", "+env.kwargs={length: 5, ending: truncated}"),
    *("total_steps=96", "callbacks.checkpoints.every_steps=16"),
]


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(RUN)
    return folder


@pytest.fixture
def run(_trained: Path, here: Path) -> Path:
    shutil.copytree(_trained / "runs", here / "runs")
    return only_run(here)


def test_the_command_prints_what_is_in_the_buffer(run: Path, capsys: Capture) -> None:
    assert main(["replay", str(run)]) == 0

    head, *lines = capsys.readouterr().out.splitlines()
    shown = {line[:38].strip(): line[38:] for line in lines}
    assert head == f"{run}, checkpoint latest of env step 96"
    # Rows 18 to 47 of 48: the steps 19, 24, ..., 44 of each env end an episode.
    assert shown["transitions"] == "60"
    assert shown["rows"] == "30 of 2 envs"
    assert shown["terminated"] == "0 (0.00%)"
    assert shown["truncated"] == "12 (20.00%)"
    assert shown["final observations"] == "12"
    assert shown["priorities outside the buffer"] == "0"
    assert shown["windows over the write head"] == "0"
    assert shown["windows over the end of an episode"] == "0"
    assert shown["next observations of a reset"] == "0"
    assert shown["on disk"].endswith(" MB in 4 files, checksums match")


def test_a_flipped_byte_in_a_file_is_found(run: Path, capsys: Capture) -> None:
    path = sorted((run / "replay").iterdir())[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    assert main(["replay", str(run)]) == 1
    assert error_line(capsys) == (
        f"{path} is damaged: its checksum does not match its content; to continue without these "
        f"transitions, add salvage=true to resume={run}"
    )


def test_a_lost_final_observation_is_found(run: Path, capsys: Capture) -> None:
    path = run / "replay" / next(p.name for p in (run / "replay").iterdir() if "24-32" in p.name)
    rows = read_sealed(path)
    n_lost = len(rows["final_at"])
    for name in [name for name in rows if name.startswith("final")]:
        rows[name] = rows[name][:0]
    content = io.BytesIO()
    torch.save(rows, content)
    write_sealed(path, content.getvalue())

    assert n_lost == 4
    assert main(["replay", str(run)]) == 1
    # Each is the end of three windows: those that begin at it, and one and two steps before.
    expected = "12 transitions have a reset observation as the next one"
    assert error_line(capsys) == f"{run}: {expected}; do not train from this replay buffer"


def test_a_run_that_failed_during_an_iteration_leaves_no_bad_transition(
    here: Path, capsys: Capture
) -> None:
    with pytest.raises(BadValueError, match="reward nan"):  # in step 20 of an env
        train([*COMMON, "env.target=tiny_envs.NanEnv", "total_steps=64"])
    run = only_run(here)

    assert main(["replay", str(run)]) == 0
    train([f"resume={run}"])  # new envs, which fail later
    assert main(["replay", str(run)]) == 0

    # The successor of row 19 is not known; the resumed run adds 16 rows.
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "  rows" in line]
    assert shown == ["18", "30"]
    assert load_checkpoint(RunFolder.open(run), LATEST)["replay"]["n_written"] == 18 + 16


class Careless(Windows):
    """Its windows always have n steps."""

    def ends(self, index: Tensor, newest: Any) -> tuple[Tensor, Tensor]:
        last = (index + (self._n_step - 1) * self._n_envs) % self._size
        return last, torch.full_like(index, self._n_step)


def test_windows_over_the_write_head_and_over_ends_are_found(run: Path) -> None:
    buffer: Any = load_replay_buffer(run)[0]
    assert audit(buffer).fault == ""

    buffer.windows.__class__ = Careless
    buffer.tree.set(torch.tensor([buffer.n_written % buffer.n_rows * 2]), torch.ones(1))
    found = audit(buffer)

    assert found.n_outside == 1  # the current observation of env 0
    assert found.n_over_head == 2 * 2  # the last two rows of each env
    assert found.n_over_end == 2 * 2 * 6  # those that begin one or two steps before an end
    assert "4 windows cross the write head, 24 windows cross the end of an episode" in found.fault


def test_a_run_without_replay_is_refused_in_one_line(finished_run: Path, capsys: Capture) -> None:
    assert main(["replay", str(finished_run)]) == 1

    assert "has no replay buffer; choose a run of an off-policy agent" in error_line(capsys)
