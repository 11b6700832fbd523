"""Devices: one word of config, refused where it is not there, and the same numbers on each."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from conftest import only_run, read_rows, small
from test_torch_training import StopAfter, numbers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.build import load_agent, train
from ml_pipeline.device import (
    DeviceError,
    precision_of_products,
    program_mode,
    resolve_device,
    total_memory,
)
from ml_pipeline.door.compose import checked_config, compose_config
from ml_pipeline.door.parts import build_env_factory, build_network
from ml_pipeline.door.plan import with_mask_source
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.protocols import Callback, Metrics, Trainer
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.collector import Collector
from ml_pipeline.training.out_of_memory import DeviceMemoryError
from ml_pipeline.training.ppo_trainer import PPOTrainer, TrainingError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

# All that a run may be made of: spaces, policies, networks, normalisation, masks.
KINDS = [
    ["env=cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["env=pendulum", "agent.dual_clip=3.0", "agent.clip_value_loss=true"],
    ["env=pendulum", "agent.box_policy=squashed", "agent.on_nonfinite=skip"],
    ["env=pendulum", "agent.box_policy=gsde", "network=lstm", "network.cell=gru"],
    ["env=crowded_keys", "network=lstm", "agent.shared_trunk=true"],
    ["env.target=tiny_envs.ForbiddingEnv"],
    ["env.target=tiny_envs.MixedEnv", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["experiment=camera_and_flag", "agent.max_kl=1.0"],
]


class Watch(TorchDispatchMode):
    """Notes every kernel that torch calls, also in the backward pass, and those with doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()
        self.with_doubles: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func._schema.name).removeprefix("aten::")
        name += f".{func._schema.overload_name}" if func._schema.overload_name else ""
        self.kernels.add(name)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                self.with_doubles.add(name)
        return result


def watched(overrides: list[str]) -> Watch:
    """Two iterations on the CPU of what other devices run: torch, and nothing by hand."""
    config = checked_config(compose_config([*overrides, *small(n_envs=4)]))
    make_env = build_env_factory(config)
    first = make_env()
    config = with_mask_source(config, first, first.reset(seed=1)[1], {})
    network = partial(build_network, config)
    spaces = first.observation_space, first.action_space
    device = torch.device("cpu")
    agent = PPOAgent(*spaces, network, config.agent, device=device, seed=1, by_hand=False)
    env = SerialEnv([make_env] * 4, seed=1)
    skips = config.agent.on_nonfinite == "skip"
    collector = Collector([env], env_seed=1, noise_seed=2, allow_nonfinite=skips)
    with Watch() as watch:
        PPOTrainer(agent, collector, seed=1).train(128)
    return watch


def test_auto_takes_what_is_there() -> None:
    if torch.cuda.is_available():
        expected = "cuda"
    else:
        expected = "mps" if torch.backends.mps.is_available() else "cpu"

    assert resolve_device("auto").type == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"device={name}: this torch sees no GPU"):
        resolve_device(name)


@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
def test_no_double_reaches_torch_in_training(overrides: list[str]) -> None:
    watch = watched(overrides)

    assert len(watch.kernels) > 30
    assert watch.with_doubles == set()


@cache
def torchs_kernels() -> dict[str, dict[str, Any]]:
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # much faster, where it is there
    entries = yaml.load(path.read_text(), loader)  # both are safe
    return {entry["func"].partition("(")[0]: entry for entry in entries}


@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
def test_mps_has_every_kernel_that_training_calls(overrides: list[str]) -> None:
    def on_mps(name: str) -> bool:
        entry = torchs_kernels()[name]
        if "structured_delegate" in entry:
            return on_mps(entry["structured_delegate"])
        keys = " ".join(entry.get("dispatch", {"Composite": ""}))  # made of others, if it has none
        return "MPS" in keys or "Composite" in keys

    kernels = watched(overrides).kernels

    # An LSTM has a kernel of its own on each device: _lstm_mps is the one there.
    missing = {name for name in kernels if not on_mps(name)}
    assert missing <= {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}


def test_the_cpu_has_the_memory_of_the_machine() -> None:
    total = total_memory(torch.device("cpu"))

    assert total is None or total > 1e8


@pytest.mark.gpu
@needs_gpu
def test_a_run_on_the_gpu_tells_what_it_holds_of_it(here: Path) -> None:
    rows = read_metrics(train(small(device="cuda", total_steps=320)).run_dir / "metrics.csv")

    assert 0.0 < float(rows[0]["gpu/memory_mb"]) < (total_memory(torch.device("cuda")) or 0) / 1e6
    busy = [float(row["gpu/utilization"]) for row in rows if row.get("gpu/utilization")]
    assert all(0.0 <= share <= 1.0 for share in busy)  # none, where nvidia-ml-py is missing


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("hidden_sizes", "words"),
    [
        ("[1024,1024]", r"minibatch of 65536 about .* GB in the network; cuda has .* GB, of which"),
        ("[8388608]", "the network alone does not fit"),
    ],
)
def test_running_out_of_the_memory_of_the_gpu_is_one_line(
    here: Path, hidden_sizes: str, words: str
) -> None:
    size = {"n_envs": 8, "agent__n_steps": 8192, "agent__n_minibatches": 1, "total_steps": 65536}
    total = total_memory(torch.device("cuda")) or 0
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(256e6 / total)
    try:
        with pytest.raises(DeviceMemoryError, match=words):
            train([*small(device="cuda", **size), f"network.hidden_sizes={hidden_sizes}"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_beyond_the_last_is_refused() -> None:
    with pytest.raises(DeviceError, match="from cuda:0 on"):
        resolve_device("cuda:99")


@pytest.mark.gpu
@needs_gpu
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
    ids=lambda overrides: " ".join(overrides),
)
def test_training_on_the_gpu_gives_the_numbers_of_the_cpu(here: Path, overrides: list[str]) -> None:
    size = {"n_envs": 8, "total_steps": 128}
    runs = {
        device: train([*overrides, *small(device=device, **size)]).run_dir
        for device in ("cpu", "cuda:0")
    }

    first, other = (read_rows(run)[0] for run in runs.values())

    assert first.keys() == other.keys()
    for name in first:
        if first[name]:
            assert float(first[name]) == pytest.approx(float(other[name]), rel=1e-3, abs=1e-4), name
    assert load_agent(runs["cuda:0"], "latest").agent.device.type == "cpu"


@pytest.mark.gpu
@needs_gpu
def test_a_run_of_the_gpu_can_be_resumed_on_the_cpu_and_back(here: Path) -> None:
    run = train(small(device="cuda")).run_dir
    train([f"resume={run}", "total_steps=128", "device=cpu"])

    assert train([f"resume={run}", "total_steps=192", "device=cuda"]).env_steps == 192


# Tensor envs and host envs, every way of acting and learning that is captured or compiled.
GRAPH_KINDS = [
    ["env=torch_cartpole"],
    ["env=torch_cartpole", "n_envs=100"],
    ["env=torch_pendulum", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["env=torch_acrobot", "agent.max_kl=1e-6"],
    ["env=torch_mountain_car_continuous", "agent.box_policy=gsde"],
    ["env=torch_cartpole", "agent.shared_trunk=true", "agent.entropy_coef=0.01"],
    ["env=cartpole"],
    ["env=cartpole", "collector=double"],
    ["env=pendulum", "agent.box_policy=squashed"],
    ["experiment=camera_and_flag"],
]


def rows_of(overrides: list[str], *more: str, **settings: Any) -> list[dict[str, str]]:
    """The record of three iterations on the GPU."""
    size = {"n_envs": 8, "agent__n_steps": 16, "num_episodes": 3, "device": "cuda"}
    # What is given comes last, where it counts; no evaluation, which would act besides.
    run = train([*small(**{**size, **settings}), "~callbacks.evaluation", *overrides, *more])
    return read_rows(run.run_dir)


def assert_close(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> None:
    assert len(ours) == len(theirs) > 0
    for row, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our.keys() == their.keys()
        for name in our:
            if our[name] or their[name]:
                expected = pytest.approx(float(their[name]), rel=1e-3, abs=1e-3)
                assert float(our[name]) == expected, f"{name} of row {row}"


def falls_back(said: str) -> list[str]:
    """Lines that say that something is slower than it was meant to be."""
    return [line for line in said.splitlines() if "runs slower" in line or "plain torch" in line]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("overrides", GRAPH_KINDS, ids=" ".join)
def test_a_run_of_graphs_gives_the_numbers_of_a_plain_one(
    overrides: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = rows_of(overrides, "compile=graph")
    said = capsys.readouterr().out
    plain = rows_of(overrides, "compile=off")

    assert falls_back(said) == []
    if "env=torch" in overrides[0]:
        assert "as tensors, compiled and captured in the first iterations" in said
    assert_close(graph, plain)


@pytest.mark.gpu
@needs_gpu
def test_an_lstm_that_cannot_be_captured_says_so_and_gives_the_same_numbers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["env=cartpole", "network=lstm"]

    graph = rows_of(overrides, "compile=graph")
    said = capsys.readouterr().out
    plain = rows_of(overrides, "compile=off")

    (line,) = [line for line in falls_back(said) if line.startswith("the update")]
    assert line.startswith("the update is not captured as a CUDA graph, and runs slower: ")
    assert_close(graph, plain)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "overrides",
    [
        ["env=torch_cartpole"],
        ["env=torch_pendulum", "agent.normalize_obs=true", "agent.scale_reward=true"],
        ["env=torch_acrobot", "agent.max_kl=1.0"],
        ["env=torch_pendulum", "agent.box_policy=squashed"],
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


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "overrides",
    [
        ["env=torch_cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
        ["env=torch_pendulum", "agent.learning_rate_schedule=adaptive"],
        ["env=torch_cartpole", "agent.shared_trunk=true"],
    ],
    ids=" ".join,
)
def test_a_run_of_graphs_goes_on_bit_for_bit(
    overrides: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"n_envs": 32, "agent__n_steps": 16, "total_steps": 5 * 512, "device": "cuda"}
    settings = [*overrides, *small(**size), "compile=graph", "~callbacks.evaluation"]
    with pytest.raises(Interrupted):
        train(settings, callbacks={"stop": StopAfter(2)})
    run = only_run(here)
    train([f"resume={run}"])
    said = capsys.readouterr().out
    whole = train(settings).run_dir

    assert "resumed at env step 1,024 in the middle of its episodes" in said
    assert len(read_rows(whole)) == 5
    assert read_rows(run) == read_rows(whole)
    assert numbers(run) == numbers(whole)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["torch_cartpole", "cartpole"])
def test_a_captured_update_heeds_the_schedules_of_the_run(name: str, here: Path) -> None:
    linear = [f"agent.{each}_schedule=linear" for each in ("learning_rate", "clip_range")]
    overrides = [f"env={name}", *linear, "agent.learning_rate=0.01"]

    graph = rows_of(overrides, "compile=graph", num_episodes=8)
    plain = rows_of(overrides, "compile=off", num_episodes=8)

    moved = [float(row["policy/approx_kl"]) for row in graph]
    assert len(moved) == 8
    # An eighth of the learning rate at the end: the KL goes with its square.
    assert moved[-1] < 0.3 * max(moved)
    assert [row["policy/learning_rate"] for row in graph] == [
        row["policy/learning_rate"] for row in plain
    ]
    assert_close(graph[:3], plain[:3])
    still = rows_of([f"env={name}", "agent.learning_rate=1e-12"], "compile=graph")
    assert all(float(row["policy/approx_kl"]) < 1e-6 for row in still)


class Flags(Callback):
    """Writes down how exact products are while a run lasts."""

    def __init__(self) -> None:
        self.seen: set[tuple[bool, bool]] = set()

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self.seen.add(flags_of_now())


def flags_of_now() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["env=torch_cartpole", "experiment=camera_and_flag"])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_each_precision_trains_and_leaves_torch_as_it_was(
    precision: str, name: str, here: Path
) -> None:
    before, flags = flags_of_now(), Flags()
    size = {"n_envs": 8, "num_episodes": 3, "device": "cuda"}
    settings = [*small(**size), name, f"precision={precision}", "n_envs=8", "~callbacks.evaluation"]

    rows = read_rows(train(settings, callbacks={"flags": flags}).run_dir)

    assert len(rows) == 3
    assert all(math.isfinite(float(row["loss/value"])) for row in rows)
    assert flags.seen == {(precision != "float32",) * 2}
    assert flags_of_now() == before


@pytest.mark.gpu
@needs_gpu
def test_a_tensor_run_of_the_gpu_goes_on_on_the_cpu_and_back(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(["env=torch_cartpole", *small(device="cuda")]).run_dir
    train([f"resume={run}", "total_steps=128", "device=cpu"])
    result = train([f"resume={run}", "total_steps=192", "device=cuda"])

    assert result.env_steps == 192
    assert capsys.readouterr().out.count("in the middle of its episodes") == 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["off", "graph"])
def test_a_reward_that_is_no_number_stops_a_run_on_the_gpu(mode: str, here: Path) -> None:
    with pytest.raises(TrainingError, match=r"iteration 1: an env gave .* not finite"):
        rows_of(["env.target=tiny_torch_envs.Breaking"], f"compile={mode}")

    skipped = rows_of(
        ["env.target=tiny_torch_envs.Breaking", "agent.on_nonfinite=skip"], f"compile={mode}"
    )
    assert len(skipped) == 3
    assert all(float(row["loss/skipped_updates"]) > 0 for row in skipped)


@pytest.mark.parametrize(
    ("wanted", "device", "mode"),
    [
        ("auto", "cpu", "eager"),
        ("off", "cpu", "eager"),
        ("auto", "cuda", "graph"),
        ("graph", "cuda:1", "graph"),
        ("off", "cuda", "eager"),
        ("auto", "mps", "eager"),
    ],
)
def test_graphs_are_made_on_a_gpu_unless_they_are_off(wanted: str, device: str, mode: str) -> None:
    assert program_mode(wanted, torch.device(device)) == mode


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_graphs_where_there_are_none_are_refused(device: str) -> None:
    with pytest.raises(DeviceError, match=f"compile=graph: device={device} has no CUDA"):
        program_mode("graph", torch.device(device))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_the_precision_of_products_leaves_a_cpu_alone(precision: str) -> None:
    before = flags_of_now()

    with precision_of_products(precision, torch.device("cpu")):
        assert flags_of_now() == before

    assert flags_of_now() == before


def test_the_precision_of_products_is_restored_even_after_an_error() -> None:
    before = flags_of_now()

    def fail() -> None:
        with precision_of_products("tf32", torch.device("cuda")):  # settings, no device is asked
            assert flags_of_now() == (True, True)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert flags_of_now() == before


def test_a_low_precision_changes_nothing_on_the_cpu(here: Path) -> None:
    overrides = ["env=torch_cartpole", *small(), "~callbacks.evaluation"]

    exact, coarse = (
        read_rows(train([*overrides, f"precision={each}"]).run_dir) for each in ("float32", "bf16")
    )

    assert exact == coarse
