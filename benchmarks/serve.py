"""serve compared with a plain FastAPI app: requests per second, median and p99 latency.

    python benchmarks/serve.py --connections 1 16 64 200 --rounds 5
    python benchmarks/serve.py --format onnx --seconds 5

Both servers run the same CartPole policy, each in its own process. The client is a third process:
it keeps one request in flight per connection. The servers take turns in every round. The table
shows medians over the rounds, and medians of the ratios within a round; above 1 serve is better.
The peer is the app a user would write: one async function, a pydantic body, no batching. It runs
on uvicorn without an access log. Without fastapi (pip install "ml_pipeline[benchmarks]") the
benchmark measures serve alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from raw_file import add_json_option, write_raw

WARM_UP_SECONDS = 0.5
OBS = [0.01, -0.02, 0.03, 0.04]


class Load(NamedTuple):
    """What the clients saw of one server in one round."""

    per_second: float
    p50_ms: float
    p99_ms: float


def serve_peer(file: str) -> None:
    """The FastAPI app; prints its URL like ``serve``."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import create_model

    from ml_pipeline.deploy.exported import ExportedPolicy

    policy = ExportedPolicy.load(file)
    app = FastAPI()
    request_type: Any = create_model("Request", obs=(list[float], ...))

    async def predict(request: Any) -> dict[str, Any]:
        outputs = policy.run({"obs": np.array([request.obs], dtype=np.float32)})
        return {name: each[0].tolist() for name, each in outputs.items()}

    predict.__annotations__ = {"request": request_type}
    app.post("/predict")(predict)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    print(f"fastapi on http://127.0.0.1:{port}", flush=True)
    uvicorn.run(app, port=port, access_log=False, log_level="warning")


@contextmanager
def running(command: list[str]) -> Iterator[int]:
    """The port of a server, which ends with the block."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "127.0.0.1:" not in line:
            raise SystemExit(f"{' '.join(command)} did not start")
        port = int(line.split("127.0.0.1:")[1].split()[0])
        _wait_for(port)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(port: int) -> None:
    for _ in range(200):
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise SystemExit(f"no server on port {port}")


def load(port: int, n_connections: int, seconds: float) -> Load:
    """One request in flight on each connection for ``seconds``, once all have had an answer."""
    body = json.dumps({"obs": OBS}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    clients = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(n_connections)]
    selector = selectors.DefaultSelector()
    answers = dict.fromkeys(clients, b"")
    sent = {}
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(client, selectors.EVENT_READ, client)
        sent[client] = time.perf_counter()
        client.sendall(request)
    silent = set(clients)
    latencies: list[float] = []
    begin = math.inf
    end = math.inf
    warm = time.perf_counter() + WARM_UP_SECONDS
    while (now := time.perf_counter()) < end:
        if begin == math.inf and not silent and now > warm:
            begin, end = now, now + seconds
        for key, _ in selector.select(1.0):
            client = key.data
            answers[client] += client.recv(65_536)
            if not _is_complete(answers[client]):
                continue
            now = time.perf_counter()
            silent.discard(client)
            if sent[client] >= begin:
                latencies.append(now - sent[client])
            answers[client], sent[client] = b"", now
            client.sendall(request)
    for client in clients:
        client.close()
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    return Load(len(latencies) / seconds, float(p50), float(p99))


def _is_complete(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answered {answer.decode()}")
    size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return len(body) == int(size)


def exported(folder: str, kind: str) -> str:
    """The file of a CartPole policy, trained for a moment."""
    from ml_pipeline.__main__ import main as command
    from ml_pipeline.assembly.run import train

    os.chdir(folder)
    quick = ["vec_env=serial", "total_steps=2048", "~callbacks.evaluation", "logger=[]"]
    run = train(["env=cartpole", "device=cpu", *quick]).run_dir.absolute()
    assert command(["export", str(run), "--format", kind]) == 0
    return str(run / f"policy.{kind}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 16, 64, 200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--format", choices=["pt2", "onnx"], default="pt2")
    parser.add_argument("--policy", help="a file of serve for CartPole; default: trains one")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # this process is the FastAPI app
    add_json_option(parser)
    args = parser.parse_args()
    if args.peer:
        serve_peer(args.peer)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = args.policy or exported(folder, args.format)
        commands = {"serve": ["-m", "ml_pipeline", "serve", file, "--port", "0"]}
        if importlib.util.find_spec("fastapi") is None:
            print('no peer: pip install "ml_pipeline[benchmarks]"')
        else:
            commands["fastapi"] = [str(Path(__file__).resolve()), "--peer", file]
        ports = {name: stack.enter_context(running(each)) for name, each in commands.items()}
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(f"{date.today()}, {machine}, {Path(file).suffix} policy, {args.rounds} rounds")
        report(ports, args)


def report(ports: dict[str, int], args: argparse.Namespace) -> None:
    print("| connections | server | requests/s | p50 ms | p99 ms | ratio (range) | ratio of p99 |")
    print("|---|---|---|---|---|---|---|")
    raw = {}
    for n in args.connections:
        loads: dict[str, list[Load]] = {name: [] for name in ports}
        for turn in range(args.rounds):
            for name in list(ports)[:: 1 if turn % 2 else -1]:
                loads[name].append(load(ports[name], n, args.seconds))
        for name in ports:
            per_second, p50, p99 = map(statistics.median, zip(*loads[name], strict=True))
            row = f"| {n} | {name} | {per_second:,.0f} | {p50:.2f} | {p99:.2f} |"
            if name == "serve" and "fastapi" in loads:
                pairs = list(zip(loads["serve"], loads["fastapi"], strict=True))
                rates = [ours.per_second / peer.per_second for ours, peer in pairs]
                tails = [peer.p99_ms / ours.p99_ms for ours, peer in pairs]
                span = f"{min(rates):.2f}-{max(rates):.2f}"
                row += f" {statistics.median(rates):.2f}x ({span}) "
                row += f"| {statistics.median(tails):.2f}x |"
            else:
                row += " | |"
            print(row, flush=True)
        raw[n] = {name: [each._asdict() for each in rounds] for name, rounds in loads.items()}
    write_raw(args.json, raw)


if __name__ == "__main__":
    main()
