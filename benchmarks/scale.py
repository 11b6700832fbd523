"""Several ranks: speed of 1 to 8 ranks with the same number of envs each, and a model for more.

    python benchmarks/scale.py
    python benchmarks/scale.py --ranks 1 2 4 8 --agent ppo --env cartpole --n-envs 8 --rounds 3
    python benchmarks/scale.py --ranks 1 2 --link 25:30   # a network of 25 Gb/s, 30 us per message

Each number of ranks is a launch of its own, with one torch thread per rank. A rank has its own
cores if there are enough: the same number of cores for every number of ranks. The launches take
turns, round by round, so a slow phase of the machine affects all of them. Speed is that of the
training loop, without imports and setup.

A launch trains twice on the same cores: all ranks together, and each rank by itself at the same
time as the others ("apart"). Three efficiencies follow:

    of the slowest:   together(n) / (n * min(apart))   what sums and splitting minibatches cost
    of n apart:       together(n) / sum(apart)         and waiting for the slowest core
    of one rank:      together(n) / (n * rate(1))      and what the cores of the machine share

Cores that work at once share caches, memory and clock rates, and on a virtual machine some are busy
with other programs.

The ranks of one machine add their gradients in shared memory, so the prediction for them is

    efficiency(n) = t / (t + the measured time of all sums in one iteration)

where t is the time of an iteration of one rank. It ignores that ranks wait for the slowest one, and
the work of splitting minibatches. Several machines use Gloo. One all-reduce of b bytes sends
2 (n - 1) messages in a row (Gloo's ring):

    T(n, b) = 2 (n - 1) * latency + 2 (n - 1) / n * b / bandwidth

Latency and bandwidth of this machine come from two ranks; with more ranks the table shows whether
the formula holds. Compare figures within one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
NODES = (2, 4, 8, 16, 32, 64)
LINKS = ("1:100", "10:50", "100:15")  # typical of cloud machines; give your own by --link
SMALL = 8  # bytes of an all-reduce without a gradient
LARGE = 4_000_000
N_SKIPPED = 2  # first iterations of a run
RESULT = "scale result: "


class Link(NamedTuple):
    """What connects two ranks."""

    latency: float  # seconds per message
    bandwidth: float  # bytes per second

    def all_reduce_seconds(self, n_ranks: int, n_bytes: float) -> float:
        """The model of one all-reduce."""
        transfer = n_bytes / n_ranks / self.bandwidth
        return 2 * (n_ranks - 1) * (self.latency + transfer)


def predicted(link: Link, n_ranks: int, alone: float, sizes: Sequence[float]) -> float:
    """The efficiency of ``n_ranks``; ``alone``: seconds per iteration of one rank."""
    return alone / (alone + sum(link.all_reduce_seconds(n_ranks, each) for each in sizes))


def overrides_of(task: dict[str, Any], folder: str) -> list[str]:
    return [
        f"agent={task['agent']}",
        f"env={task['env']}",
        f"n_envs={task['n_envs']}",
        f"total_steps={task['steps']}",
        f"run_root={folder}",
        "vec_env=serial",
        "device=cpu",
        "logger=none",
        "~callbacks.evaluation",
        "callbacks.checkpoints.every_steps=1e12",
        *task["overrides"],
    ]


def train_both(task: dict[str, Any]) -> dict[str, Any]:
    """One training of all ranks together, and one of each rank apart."""
    import torch

    from ml_pipeline.ranks.world import join_world

    def meet(value: float = 0.0) -> list[float]:
        """Wait for the other ranks; returns the values of all."""
        with join_world(torch.device("cpu"), timeout_seconds=300.0) as world:
            return world.gathered(value)

    together: dict[str, Any] = {}
    apart: list[float] = []
    for is_apart in (task["apart_first"], not task["apart_first"]):
        meet()
        if not is_apart:
            together = train(task)
            continue
        size = os.environ.get("WORLD_SIZE", "1")
        os.environ["WORLD_SIZE"] = "1"  # this rank is a process of its own
        alone = train({**task, "steps": task["steps"] // int(size)})
        os.environ["WORLD_SIZE"] = size
        apart = meet(alone["rate"])
    return {**together, "apart": apart}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One training; returns its speed and the bytes of the all-reduces of an iteration."""
    import torch
    import torch.distributed as dist

    from ml_pipeline.assembly.run import train as train_run
    from ml_pipeline.ranks.rendezvous import launched_rank
    from ml_pipeline.ranks.shared_memory import RankMemory
    from ml_pipeline.runs.loggers import read_metrics
    from ml_pipeline.training.contracts import Callback

    torch.set_num_threads(1)
    sizes: list[int] = []
    all_reduce, parts = dist.all_reduce, RankMemory.parts

    def counted_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    def counted_parts(memory: RankMemory, values: Any) -> Any:
        sizes.append(values.nbytes)
        return parts(memory, values)

    class Marks(Callback):
        """Notes how many calls were made before the end of each iteration."""

        def __init__(self) -> None:
            self.places = [0]

        def on_iteration_end(self, loop: Any, metrics: Any) -> None:
            self.places.append(len(sizes))

    marks = Marks()
    dist.all_reduce = counted_reduce
    setattr(RankMemory, "parts", counted_parts)  # noqa: B010
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = train_run(overrides_of(task, folder), callbacks={"marks": marks})
            if launched_rank() != 0:
                return {}
            rows = read_metrics(result.run_dir / "metrics.csv")
    finally:
        dist.all_reduce = all_reduce
        setattr(RankMemory, "parts", parts)  # noqa: B010
    seconds = [float(row["time/iteration_seconds"]) for row in rows][N_SKIPPED:]
    if not seconds:
        raise SystemExit(f"--seconds: at least {N_SKIPPED + 1} iterations are needed; raise it")
    return {
        "rate": result.env_steps / len(rows) * len(seconds) / sum(seconds),
        "iteration_seconds": statistics.mean(seconds),
        "sizes": sizes[marks.places[-2] : marks.places[-1]],  # of the last iteration
    }


def time_sums(task: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a sum by its bytes: in shared memory, and by Gloo."""
    import torch
    import torch.distributed as dist

    from ml_pipeline.ranks.world import join_world

    torch.set_num_threads(1)

    def median(add: Callable[[torch.Tensor], Any], n_bytes: int) -> float:
        tensor, durations = torch.zeros(n_bytes // 4), []
        for _ in range(task["n_times"] if n_bytes < LARGE else 20):
            begin = time.perf_counter()
            add(tensor)
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations)

    with join_world(torch.device("cpu"), timeout_seconds=60.0) as world:
        return {
            "memory": {str(each): median(world.sum, each) for each in task["sizes"]},
            "gloo": {str(each): median(dist.all_reduce, each) for each in task["sizes"]},
        }


def sibling_cores(n_cores: int = 2) -> list[int]:
    """The cores of this process, hardware threads of one core next to each other.

    If a rank has one thread only, those of one core are far apart.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []

    def place(core: int) -> tuple[int, int, int]:
        file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            first = int(file.read_text().replace("-", ",").split(",")[0])
        except OSError:
            first = core
        return (core != first if n_cores == 1 else 0), first, core

    return sorted(os.sched_getaffinity(0), key=place)


def pin(n_cores: int) -> None:
    """Give this rank its own cores; 0: none are reserved."""
    if n_cores:
        first = int(os.environ.get("LOCAL_RANK", "0")) * n_cores
        os.sched_setaffinity(0, sibling_cores(n_cores)[first : first + n_cores])


def launch(n_ranks: int, task: dict[str, Any], limit: float) -> dict[str, Any]:
    """Run a task on ``n_ranks`` of torchrun; 0: in plain Python. Returns what rank 0 found."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"]
    command = [sys.executable, *(launcher if n_ranks else []), __file__]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*command, "--worker", json.dumps(task)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException:  # also Ctrl-C: the ranks must not outlive this program
        os.killpg(process.pid, signal.SIGKILL)
        raise
    for line in output.splitlines():
        if process.returncode == 0 and line.startswith(RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
            return found
    raise SystemExit(f"{n_ranks} ranks: failed:\n{output[-3000:]}")


def rounds_of(options: argparse.Namespace, task: dict[str, Any]) -> dict[int, list[Any]]:
    """The results of every number of ranks, round by round; 0 is plain Python."""
    limit = 120.0 + 20.0 * options.seconds
    first = launch(0, {**task, "steps": options.calibration_steps}, limit)
    steps = int(first["rate"] * options.seconds)
    results: dict[int, list[Any]] = {each: [] for each in (0, *options.ranks)}
    for number in range(options.rounds):
        for n_ranks, found in results.items():
            sized = {**task, "steps": steps * max(n_ranks, 1), "apart_first": number % 2 == 1}
            if n_ranks > 1:
                sized["kind"] = "train both"
            found.append(launch(n_ranks, sized, limit))
            label = f"{n_ranks} ranks" if n_ranks else "plain Python"
            text = f"round {number + 1}: {label}: {found[-1]['rate']:,.0f} env steps/s"
            if n_ranks > 1:
                text += ", apart " + " ".join(f"{each:,.0f}" for each in found[-1]["apart"])
            print(text, file=sys.stderr)
    return results


def show_ranks(results: dict[int, list[Any]], times: dict[int, Any], link: Link | None) -> None:
    rates = {n: [run["rate"] for run in runs] for n, runs in results.items()}
    if 1 in rates:
        pairs = zip(rates[1], rates[0], strict=True)
        ratio = statistics.median(one / plain for one, plain in pairs)
        plain = statistics.median(rates[0])
        print(f"\nplain Python: {plain:,.0f} env steps/s; one rank of torchrun: {ratio:.3f} of it")
    base = 1 if 1 in rates else 0
    alone = statistics.median(run["iteration_seconds"] for run in results[base])
    print(
        "\n| ranks | env steps/s | of the slowest | of n apart | of one rank | predicted | sum "
        "| Gloo | Gloo by the formula |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for n_ranks in (each for each in rates if each):
        pairs = zip(rates[n_ranks], rates[base], strict=True)
        of_one = spread([rate / one / n_ranks for rate, one in pairs])
        of_slowest = of_apart = ""
        cells = [""] * 4
        if n_ranks > 1:
            runs = results[n_ranks]
            of_slowest = spread([run["rate"] / n_ranks / min(run["apart"]) for run in runs])
            of_apart = spread([run["rate"] / sum(run["apart"]) for run in runs])
        if n_ranks > 1 and link is not None:
            sizes = results[n_ranks][0]["sizes"]
            largest, measured = rounded(max(sizes)), times[n_ranks]
            cells = [
                f"{alone / (alone + seconds_of_sums(sizes, measured['memory'])):.0%}",
                f"{1e6 * measured['memory'][largest]:,.0f} us",
                f"{1e6 * measured['gloo'][largest]:,.0f} us",
                f"{1e6 * link.all_reduce_seconds(n_ranks, int(largest)):,.0f} us",
            ]
        rate = statistics.median(rates[n_ranks])
        cells = [of_slowest, of_apart, of_one, *cells]
        print(f"| {n_ranks} | {rate:,.0f} | {' | '.join(cells)} |")


def spread(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})"


def rounded(n_bytes: int) -> str:
    """The key of a measured size: whole floats."""
    return str(n_bytes // 4 * 4)


def seconds_of_sums(sizes: Sequence[int], measured: dict[str, float]) -> float:
    """Of one iteration; every sum without a gradient counts as a small one."""
    n_large = sum(each == max(sizes) for each in sizes)
    return n_large * measured[rounded(max(sizes))] + (len(sizes) - n_large) * measured[str(SMALL)]


def show_model(alone: float, sizes: Sequence[int], links: Sequence[str]) -> None:
    """Predictions for one rank per machine."""
    n_gradients = sum(each == max(sizes) for each in sizes)
    n_parameters = max(sizes) // 4 - 1
    print(
        f"\nOne iteration of one rank: {1e3 * alone:,.1f} ms; {len(sizes)} all-reduces, "
        f"{n_gradients} of them with a gradient of {n_parameters:,} parameters: "
        f"4 * ({n_parameters:,} + 1) = {max(sizes):,} bytes"
    )
    print(f"\n| network, predicted | {' | '.join(f'{each} machines' for each in NODES)} |")
    print(f"|---|{'---|' * len(NODES)}")
    for text in links:
        link = parse_link(text)
        shares = [f"{predicted(link, each, alone, sizes):.0%}" for each in NODES]
        speed, latency = text.split(":")
        print(f"| {speed} Gb/s, {latency} us per message | {' | '.join(shares)} |")


def parse_link(text: str) -> Link:
    """A link from 'Gb/s:microseconds per message'."""
    try:
        speed, latency = (float(part) for part in text.split(":"))
    except ValueError:
        raise SystemExit(f"--link={text}: must be Gb/s:microseconds, such as 10:50") from None
    return Link(latency * 1e-6, speed * 1e9 / 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--agent", default="ppo", help="a preset of conf/agent")
    parser.add_argument("--env", default="cartpole", help="a preset of conf/env")
    parser.add_argument("--n-envs", type=int, default=8, help="of each rank")
    parser.add_argument("--seconds", type=float, default=6.0, help="of one training on one rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calibration-steps", type=int, default=20_000)
    parser.add_argument("--link", nargs="+", default=list(LINKS), metavar="GBPS:MICROSECONDS")
    parser.add_argument("--overrides", nargs="*", default=[], help="more settings of the run")
    options = parser.parse_args()
    if options.worker:
        task = json.loads(options.worker)
        pin(task["n_cores"])
        kinds = {"train": train, "train both": train_both, "time": time_sums}
        found = kinds[task["kind"]](task)
        if os.environ.get("RANK", "0") == "0":
            print(RESULT + json.dumps(found), flush=True)
        return
    for text in options.link:
        parse_link(text)
    cores, most = len(sibling_cores()), max(options.ranks)
    n_cores = cores // most
    how = f"{n_cores} cores per rank" if n_cores else "ranks share cores: not comparable"
    load = os.getloadavg()[0]
    print(f"{date.today()}, {platform.machine()}, {cores} cores, load {load:.1f} before; {how}")
    print(f"agent={options.agent} env={options.env} n_envs={options.n_envs} per rank")
    task = {"kind": "train", "n_cores": n_cores, "agent": options.agent, "env": options.env}
    task |= {"n_envs": options.n_envs, "overrides": options.overrides}
    results = rounds_of(options, task)
    several = [each for each in options.ranks if each > 1]
    times: dict[int, Any] = {}
    link = None
    if several:
        largest = max(results[several[0]][0]["sizes"]) // 4 * 4
        sizes = [SMALL, largest, LARGE]
        timing = {"kind": "time", "n_cores": n_cores, "sizes": sizes, "n_times": 500}
        times = {each: launch(each, timing, 120.0) for each in {2, *several}}
        gloo = times[2]["gloo"]
        latency = gloo[str(SMALL)] / 2
        link = Link(latency, LARGE / (gloo[str(LARGE)] - 2 * latency))
        print(
            f"\nGloo on this machine: {1e6 * link.latency:,.0f} us per message, "
            f"{link.bandwidth / 1e9:.2f} GB/s"
        )
    show_ranks(results, times, link)
    if several:
        base = results[1 if 1 in results else 0]
        alone = statistics.median(run["iteration_seconds"] for run in base)
        show_model(alone, results[several[0]][0]["sizes"], options.link)


if __name__ == "__main__":
    main()
