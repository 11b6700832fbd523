"""PPO on a GPU with a tensor env: CartPole at PureJaxRL's settings, compared with PureJaxRL.

    python benchmarks/gpu.py                              # learns, then times all sizes and modes
    python benchmarks/gpu.py --sizes 2048x32 --modes graph --precisions tf32
    python benchmarks/gpu.py --hidden 256-256 --modes graph --precisions tf32 --out /tmp/wide
    python benchmarks/gpu.py --draw                       # only the chart, from the JSON

The benchmark first trains a policy. It times nothing unless the mean episode length reaches 475.
Then it times each size (envs x steps) and mode. Whole iterations use the wall clock, and the host
reads the metrics each time; the parts use the device's clock. Results are medians over the rounds.
The two lower bounds are computed: operations over the rate of a large product, and bytes over the
bandwidth of a large copy. Both rates are measured here. JAX multiplies in tf32 by default; the
figures of PureJaxRL come from such a run on an H200, with the same networks and settings.
benchmarks/gpu_jax.py does the same in JAX on this machine; the chart includes its results.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.device import precision_of_products
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.ranks.world import World
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.graphs import MODES, Programs

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PUREJAXRL = {"2048x32": 18.0, "8192x32": 41.8, "32768x32": 68.5, "131072x16": 82.3}  # M steps/s
SOLVED = 475.0
MAX_ITERATIONS = 400  # of the training before the timing


def new_trainer(
    size: str,
    mode: str,
    precision: str,
    *,
    learning_rate: float,
    seed: int = 1,
    hidden: str = "64-64",
) -> PPOTrainer:
    """CartPole with two tanh networks, 4 epochs of 4 minibatches."""
    n_envs, n_steps = map(int, size.split("x"))
    config = PPOConfig(
        learning_rate=learning_rate, n_steps=n_steps, n_epochs=4, n_minibatches=4, entropy_coef=0.01
    )
    device = torch.device("cuda")
    env = TorchCartPole(n_envs, device=device, seed=seed)
    spaces = Spaces(env.single_observation_space, env.single_action_space)
    programs = Programs(device, mode)
    context = RunContext(device, seed, precision, programs, World())
    network = partial(MLP, hidden_sizes=[*map(int, hidden.split("-"))])
    agent = PPOAgent(spaces, network, config, context)
    collector = Collector(
        [env], env_seed=seed, noise_seed=stream_seed(seed, "actions"), programs=programs
    )
    return PPOTrainer(agent, collector, context)


def learn(precision: str, seed: int, hidden: str) -> dict[str, Any]:
    """Train until the mean episode length of an iteration is SOLVED, or for MAX_ITERATIONS."""
    trainer = new_trainer(
        "2048x32", "graph", precision, learning_rate=1e-3, seed=seed, hidden=hidden
    )
    begin, length, n_iterations = time.perf_counter(), 0.0, 0
    while n_iterations < MAX_ITERATIONS:
        metrics = trainer.train_episode_vectorized()
        n_iterations += 1
        length = metrics.get("rollout/episode_length", 0.0)
        if length >= SOLVED:
            break
    return {
        "precision": precision,
        "seed": seed,
        "mean_episode_length": length,
        "iterations": n_iterations,
        "env_steps": n_iterations * trainer.iteration_steps,
        "seconds": time.perf_counter() - begin,  # includes compilation
    }


def timed(trainer: PPOTrainer, rounds: int) -> dict[str, Any]:
    """Steps per second by the wall clock, and the time of each part of an iteration."""
    buffer = trainer.buffer
    n_steps = buffer.n_steps * buffer.n_envs
    begin = time.perf_counter()
    for _ in range(4):  # compiles and captures
        trainer.train_episode_vectorized()
    torch.cuda.synchronize()
    setup = time.perf_counter() - begin
    seconds = []
    for _ in range(rounds):
        begin, count = time.perf_counter(), 0
        while count < 3 or time.perf_counter() - begin < 0.25:
            trainer.train_episode_vectorized()
            count += 1
        seconds.append((time.perf_counter() - begin) / count)
    typical = statistics.median(seconds)
    return {
        "ms": typical * 1e3,
        "ms_range": [min(seconds) * 1e3, max(seconds) * 1e3],
        "million_steps_per_second": n_steps / typical / 1e6,
        "setup_seconds": setup,
        "parts_ms": parts(trainer, rounds),
    }


def parts(trainer: PPOTrainer, rounds: int) -> dict[str, float]:
    """Milliseconds of the rollout, its scores and GAE, and all epochs, by the device's clock."""
    config, rates = trainer.config, trainer.schedules.rates(trainer.progress)
    found: dict[str, list[float]] = {"rollout": [], "gae": [], "update": []}

    def finish() -> None:
        trainer.buffer.finish(gamma=config.gamma, lam=config.gae_lambda, scaler=None)

    def update() -> None:
        epochs = trainer._device_epochs
        if epochs is None:
            raise RuntimeError("this benchmark needs tensor envs")
        epochs.run(rates, trainer._generator)

    def collect() -> None:
        trainer.collector.collect(trainer.agent, trainer.buffer)

    for _ in range(rounds):
        found["rollout"].append(elapsed(collect))
        found["gae"].append(elapsed(finish))
        found["update"].append(elapsed(update))
        trainer.collector.commit(trainer.buffer.n_steps)
    return {name: statistics.median(times) for name, times in found.items()}


def elapsed(function: Callable[[], Any]) -> float:
    """Milliseconds on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def ceilings() -> dict[str, float]:
    """Peak rates of the device: bytes per second of a copy, operations per second of a product."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    left, right = (torch.randn(8192, 8192, device="cuda") for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    def multiply() -> None:
        torch.matmul(left, right)

    def median(function: Callable[[], None]) -> float:
        for _ in range(3):
            function()
        return statistics.median(elapsed(function) for _ in range(10)) / 1e3

    found = {"bytes_per_second": 2 * source.nbytes / median(copy)}
    for precision in ("float32", "tf32"):
        with precision_of_products(precision, torch.device("cuda")):
            found[f"{precision}_flops_per_second"] = 2 * 8192**3 / median(multiply)
    return found


def floor_ms(size: str, rate: dict[str, float], precision: str, hidden: str) -> dict[str, float]:
    """Lower bounds of the time of an iteration, by operations (products only) and by bytes."""
    n_envs, n_steps = map(int, size.split("x"))
    n = n_envs * n_steps
    units = [*map(int, hidden.split("-"))]
    layers = {"actor": [4, *units, 2], "critic": [4, *units, 1]}
    forward = {
        name: sum(n_in * n_out for n_in, n_out in pairwise(sizes)) for name, sizes in layers.items()
    }
    first = 2 * 4 * units[0]  # the observations need no gradient
    acting = forward["actor"] + sum(forward.values())  # once in the rollout, once for the scores
    learning = 3 * sum(forward.values()) - first
    operations = 2 * n * (acting + 4 * learning)
    # The rollout writes observation, final observation, action, reward and two flags once. The
    # scores read them again and write log_prob, value, advantage and target. Each epoch reads all.
    step = 16 + 16 + 8 + 4 + 2
    numbers = n * (step + (16 + 8 + 4 + 2) + 4 * 4 + 4 * (16 + 8 + 3 * 4 + 8))
    flops = rate["float32_flops_per_second" if precision == "float32" else "tf32_flops_per_second"]
    return {
        "gflop": operations / 1e9,
        "megabytes": numbers / 1e6,
        "ms_by_operations": 1e3 * operations / flops,
        "ms_by_bytes": 1e3 * numbers / rate["bytes_per_second"],
    }


def measure(args: argparse.Namespace, path: Path) -> None:
    """Measure everything and write ``path`` after each row, so a stop loses nothing."""
    found: dict[str, Any] = {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "hidden": args.hidden,
        "purejaxrl_million_steps_per_second": PUREJAXRL,
        "ceilings": ceilings(),
        "learned": [],
        "timed": [],
    }
    for precision in args.precisions:
        with precision_of_products(precision, torch.device("cuda")):
            learned = [learn(precision, seed, args.hidden) for seed in args.seeds]
        found["learned"] += learned
        length = min(each["mean_episode_length"] for each in learned)
        steps = " ".join(f"{each['env_steps'] / 1e6:.1f}M" for each in learned)
        print(f"learned in {precision}: mean episode length >= {length:.1f} after {steps} steps")
        if length < SOLVED:
            raise SystemExit(f"CartPole is not solved (episode length < {SOLVED}); no timing")
    print("| size | precision | mode | M steps/s | x PureJaxRL | ms | rollout / gae / update ms |"
          " floor ms | peak MB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for mode, precision, size in product(args.modes, args.precisions, args.sizes):
        if mode != "graph" and precision != args.precisions[0]:
            continue  # these modes differ in kernel launches, not in arithmetic
        found["timed"].append(
            row(size, mode, precision, args.rounds, found["ceilings"], args.hidden)
        )
        path.write_text(json.dumps(found, indent=1) + "\n")


def row(
    size: str,
    mode: str,
    precision: str,
    rounds: int,
    rate: dict[str, float],
    hidden: str = "64-64",
) -> dict[str, Any]:
    """Time one configuration and print its row of the table."""
    gc.collect()  # frees the previous trainer and its graphs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with precision_of_products(precision, torch.device("cuda")):
        trainer = new_trainer(size, mode, precision, learning_rate=2.5e-4, hidden=hidden)
        result = timed(trainer, rounds)
    floor = floor_ms(size, rate, precision, hidden)
    result |= {"size": size, "mode": mode, "precision": precision, "floor": floor}
    result["peak_megabytes"] = torch.cuda.max_memory_allocated() / 1e6
    result["backend"] = type(trainer.agent.backend).__name__
    speed = result["million_steps_per_second"]
    reference = PUREJAXRL.get(size) if hidden == "64-64" else None
    result["times_purejaxrl"] = speed / reference if reference else None
    cells = [
        f"{size} | {precision} | {mode} | {speed:.1f}",
        f"{speed / reference:.2f}" if reference else "-",
        f"{result['ms']:.2f}",
        " / ".join(f"{each:.2f}" for each in result["parts_ms"].values()),
        f"{max(floor['ms_by_operations'], floor['ms_by_bytes']):.2f}",
        f"{result['peak_megabytes']:.0f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    return result


def commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def draw(found: dict[str, Any], jax_rows: list[dict[str, Any]], path: Path) -> None:
    """Draw speed by size, one line per mode, and the time of each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = list(PUREJAXRL)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot(sizes, list(PUREJAXRL.values()), "k--o", label="PureJaxRL (tf32)")
    rows = [*found["timed"], *({**each, "mode": "JAX"} for each in jax_rows)]
    for mode, precision in sorted({(each["mode"], each["precision"]) for each in rows}):
        speeds = {
            each["size"]: each["million_steps_per_second"]
            for each in rows
            if (each["mode"], each["precision"]) == (mode, precision)
        }
        style = ":x" if mode == "JAX" else "-o"
        left.plot(sizes, [speeds.get(size) for size in sizes], style, label=f"{mode}, {precision}")
    left.set_yscale("log")
    left.set_ylabel("million env steps per second")
    left.set_xlabel("envs x steps of a rollout")
    left.legend(fontsize=8)
    best = [e for e in found["timed"] if e["mode"] == "graph" and e["precision"] == "tf32"]
    bottom = [0.0] * len(best)
    for part in ("rollout", "gae", "update"):
        heights = [each["parts_ms"][part] for each in best]
        right.bar([each["size"] for each in best], heights, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    floors = [max(e["floor"]["ms_by_operations"], e["floor"]["ms_by_bytes"]) for e in best]
    right.plot([e["size"] for e in best], floors, "k_", markersize=30, label="floor")
    right.set_ylabel("milliseconds per iteration (graph, tf32)")
    right.set_xlabel("envs x steps of a rollout")
    right.legend(fontsize=8, markerscale=0.4)
    figure.suptitle(f"PPO on CartPole, {found['device']}, {found['date']}", fontsize=11)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(PUREJAXRL))
    parser.add_argument("--modes", nargs="+", default=list(MODES[::-1]), choices=MODES)
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=["tf32", "float32", "bf16"],
        help="modes other than graph use only the first",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--hidden", default="64-64", help="units of the hidden layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="output folder")
    parser.add_argument("--draw", action="store_true", help="only the chart, from gpu.json")
    args = parser.parse_args()
    path = args.out / "gpu.json"
    if not args.draw:
        if not torch.cuda.is_available():
            raise SystemExit("torch found no GPU; use --draw for the chart only")
        args.out.mkdir(parents=True, exist_ok=True)
        measure(args, path)
    try:
        jax_path = args.out / "gpu_jax.json"
        jax_rows = json.loads(jax_path.read_text())["timed"] if jax_path.exists() else []
        draw(json.loads(path.read_text()), jax_rows, args.out / "gpu.png")
    except ImportError as error:
        print(f"no chart: {error}; run python -m pip install matplotlib, then use --draw")


if __name__ == "__main__":
    main()
