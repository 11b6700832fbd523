"""Runs on a GPU: same numbers as on the CPU, graphs, precision, resume, memory."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Capture, only_run, read_rows, small_auto
from stopped_runs import StopAfter, checkpoint_numbers
from test_device import allows_tf32

from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.device import DeviceError, resolve_device, total_memory
from ml_pipeline.records import Metrics
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.contracts import Callback
from ml_pipeline.training.loop import Loop
from ml_pipeline.training.out_of_memory import DeviceMemoryError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
]

MASKS = ["env.target=tiny_torch_envs.ForbiddingTwo", "env.id=null"]
LEAVES = ["env.target=tiny_torch_envs.Leaves", "env.id=null", "agent.normalize_obs=true"]
PARTS = ["env.target=tiny_torch_envs.DigitsAndForce", "env.id=null"]
# Tensor envs and host envs; every way of acting and learning that is captured or compiled.
GRAPH_KINDS = [
    ["env=torch_cartpole"],
    ["env=torch_cartpole", "n_envs=100"],
    ["env=torch_pendulum", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["env=torch_acrobot", "agent.max_kl=1e-6"],
    ["env=torch_mountain_car_continuous", "agent.box_policy=gsde"],
    ["env=torch_cartpole", "agent.shared_trunk=true", "agent.entropy_coef=0.01"],
    ["env=torch_cartpole", "network=lstm", "agent.scale_reward=true"],
    ["env=torch_pendulum", "network=lstm", "network.cell=gru", "agent.normalize_obs=true"],
    ["env=torch_cartpole", "network=lstm", "network.cell=mingru"],
    ["env=torch_acrobot", "network=lstm", "network.cell=mingru", "agent.shared_trunk=true"],
    ["env=torch_cartpole", "network=trxl", "network.window=4"],
    ["experiment=torch_breakout", "env.kwargs.sticky_actions=0.1"],
    MASKS,
    LEAVES,
    PARTS,
    ["env=cartpole"],
    ["env=cartpole", "collector=double"],
    ["env=cartpole", "network=lstm"],
    ["env=cartpole", "network=lstm", "network.cell=mingru", "agent.shared_trunk=true"],
    ["env=pendulum", "agent.box_policy=squashed"],
    ["experiment=camera_and_flag"],
]


def rows_of(overrides: list[str], *more: str, **settings: Any) -> list[dict[str, str]]:
    """The metrics of three iterations on the GPU."""
    size = {"n_envs": 8, "agent__n_steps": 16, "num_episodes": 3, "device": "cuda"}
    # ``overrides`` come last, so that they win. Evaluation would draw actions too.
    run = train([*small_auto(**{**size, **settings}), "~callbacks.evaluation", *overrides, *more])
    return read_rows(run.run_dir)


def assert_close(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> None:
    assert len(ours) == len(theirs) > 0
    for row, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our.keys() == their.keys()
        for name in our:
            if our[name] or their[name]:
                expected = pytest.approx(float(their[name]), rel=1e-3, abs=1e-3)
                assert float(our[name]) == expected, f"{name} of row {row}"


def fallbacks(output: str) -> list[str]:
    """Lines that report a slower fallback."""
    return [line for line in output.splitlines() if "slower" in line or "plain torch" in line]


def test_a_run_logs_the_memory_and_the_utilization_of_the_gpu(here: Path) -> None:
    rows = read_metrics(train(small_auto(device="cuda", total_steps=320)).run_dir / "metrics.csv")

    assert 0.0 < float(rows[0]["gpu/memory_mb"]) < (total_memory(torch.device("cuda")) or 0) / 1e6
    busy = [float(row["gpu/utilization"]) for row in rows if row.get("gpu/utilization")]
    assert all(0.0 <= share <= 1.0 for share in busy)  # empty without nvidia-ml-py


@pytest.mark.parametrize(
    ("hidden_sizes", "words"),
    [
        ("[1024,1024]", r"a rollout of .* needs about .*; cuda has .* GB, of which"),
        ("[8388608]", "the network alone does not fit"),
    ],
)
def test_out_of_gpu_memory_is_a_one_line_error(here: Path, hidden_sizes: str, words: str) -> None:
    size = {"n_envs": 8, "agent__n_steps": 8192, "agent__n_minibatches": 1, "total_steps": 65536}
    total = total_memory(torch.device("cuda")) or 0
    gc.collect()  # graphs of earlier tests hold memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 256e6) / total)
    try:
        with pytest.raises(DeviceMemoryError, match=words) as caught:
            train([*small_auto(device="cuda", **size), f"network.hidden_sizes={hidden_sizes}"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert "\n" not in str(caught.value)


def test_a_gpu_beyond_the_last_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"device=cuda:99: the last of \d+ GPUs is cuda:"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(
    "overrides",
    [
        ["env=cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
        ["env=pendulum", "agent.box_policy=squashed"],
        ["env=pendulum", "agent.box_policy=gsde", "network=lstm"],
        ["env=crowded_keys", "network=lstm", "network.cell=gru", "agent.shared_trunk=true"],
        ["experiment=camera_and_flag", "agent.max_kl=1.0"],
        ["env.target=tiny_envs.MixedEnv", "collector=double"],
    ],
    ids=" ".join,
)
def test_training_on_the_gpu_gives_the_numbers_of_the_cpu(here: Path, overrides: list[str]) -> None:
    size = {"n_envs": 8, "total_steps": 128}
    runs = {
        device: train([*overrides, *small_auto(device=device, **size)]).run_dir
        for device in ("cpu", "cuda:0")
    }

    first, other = (read_rows(run)[0] for run in runs.values())

    assert first.keys() == other.keys()
    for name in first:
        if first[name]:
            assert float(first[name]) == pytest.approx(float(other[name]), rel=1e-3, abs=1e-4), name
    assert load_agent(runs["cuda:0"], "latest").agent.device.type == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize("env", ["cartpole", "torch_cartpole"])
def test_a_run_continues_on_another_device_and_back(env: str, here: Path, capsys: Capture) -> None:
    run = train([f"env={env}", *small_auto(device="cuda")]).run_dir
    train([f"resume={run}", "total_steps=128", "device=cpu"])
    result = train([f"resume={run}", "total_steps=192", "device=cuda"])

    assert result.env_steps == 192
    assert capsys.readouterr().out.count("in the middle of its episodes") == 2


@pytest.mark.parametrize("overrides", GRAPH_KINDS, ids=" ".join)
def test_a_run_with_graphs_gives_the_same_numbers_as_without(
    overrides: list[str], here: Path, capsys: Capture
) -> None:
    graph = rows_of(overrides, "compile=graph")
    output = capsys.readouterr().out
    plain = rows_of(overrides, "compile=off")

    assert fallbacks(output) == []
    if "env=torch" in overrides[0]:
        assert "tensor envs, compiled and captured in the first iterations" in output
    assert_close(graph, plain)


@pytest.mark.parametrize(
    "overrides",
    [
        ["env=torch_cartpole"],
        ["env=torch_pendulum", "agent.normalize_obs=true", "agent.scale_reward=true"],
        ["env=torch_acrobot", "agent.max_kl=1.0"],
        ["env=torch_pendulum", "agent.box_policy=squashed"],
        ["env=torch_cartpole", "network=lstm"],
        ["env=torch_pendulum", "network=lstm", "network.cell=gru"],
        ["env=torch_cartpole", "network=lstm", "network.cell=mingru"],
        ["experiment=torch_breakout", "env.kwargs.sticky_actions=0.1"],
        MASKS,
        LEAVES,
        PARTS,
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("mode", ["off", "graph"])
def test_tensor_envs_give_the_numbers_of_the_cpu(
    overrides: list[str], mode: str, here: Path
) -> None:
    ours = rows_of(overrides, f"compile={mode}", num_episodes=1)
    theirs = rows_of(overrides, num_episodes=1, device="cpu")

    assert_close(ours, theirs)


@pytest.mark.parametrize(
    "overrides",
    [
        ["env=torch_cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
        ["env=torch_pendulum", "agent.learning_rate_schedule=adaptive"],
        ["env=torch_cartpole", "agent.shared_trunk=true"],
        ["env=torch_cartpole", "network=lstm", "agent.normalize_obs=true"],
        ["env=torch_pendulum", "network=lstm", "network.cell=gru"],
        ["env=torch_cartpole", "network=lstm", "network.cell=mingru"],
        ["experiment=torch_breakout", "env.kwargs.sticky_actions=0.1"],
        MASKS,
        LEAVES,
        PARTS,
    ],
    ids=" ".join,
)
def test_a_run_with_graphs_resumes_bit_for_bit(
    overrides: list[str], here: Path, capsys: Capture
) -> None:
    size = {"n_envs": 32, "agent__n_steps": 16, "total_steps": 5 * 512, "device": "cuda"}
    settings = [*overrides, *small_auto(**size), "compile=graph", "~callbacks.evaluation"]
    with pytest.raises(Interrupted):
        train(settings, callbacks={"stop": StopAfter(2)})
    run = only_run(here)
    train([f"resume={run}"])
    output = capsys.readouterr().out
    whole = train(settings).run_dir

    assert "resumed at env step 1,024 in the middle of its episodes" in output
    assert len(read_rows(whole)) == 5
    assert read_rows(run) == read_rows(whole)
    assert checkpoint_numbers(run) == checkpoint_numbers(whole)


@pytest.mark.parametrize("name", ["torch_cartpole", "cartpole"])
def test_a_captured_update_follows_the_schedules(name: str, here: Path) -> None:
    linear = [f"agent.{each}_schedule=linear" for each in ("learning_rate", "clip_range")]
    overrides = [f"env={name}", *linear, "agent.learning_rate=0.01"]

    graph = rows_of(overrides, "compile=graph", num_episodes=8)
    plain = rows_of(overrides, "compile=off", num_episodes=8)

    moved = [float(row["policy/approx_kl"]) for row in graph]
    assert len(moved) == 8
    # The last learning rate is an eighth of the first; the KL falls with its square.
    assert moved[-1] < 0.5 * max(moved)
    assert [row["policy/learning_rate"] for row in graph] == [
        row["policy/learning_rate"] for row in plain
    ]
    assert_close(graph[:3], plain[:3])
    still = rows_of([f"env={name}", "agent.learning_rate=1e-12"], "compile=graph")
    assert all(float(row["policy/approx_kl"]) < 1e-6 for row in still)


class Flags(Callback):
    """Records torch's settings for tf32 during a run."""

    def __init__(self) -> None:
        self.seen: set[tuple[bool, bool]] = set()

    def on_iteration_end(self, loop: Loop, metrics: Metrics) -> None:
        self.seen.add(allows_tf32())


@pytest.mark.parametrize("name", ["env=torch_cartpole", "experiment=camera_and_flag"])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_each_precision_trains_and_restores_torchs_settings(
    precision: str, name: str, here: Path
) -> None:
    before, flags = allows_tf32(), Flags()
    size = {"n_envs": 8, "num_episodes": 3, "device": "cuda"}
    settings = [
        *small_auto(**size),
        name,
        f"precision={precision}",
        "n_envs=8",
        "~callbacks.evaluation",
    ]

    rows = read_rows(train(settings, callbacks={"flags": flags}).run_dir)

    assert len(rows) == 3
    assert all(math.isfinite(float(row["loss/value"])) for row in rows)
    assert flags.seen == {(precision != "float32",) * 2}
    assert allows_tf32() == before


@pytest.mark.parametrize("mode", ["off", "graph"])
def test_a_nan_reward_stops_a_run_or_is_skipped(mode: str, here: Path) -> None:
    with pytest.raises(TrainingError, match=r"iteration 1: an env returned .* not finite"):
        rows_of(["env.target=tiny_torch_envs.Breaking"], f"compile={mode}")

    skipped = rows_of(
        ["env.target=tiny_torch_envs.Breaking", "agent.on_nonfinite=skip"], f"compile={mode}"
    )
    assert len(skipped) == 3
    assert all(float(row["loss/skipped_updates"]) > 0 for row in skipped)
