"""A served policy: correct answers to many clients, reasons for bad input, a clean shutdown."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, TESTS, small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.load import load_agent
from ml_pipeline.assembly.run import train
from ml_pipeline.deploy import export
from ml_pipeline.deploy.batcher import Batcher
from ml_pipeline.deploy.exported import Arrays, ExportedPolicy
from ml_pipeline.deploy.request import Query, RefusedError, RequestReader
from ml_pipeline.deploy.serve import Limits, PolicyServer

pytestmark = pytest.mark.xdist_group("serve")  # the policies are trained once

OBS = [0.1, -0.2, 0.3, -0.4]

POLICIES = {
    "cartpole": ["env=cartpole"],
    "mixed": ["env.target=tiny_envs.MixedEnv"],
    "masked": ["env.target=tiny_envs.ForbiddingEnv", "agent.action_mask=info"],
    "lstm": ["env=cartpole", "network=lstm"],
    "parts": ["env=lanes"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Exported policies in their run folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("served"))
        patch.setattr(export, "N_OBSERVATIONS", 100)  # test_export.py checks exports
        files = {}
        for name, overrides in POLICIES.items():
            run = train([*small(), "~callbacks.evaluation", *overrides]).run_dir.absolute()
            assert main(["export", str(run)]) == 0
            files[name] = run / "policy.pt2"
        yield files


@contextmanager
def serving(policy: ExportedPolicy, **options: Any) -> Iterator[PolicyServer]:
    server = PolicyServer(policy, host="127.0.0.1", port=0, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(files: dict[str, Path]) -> Iterator[PolicyServer]:
    policy = ExportedPolicy.load(files["cartpole"])
    with serving(policy, allow_hosts=["Robot.lan"]) as server:
        yield server


def ask(
    port: int, path: str, body: Any = None, *, method: str | None = None, **headers: str
) -> tuple[int, Any]:
    """Status and answer; ``body`` is sent as JSON, bytes are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def test_health_and_metadata_are_served(server: PolicyServer) -> None:
    assert ask(server.port, "/health") == (200, {"status": "ok"})

    status, metadata = ask(server.port, "/metadata")

    assert status == 200
    assert metadata["env_name"] == "CartPole-v1"
    assert metadata["observation_space"]["high"][1] == "inf"  # JSON has no number for it


def test_answers_to_one_observation_and_to_a_batch_equal_the_live_policy(
    server: PolicyServer, files: dict[str, Path]
) -> None:
    agent = load_agent(files["cartpole"].parent).agent
    batch = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    _, one = ask(server.port, "/predict", {"obs": batch[0].tolist()})
    _, many = ask(server.port, "/predict", {"obs": batch.tolist()})

    expected = agent.act_batch(batch, True).tolist()
    assert one["action"] == expected[0]
    assert many["action"] == expected
    logits = agent.backend.outputs(agent.inputs(agent.reader.read(batch)))[0].numpy()
    assert np.allclose(many["policy"], logits, atol=1e-5)
    assert np.allclose(one["policy"], logits[0], atol=1e-5)


def test_dict_observation_has_one_entry_per_leaf(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["mixed"])
    policy.observation_space.seed(0)
    obs: Any = policy.observation_space.sample()
    leaves = {name: np.asarray(leaf).tolist() for name, leaf in obs.items()}
    refused = [
        ({**leaves, "choice": 3}, "Discrete(3)"),
        ({**leaves, "image": (np.asarray(obs["image"]) + 0.5).tolist()}, "not a finite uint8"),
        (
            {"choice": [], "image": np.zeros((1, 6, 6, 1)).tolist(), "vector": [[0, 0, 0]]},
            "obs['image'] is a batch of 1, but obs['choice'] is a batch of 0",
        ),
        ({name: leaves[name] for name in ("choice", "image")}, "obs['vector'] is missing"),
        ([1.0], "obs must be an object with the keys choice, image, vector"),
    ]
    with serving(policy) as server:
        status, answer = ask(server.port, "/predict", {"obs": leaves})
        errors = [ask(server.port, "/predict", {"obs": bad}) for bad, _ in refused]

    batch = {name: np.asarray(leaf)[None] for name, leaf in obs.items()}
    assert (status, answer["action"]) == (200, policy.act_batch(batch)[0].tolist())
    assert [status for status, _ in errors] == [400] * len(refused)
    for (_, answer), (_, words) in zip(errors, refused, strict=True):
        assert words in answer["error"]


def test_mask_is_respected_and_required(files: dict[str, Path]) -> None:
    obs = [0.1, 0.2, 0.3, 0.4]
    with serving(ExportedPolicy.load(files["masked"])) as server:
        for only in range(4):
            mask = [int(only == each) for each in range(4)]
            status, answer = ask(server.port, "/predict", {"obs": obs, "action_mask": mask})
            assert (status, answer["action"]) == (200, only)
        for more, words in (
            ({}, "action_mask is missing; got the keys ['obs']"),
            ({"action_mask": [0, 0, 0, 0]}, "allows no action"),
            ({"action_mask": [1, 1]}, "action_mask has shape [2]; it must be bool of shape [4]"),
            ({"action_mask": [2, 1, 0, 0]}, "action_mask contains 2, which is not a finite bool"),
            ({"action_mask": [[1] * 4]}, "action_mask is a batch of 1, but obs is not a batch"),
        ):
            status, answer = ask(server.port, "/predict", {"obs": obs, **more})
            assert status == 400
            assert words in answer["error"]


def test_action_of_several_parts_is_an_object(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["parts"])
    mask = [0, 0, 1, 0]
    with serving(policy) as server:
        _, one = ask(server.port, "/predict", {"obs": OBS, "action_mask": mask})
        _, many = ask(server.port, "/predict", {"obs": [OBS] * 2, "action_mask": [mask] * 2})

    expected: Any = policy.act_batch(np.array([OBS]), action_mask=np.array([mask], dtype=bool))
    assert one["action"] == {"lane": 2, "speed": pytest.approx(expected["speed"][0].tolist())}
    assert many["action"]["lane"] == [2, 2]
    assert len(one["policy"]) == 4 + 1


def test_recurrent_state_passes_from_answer_to_request(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["lstm"])
    memory = policy.new_memory(1)
    assert memory is not None
    body: dict[str, Any] = {"obs": OBS}
    with serving(policy) as server:
        for _ in range(3):
            action = policy.act_batch(np.array([OBS], dtype=np.float32), memory=memory)
            status, answer = ask(server.port, "/predict", body)
            assert (status, answer["action"]) == (200, action[0])
            assert np.allclose(answer["state"], memory[0], atol=1e-6)
            body = {"obs": OBS, "state": answer["state"]}
        status, answer = ask(server.port, "/predict", {"obs": OBS, "state": [0.0]})

    assert status == 400
    assert "state has shape [1]; it must be float32 of shape [128]" in answer["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not valid JSON"),
        (b"\xff\xfe", "the body is not valid JSON"),
        (b"[" * 10_000, "the body is not valid JSON"),
        (b"", "the body is not valid JSON"),
        ([1, 2], "the body must be an object with the keys obs"),
        ({}, "obs is missing"),
        ({"observation": OBS}, "the body has the unknown key 'observation'; known keys: obs"),
        ({"obs": OBS, "state": [1]}, "the body has the unknown key 'state'; known keys: obs"),
        ({"obs": OBS[:3]}, "obs has shape [3]; it must be float32 of shape [4]"),
        ({"obs": [OBS, OBS[:3]]}, "obs is ragged; it must be float32 of shape [4]"),
        ({"obs": [[OBS]]}, "obs has shape [1, 1, 4]"),
        ({"obs": 1.0}, "obs has shape []"),
        ({"obs": []}, "obs has shape [0]; it must be float32 of shape [4]"),
        ({"obs": [OBS] * 65}, "obs is a batch of 65; send between 1 and 64"),
        ({"obs": ["a", "b", "c", "d"]}, "obs contains values that are not numbers"),
        ({"obs": [None] * 4}, "obs contains values that are not numbers"),
        ({"obs": {"x": 1}}, "obs contains values that are not numbers"),
        ({"obs": [10**400, 0, 0, 0]}, "obs contains values that are not numbers"),
        (b'{"obs": [NaN, 0, 0, 0]}', "the body contains NaN; send finite numbers"),
        (b'{"obs": [0, -Infinity, 0, 0]}', "the body contains -Infinity"),
        (b'{"obs": [1e999, 0, 0, 0]}', "obs contains inf, which is not a finite float32"),
        (b'{"obs": [1e300, 0, 0, 0]}', "obs contains 1e+300, which is not a finite float32"),
    ],
)
def test_bad_input_gets_a_400_with_a_reason(server: PolicyServer, body: Any, words: str) -> None:
    status, answer = ask(server.port, "/predict", body)

    assert status == 400
    assert words in answer["error"]
    assert ask(server.port, "/predict", {"obs": OBS})[0] == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nowhere", "GET", 404),
        ("/nowhere", "POST", 404),
        ("/predict", "GET", 405),
        ("/health", "POST", 405),
        ("/metadata", "DELETE", 405),
        ("/predict", "PUT", 405),
        ("/predict", "BREW", 501),
    ],
)
def test_wrong_path_or_method_is_an_http_error(
    server: PolicyServer, path: str, method: str, status: int
) -> None:
    got, answer = ask(server.port, path, method=method)

    assert got == status
    assert answer["error"]


def exchange(port: int, data: bytes, *, end: bool = False) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(data)
        if end:
            client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


def test_body_larger_than_any_valid_request_is_413(server: PolicyServer) -> None:
    largest = {"obs": [[-1.2345678901234567e-123] * 4] * 64}
    for headers in ({}, {"Expect": "100-continue"}):
        status, answer = ask(server.port, "/predict", b" " * 16_000_000, **headers)

        assert status == 413
        assert answer["error"].startswith("the body has 16000000 bytes; the limit for this policy")
    assert ask(server.port, "/predict", json.dumps(largest, indent=1).encode())[0] == 200


def test_body_without_a_length_or_cut_short_is_refused(server: PolicyServer) -> None:
    for head, status in (
        ("Transfer-Encoding: chunked\r\n", b"411"),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"400"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", b"400"),
        ("Content-Length: many\r\n", b"400"),
        ("Content-Length: 2\r\nContent-Length: 3\r\n", b"400"),
        ("Content-Length: 99\r\n", b"400"),
    ):
        start = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n"

        answer = exchange(server.port, f"{start}2\r\n{{}}\r\n0\r\n\r\n".encode(), end=True)

        assert answer.split()[1] == status, answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_client_that_ends_its_side_still_gets_the_answer(server: PolicyServer) -> None:
    body = json.dumps({"obs": OBS}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    answer = exchange(server.port, head.encode() + body, end=True)

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"action"' in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"Host: localhost:1\r\n", b"200"),
        (b"Host: LOCALHOST\r\n", b"200"),
        (b"Host: 127.0.0.1\r\n", b"200"),
        (b"Host: [::1]:8321\r\n", b"200"),
        (b"Host: robot.lan:8321\r\n", b"200"),  # --allow-host
        (b"Host: evil.example\r\n", b"421"),
        (b"Host: localhost.evil.example\r\n", b"421"),
        (b"Host: localhost@evil.example\r\n", b"421"),
        (b"Host: [\r\n", b"421"),
        (b"Host: \r\n", b"421"),
        (b"", b"400"),
        (b"Host: localhost\r\nHost: evil.example\r\n", b"400"),
    ],
)
def test_only_names_of_the_server_are_answered(
    server: PolicyServer, host: bytes, status: bytes
) -> None:
    head = b"GET /health HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n"

    assert exchange(server.port, head).split()[1] == status


def test_slow_or_silent_client_is_closed_at_the_deadline(files: dict[str, Path]) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    limits = Limits(read_seconds=0.5)
    requests = [
        b"",
        head,
        head + b"Content-Length: 9\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    policy = ExportedPolicy.load(files["cartpole"])
    with serving(policy, limits=limits) as server, ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda data: exchange(server.port, data), requests)
        silent, no_end_of_headers, no_body, idle = answers

    assert silent == b""
    for answer in (no_end_of_headers, no_body):
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the request did not arrive within 0.5 s" in answer
    assert idle.count(b"HTTP/1.1") == 1
    assert idle.startswith(b"HTTP/1.1 200 ")


def test_endless_headers_are_refused(server: PolicyServer) -> None:
    answer = exchange(server.port, b"GET /health HTTP/1.1\r\nX: " + b"x" * 1_000_000)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert ask(server.port, "/health")[0] == 200


def test_connections_beyond_the_limit_are_refused(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["cartpole"])
    with serving(policy, limits=Limits(connections=2)) as server:
        kept = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(2)]
        for each in kept:
            each.request("GET", "/health")
            assert each.getresponse().read() == b'{"status": "ok"}\n'
        refused = exchange(server.port, b"")
        for each in kept:
            each.close()
        while (status := exchange(server.port, b"", end=True)) != b"":
            assert status.startswith(b"HTTP/1.1 503 ")  # the server has yet to notice

    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"2 connections are open; try again later" in refused


def test_connection_stays_open_after_a_refusal(server: PolicyServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for body, status in (("{}", 400), (json.dumps({"obs": OBS}), 200), ("[", 400)):
        connection.request("POST", "/predict", body)
        response = connection.getresponse()
        response.read()

        assert response.status == status
        assert response.getheader("Connection") is None
    connection.close()


def test_many_clients_each_get_their_own_answer(
    server: PolicyServer, files: dict[str, Path]
) -> None:
    agent = load_agent(files["cartpole"].parent).agent
    batch = np.random.default_rng(1).normal(size=(120, 4)).astype(np.float32)
    logits = agent.backend.outputs(agent.inputs(agent.reader.read(batch)))[0].numpy()

    def client(first: int) -> list[Any]:
        sizes = {0: 1, 1: 3, 2: 6}[first // 10 % 3]
        answers = []
        for row in range(first, first + 10, sizes):
            rows = batch[row : min(row + sizes, first + 10)].tolist()
            answers += ask(server.port, "/predict", {"obs": rows})[1]["policy"]
        return answers

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(client, range(0, 120, 10)))

    assert np.allclose(np.concatenate(answers), logits, atol=1e-5)


def counted(policy: ExportedPolicy, sizes: list[int]) -> ExportedPolicy:
    """``policy``, which appends the number of rows of each pass to ``sizes``."""

    def run(inputs: Arrays) -> Arrays:
        sizes.append(len(next(iter(inputs.values()))))
        return policy.run(inputs)

    return ExportedPolicy(run, policy.metadata)


def test_requests_share_a_pass_if_they_arrive_together_or_during_another(
    files: dict[str, Path],
) -> None:
    sizes: list[int] = []
    gate = threading.Event()
    plain = ExportedPolicy.load(files["cartpole"])

    def run(inputs: Arrays) -> Arrays:
        assert gate.wait(30)
        return plain.run(inputs)

    batcher = Batcher(counted(ExportedPolicy(run, plain.metadata), sizes), max_rows=8)
    rows = np.random.default_rng(2).normal(size=(24, 4)).astype(np.float32)

    async def answers() -> list[Any]:
        futures, first = [], 0
        for size in [1, 2, 2]:  # in one turn of the loop
            futures.append(batcher.submit(Query({"obs": rows[first : first + size]}, size, True)))
            first += size
        await asyncio.sleep(0)  # the pass begins
        for size in [1] * 8 + [3, 5, 2, 1]:
            futures.append(batcher.submit(Query({"obs": rows[first : first + size]}, size, True)))
            first += size
        gate.set()
        return [answer["policy"] for answer in await asyncio.gather(*futures)]

    found = np.concatenate(asyncio.run(answers()))
    batcher.close()

    assert sizes == [5, 8, 8, 3]
    assert np.allclose(found, plain.run({"obs": rows})["policy"], atol=1e-6)


def test_failing_policy_is_a_500_only_for_the_client_that_caused_it(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ExportedPolicy.load(files["cartpole"])

    def run(inputs: Arrays) -> Arrays:
        if (inputs["obs"][:, 0] == 7).any():
            raise RuntimeError("the graph\nis torn")
        outputs = policy.run(inputs)
        outputs["policy"][inputs["obs"][:, 0] == 8] = np.nan
        return outputs

    broken = ExportedPolicy(run, policy.metadata)
    with serving(broken) as server:
        torn = ask(server.port, "/predict", {"obs": [7, 0, 0, 0]})
        no_number = ask(server.port, "/predict", {"obs": [8, 0, 0, 0]})
        fine = ask(server.port, "/predict", {"obs": OBS})
    batcher = Batcher(broken, max_rows=2)
    row = np.zeros((1, 4), dtype=np.float32)

    async def together() -> list[Any]:
        futures = [batcher.submit(Query({"obs": row + each}, 1, True)) for each in (0, 7)]
        return await asyncio.gather(*futures, return_exceptions=True)

    good, bad = asyncio.run(together())
    batcher.close()

    assert torn == (500, {"error": "the policy failed: RuntimeError: the graph is torn"})
    assert no_number[0] == 500
    assert "NaN or infinity" in no_number[1]["error"]
    assert fine[0] == 200
    assert "the policy failed: RuntimeError: the graph is torn\n" in capsys.readouterr().err
    assert good["action"].shape == (1,)
    assert isinstance(bad, RuntimeError)


def test_stuck_policy_is_a_503_in_time_and_health_reports_it(files: dict[str, Path]) -> None:
    plain, gate = ExportedPolicy.load(files["cartpole"]), threading.Event()

    def run(inputs: Arrays) -> Arrays:
        assert gate.wait(60)
        return plain.run(inputs)

    policy = ExportedPolicy(run, plain.metadata)
    with (
        serving(policy, limits=Limits(answer_seconds=0.5)) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        before = ask(server.port, "/health")
        waiting = list(pool.map(lambda _: ask(server.port, "/predict", {"obs": OBS}), range(2)))
        during = ask(server.port, "/health")
        refused = ask(server.port, "/predict", {"obs": OBS})
        gate.set()
        while (after := ask(server.port, "/health"))[0] == 503:
            pass
        again = ask(server.port, "/predict", {"obs": OBS})

    assert before == after == (200, {"status": "ok"})
    assert waiting == [(503, {"error": "the policy did not answer within 0.5 s"})] * 2
    for status, answer in (during, refused):
        assert status == 503
        assert re.fullmatch(
            r"the policy has not returned for \d+ s; the limit is 0.5 s", answer["error"]
        )
    assert again[0] == 200


def test_large_body_is_read_while_other_threads_run(files: dict[str, Path]) -> None:
    reader = RequestReader(ExportedPolicy.load(files["cartpole"]), max_rows=20_000)
    rows = np.random.default_rng(3).normal(size=(20_000, 4)).astype(np.float32)
    body = json.dumps({"obs": rows.tolist()}).encode()
    interval = sys.getswitchinterval()

    n_turns = 0
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(reader.read, body)
            while not future.done():
                n_turns += 1
                time.sleep(1e-4)
    finally:
        sys.setswitchinterval(interval)

    assert np.array_equal(future.result().inputs["obs"], rows)
    assert n_turns > 150  # about 600; json's decoder alone leaves 6


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"obs": [[1, 2, 3, 4], [1, 2, 3, NaN]]%s}', "the body contains NaN"),
        (b'{"obs": [[1, 2, 3, 4], [1, 2, 3]]%s}', "obs is ragged"),
        (b'{"obs": [[1, 2, 3, 4], [1, 2, 3, 4]%s}', "the body is not valid JSON: Expecting ','"),
        (b'{"obs": [1, 2, 3]%s}', "obs has shape [3]; it must be float32 of shape [4]"),
        (b'{"obs": [[1, 2, 3, 4]]%s, "x": {"y": [1, [2]]}}', "the body has the unknown key 'x'"),
        (b'{"obs": [%s]}', "the body has 140002 values; a request has at most 40001"),
    ],
)
def test_large_bad_body_gets_the_same_reasons(
    files: dict[str, Path], body: bytes, words: str
) -> None:
    reader = RequestReader(ExportedPolicy.load(files["cartpole"]), max_rows=8_000)

    with pytest.raises(RefusedError) as refused:
        reader.read(body % ((b"[]," if b"[%s]" in body else b" ") * 70_000))

    assert refused.value.status == 400
    assert words in str(refused.value)


def test_port_in_use_is_a_one_line_error(
    server: PolicyServer, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.port)

    assert main(["serve", str(files["cartpole"]), "--port", port]) == 1

    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: " in error
    assert error.count("\n") == 1


@contextmanager
def process(command: list[str], **options: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in its own process, and its port."""
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{TESTS}"},
        **options,
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("serving CartPole-v1 on http://127.0.0.1:")
            yield server, int(line.split("127.0.0.1:")[1].split()[0])
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_signal_shuts_the_server_down_cleanly(
    files: dict[str, Path], number: signal.Signals, code: int
) -> None:
    command = ["-m", "ml_pipeline", "serve", str(files["cartpole"]), "--port", "0"]
    with process(command) as (server, port):
        assert ask(port, "/predict", {"obs": OBS})[0] == 200
        idle = socket.create_connection(("127.0.0.1", port))  # must not delay the shutdown

        server.send_signal(number)
        out, err = server.communicate(timeout=30)
        idle.close()

    assert server.returncode == code
    assert out == f"stopped by {number.name}\n"
    assert err == ""


# A server whose policy answers after half a second, or never for obs[0] = 9.
SLOW_SERVER = """
import sys, time
from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.deploy.serve import Limits, PolicyServer, serve
from ml_pipeline.assembly.script import exit_code

plain = ExportedPolicy.load(sys.argv[1])

def run(inputs):
    time.sleep(0.5)
    while inputs["obs"][0, 0] == 9:
        pass
    return plain.run(inputs)

policy = ExportedPolicy(run, plain.metadata)
limits = Limits(answer_seconds=1.0, stuck_seconds=2.0)
options = dict(host="127.0.0.1", port=0, max_batch=8, limits=limits)
sys.exit(exit_code(lambda: serve(PolicyServer(policy, **options))))
"""


@pytest.mark.slow
def test_answers_in_progress_are_sent_after_a_stop_signal(files: dict[str, Path]) -> None:
    with (
        process(["-c", SLOW_SERVER, str(files["cartpole"])]) as (server, port),
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
    ):
        body = json.dumps({"obs": OBS})
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body.encode())
        ask(port, "/health")  # the server has read the first request, too
        server.send_signal(signal.SIGTERM)
        answer = client.makefile("rb").read()
        server.communicate(timeout=30)

    assert server.returncode == 143
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer.lower()


@pytest.mark.slow
def test_server_ends_with_one_line_if_its_policy_never_returns(files: dict[str, Path]) -> None:
    with process(["-c", SLOW_SERVER, str(files["cartpole"])]) as (server, port):
        asked = ask(port, "/predict", {"obs": [9.0, 0, 0, 0]})
        out, err = server.communicate(timeout=60)

    assert asked == (503, {"error": "the policy did not answer within 1 s"})
    assert (server.returncode, out) == (1, "")
    assert err == "the policy does not return; the limit is 2 s; the server ends\n"


@pytest.mark.slow
def test_server_without_free_file_descriptors_waits_for_one(files: dict[str, Path]) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no limit to set")
    command = ["-m", "ml_pipeline", "serve", str(files["cartpole"]), "--port", "0"]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    def cpu_ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with process(command, preexec_fn=limited) as (server, port):
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        before = cpu_ticks(server.pid)
        time.sleep(2)
        used = cpu_ticks(server.pid) - before
        for each in clients:
            each.close()
        health = None
        while health is None:
            with suppress(ConnectionError):  # until the server has noticed
                health = ask(port, "/health")

    assert health == (200, {"status": "ok"})
    assert used < os.sysconf("SC_CLK_TCK")  # a busy loop takes both seconds


def test_missing_extra_is_one_line_before_anything_else(tmp_path: Path) -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from ml_pipeline.__main__ import main; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(main(['serve', 'no-such-file']))"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )

    assert done.returncode == 1
    assert done.stderr == (
        'serve needs uvicorn, which is not installed: pip install "ml_pipeline[serve]"\n'
    )


@pytest.mark.parametrize("part", ["value", "name", "address", "many"])
@pytest.mark.parametrize("path", ["/health", "/predict"])
def test_too_large_head_in_one_piece_is_refused(path: str, part: str, server: PolicyServer) -> None:
    headers = {
        "value": b"X: " + b"x" * 70_000,
        "name": b"X" * 70_000 + b": x",
        "many": b"\r\n".join(b"X%d: %s" % (number, b"x" * 100) for number in range(700)),
        "address": b"X: x",
    }
    address = path.encode() + (b"?" + b"x" * 70_000 if part == "address" else b"")
    head = b"GET " + address + b" HTTP/1.1\r\nHost: localhost\r\n" + headers[part]

    answer = exchange(server.port, head + b"\r\nContent-Length: 2\r\n\r\n{}")

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert ask(server.port, "/health")[0] == 200


def test_requests_need_the_token(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["cartpole"])
    with serving(policy, token="s3cret") as server:
        for given in ("", "s3cret", "Bearer", "Bearer wrong", "Bearer s3cret2", "Basic s3cret"):
            headers = {"Authorization": given} if given else {}
            for path, body in (("/metadata", None), ("/predict", {"obs": OBS})):
                status, answer = ask(server.port, path, body, **headers)
                assert status == 401
                assert "Authorization: Bearer TOKEN" in answer["error"]
        right = {"Authorization": "Bearer s3cret"}
        assert ask(server.port, "/metadata", **right)[0] == 200
        assert ask(server.port, "/predict", {"obs": OBS}, **right)[0] == 200
        assert ask(server.port, "/health")[0] == 200
        assert not server.is_open


@pytest.mark.parametrize(
    ("host", "token", "is_open"),
    [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "x", False), ("::", "", True)],
)
def test_server_of_other_machines_without_a_token_is_open(
    host: str, token: str, is_open: bool, files: dict[str, Path]
) -> None:
    policy = ExportedPolicy.load(files["cartpole"])
    server = PolicyServer(policy, host=host, port=0, token=token)

    assert server.is_open == is_open

    server._listener.close()
    server._batcher.close()


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", "\u00fc".encode(), b"x" * 5_000])
def test_bad_token_file_is_one_line(
    content: bytes, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_bytes(content)

    for name in ("token", "missing"):
        assert main(["serve", str(files["cartpole"]), "--token-file", str(tmp_path / name)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(tmp_path / name) in line


def test_metadata_names_no_path_of_this_machine(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["cartpole"])
    policy.metadata["env"]["kwargs"] = {"rom": "/home/me/rom.gb"}
    policy.metadata["facts"] = {"data": [{"path": "/data/x.csv"}]}
    policy.metadata["other"] = "C:\\data"
    with serving(policy) as server:
        _, answer = ask(server.port, "/metadata")

    assert not {"env", "facts", "other"} & set(answer)
    assert {"env_name", "observation_space", "action_space", "inputs", "outputs"} <= set(answer)
