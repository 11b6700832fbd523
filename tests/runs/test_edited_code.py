"""Edits of the source, as a reader of the code makes them, take effect in whole runs.

Each run starts from a copy of the package with one edit. It must differ from the unedited run in
the first update, and say which fast code stepped aside.
"""

from __future__ import annotations

import re
import shutil
import socket
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import REPOSITORY, only_run, read_rows
from warm_python import WarmPython

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("edited_code")]  # share a warm process

_COMMON = [
    *("device=cpu", "logger=none", "~callbacks.evaluation", "seed=3", "n_envs=4"),
    *("agent.n_steps=32", "agent.n_minibatches=4", "agent.n_epochs=2", "num_episodes=1"),
]
MODES = {
    "workers": ["env=cartpole", "vec_env=serial", *_COMMON],
    "tensor env": ["env=torch_cartpole", *_COMMON],
    "two ranks": ["env=cartpole", "vec_env=serial", *_COMMON],
}


class Edit(NamedTuple):
    file: str  # below ml_pipeline/
    old: str
    new: str
    remark: str  # a pattern that the run prints; empty: nothing fast repeats this code


EDITS = {
    "huber value loss": Edit(
        "algorithms/ppo/loss.py",
        "value_loss = 0.5 * squared.mean()",
        "value_loss = torch.nn.functional.huber_loss(value, batch.value_target, delta=10.0)",
        "plain torch runs instead of NumpyPPO: ppo_loss was edited",
    ),
    "clamped advantages": Edit(
        "algorithms/ppo/loss.py",
        "    clipped = ratio.clamp",
        "    advantage = advantage.clamp(-1.5, 1.5)\n    clipped = ratio.clamp",
        "plain torch runs instead of NumpyPPO: ppo_loss was edited",
    ),
    "another normalisation": Edit(
        "algorithms/ppo/loss.py",
        "return centred / (centred.square().mean().sqrt() + 1e-8)",
        "return centred / (centred.abs().mean() + 1e-8)",
        "plain torch runs instead of NumpyPPO: normalised was edited",
    ),
    "another GAE": Edit(
        "training/returns.py",
        "carry = gamma * lam * ongoing",
        "carry = gamma * lam * lam * ongoing",
        "",
    ),
    "another entropy": Edit(
        "policy/distributions.py",
        "return log_prob, -(log_probs.exp() * log_probs).sum(dim=-1)",
        "return log_prob, -log_probs.mean(dim=-1)",
        r"plain torch runs instead of NumpyPPO: Categorical\.log_prob_and_entropy was edited",
    ),
    "another init": Edit(
        "policy/actor_critic.py",
        "init_orthogonal(self.policy_head, gain=0.01",
        "init_orthogonal(self.policy_head, gain=1.0",
        "",
    ),
    "a changed Adam": Edit(
        "policy/optimiser.py",
        "values.sub_(torch.where(finite, size * mean / deviation, 0.0))",
        "values.sub_(torch.where(finite, size * mean.sign(), 0.0))",
        "plain torch runs instead of NumpyPPO: adam_step was edited",
    ),
    "another network": Edit(
        "policy/networks.py",
        "        return features\n\n\ndef out_features",
        "        return features * 1.5\n\n\ndef out_features",
        r"plain torch runs instead of NumpyPPO: MLP\.forward was edited",
    ),
}


def first_row(
    python: WarmPython, package: Path, mode: str, folder: Path
) -> tuple[dict[str, str], str]:
    """The metrics of the first iteration of a run with the code of ``package``, and its output."""
    environments: list[dict[str, str]] = [{}]
    if mode == "two ranks":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ranks["MASTER_PORT"] = str(port)
        environments = [{**ranks, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    command = [package / "train_ppo.py", *MODES[mode]]
    codes, output = python.run(*command, cwd=folder, environments=environments)
    assert not any(codes), output
    return read_rows(only_run(folder))[0], output


def copied(folder: Path) -> Path:
    for name in ("ml_pipeline", "conf"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "train_ppo.py", folder)
    return folder


@cache
def unedited(python: WarmPython, mode: str, folder: Path) -> tuple[dict[str, str], str]:
    package = copied(folder / "unedited code" / mode)
    (folder / mode).mkdir()
    return first_row(python, package, mode, folder / mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EDITS)
def test_edit_changes_the_first_update_and_the_run_says_what_stepped_aside(
    name: str,
    mode: str,
    python: WarmPython,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    edit = EDITS[name]
    expected, plain_output = unedited(python, mode, tmp_path_factory.getbasetemp())
    package = copied(tmp_path / "code")
    file = package / "ml_pipeline" / edit.file
    text = file.read_text()
    assert text.count(edit.old) == 1
    file.write_text(text.replace(edit.old, edit.new))
    here = tmp_path / "runs here"
    here.mkdir()

    row, output = first_row(python, package, mode, here)

    changed = [key for key in row if row[key] != expected[key]]
    assert "loss/grad_norm" in changed or "policy/approx_kl" in changed
    assert "plain torch" not in plain_output
    if edit.remark:
        assert len(re.findall(edit.remark, output)) == 1
    if name == "another normalisation" and mode == "two ranks":
        assert "each rank normalises the advantages of its own part" in output
