"""A served policy: correct answers to many clients, reasons for bad input, a clean shutdown."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, TESTS, small

from ml_pipeline.__main__ import main
from ml_pipeline.build import train
from ml_pipeline.deploy.batcher import Batcher
from ml_pipeline.deploy.exported import Arrays, ExportedPolicy
from ml_pipeline.deploy.request import Query
from ml_pipeline.deploy.serve import MAX_BODY_BYTES, PolicyServer
from ml_pipeline.door.load import load_agent

pytestmark = pytest.mark.xdist_group("serve")  # the policies are trained once

OBS = [0.1, -0.2, 0.3, -0.4]

POLICIES = {
    "cartpole": ["env=cartpole"],
    "mixed": ["env.target=tiny_envs.MixedEnv"],
    "masked": ["env.target=tiny_envs.ForbiddingEnv", "agent.action_mask=info"],
    "lstm": ["env=cartpole", "network=lstm"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Exported policies in their run folders."""
    given = [each for each in small() if "evaluation" not in each]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("served"))
        files = {}
        for name, overrides in POLICIES.items():
            quick = ["vec_env=serial", "~callbacks.evaluation"]
            run = train([*given, *quick, *overrides]).run_dir.absolute()
            assert main(["export", str(run)]) == 0
            files[name] = run / "policy.pt2"
        yield files


@contextmanager
def serving(policy: ExportedPolicy, **options: Any) -> Iterator[PolicyServer]:
    server = PolicyServer(policy, host="127.0.0.1", port=0, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.close()


@pytest.fixture
def server(files: dict[str, Path]) -> Iterator[PolicyServer]:
    with serving(ExportedPolicy.load(files["cartpole"])) as server:
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
    assert ask(server.server_port, "/health") == (200, {"status": "ok"})

    status, metadata = ask(server.server_port, "/metadata")

    assert status == 200
    assert metadata["env_name"] == "CartPole-v1"
    assert metadata["observation_space"]["high"][1] == "inf"  # JSON has no number for it


def test_answers_to_one_observation_and_to_a_batch_equal_the_live_policy(
    server: PolicyServer, files: dict[str, Path]
) -> None:
    agent = load_agent(files["cartpole"].parent).agent
    batch = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    _, one = ask(server.server_port, "/predict", {"obs": batch[0].tolist()})
    _, many = ask(server.server_port, "/predict", {"obs": batch.tolist()})

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
        status, answer = ask(server.server_port, "/predict", {"obs": leaves})
        errors = [ask(server.server_port, "/predict", {"obs": bad}) for bad, _ in refused]

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
            status, answer = ask(server.server_port, "/predict", {"obs": obs, "action_mask": mask})
            assert (status, answer["action"]) == (200, only)
        for more, words in (
            ({}, "action_mask is missing; got the keys ['obs']"),
            ({"action_mask": [0, 0, 0, 0]}, "allows no action"),
            ({"action_mask": [1, 1]}, "action_mask has shape [2]; it must be bool of shape [4]"),
            ({"action_mask": [2, 1, 0, 0]}, "action_mask contains 2, which is not a finite bool"),
            ({"action_mask": [[1] * 4]}, "action_mask is a batch of 1, but obs is not a batch"),
        ):
            status, answer = ask(server.server_port, "/predict", {"obs": obs, **more})
            assert status == 400
            assert words in answer["error"]


def test_recurrent_state_passes_from_answer_to_request(files: dict[str, Path]) -> None:
    policy = ExportedPolicy.load(files["lstm"])
    memory = policy.new_memory(1)
    assert memory is not None
    body: dict[str, Any] = {"obs": OBS}
    with serving(policy) as server:
        for _ in range(3):
            action = policy.act_batch(np.array([OBS], dtype=np.float32), memory=memory)
            status, answer = ask(server.server_port, "/predict", body)
            assert (status, answer["action"]) == (200, action[0])
            assert np.allclose(answer["state"], memory[0], atol=1e-6)
            body = {"obs": OBS, "state": answer["state"]}
        status, answer = ask(server.server_port, "/predict", {"obs": OBS, "state": [0.0]})

    assert status == 400
    assert "state has shape [1]; it must be float32 of shape [128]" in answer["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not valid JSON"),
        (b"\xff\xfe", "the body is not valid JSON"),
        (b"[" * 100_000, "the body is not valid JSON"),
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
    status, answer = ask(server.server_port, "/predict", body)

    assert status == 400
    assert words in answer["error"]
    assert ask(server.server_port, "/predict", {"obs": OBS})[0] == 200


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
    got, answer = ask(server.server_port, path, method=method)

    assert got == status
    assert answer["error"]


def test_too_large_body_is_413_before_and_while_it_is_sent(server: PolicyServer) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)

    for headers in ({}, {"Expect": "100-continue"}):
        status, answer = ask(server.server_port, "/predict", body, **headers)

        assert status == 413
        assert answer["error"] == "the body has 16777217 bytes; the limit is 16777216"


def test_body_without_a_length_or_cut_short_is_refused(server: PolicyServer) -> None:
    for head, status in (
        ("Transfer-Encoding: chunked\r\n", b"411"),
        ("Content-Length: many\r\n", b"400"),
        ("Content-Length: 9\r\n", b"400"),
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as client:
            client.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n{{}}".encode())
            client.shutdown(socket.SHUT_WR)

            assert client.makefile("rb").readline().split()[1] == status


def test_connection_stays_open_after_a_refusal(server: PolicyServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
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
            answers += ask(server.server_port, "/predict", {"obs": rows})[1]["policy"]
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


def test_waiting_requests_share_one_forward_pass(files: dict[str, Path]) -> None:
    sizes: list[int] = []
    policy = counted(ExportedPolicy.load(files["cartpole"]), sizes)
    # The long wait excludes the clock: a pass starts when it is full or the next does not fit.
    batcher = Batcher(policy, max_rows=8, wait_seconds=60.0)
    rows = np.random.default_rng(2).normal(size=(19, 4)).astype(np.float32)
    cuts = [1] * 8 + [3, 5, 2, 1]

    futures, first = [], 0
    for size in cuts:
        futures.append(batcher.submit(Query({"obs": rows[first : first + size]}, size, True)))
        first += size
    batcher.close()

    answers = np.concatenate([future.result(10)["policy"] for future in futures])
    assert sizes == [8, 8, 3]
    assert np.allclose(answers, policy.run({"obs": rows})["policy"], atol=1e-6)


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
        torn = ask(server.server_port, "/predict", {"obs": [7, 0, 0, 0]})
        no_number = ask(server.server_port, "/predict", {"obs": [8, 0, 0, 0]})
        fine = ask(server.server_port, "/predict", {"obs": OBS})
    batcher = Batcher(broken, max_rows=2, wait_seconds=60.0)
    row = np.zeros((1, 4), dtype=np.float32)
    good, bad = (batcher.submit(Query({"obs": row + each}, 1, True)) for each in (0, 7))
    batcher.close()

    assert torn == (500, {"error": "the policy failed: RuntimeError: the graph is torn"})
    assert no_number[0] == 500
    assert "NaN or infinity" in no_number[1]["error"]
    assert fine[0] == 200
    assert "the policy failed: RuntimeError: the graph is torn\n" in capsys.readouterr().err
    assert good.result(10)["action"].shape == (1,)
    with pytest.raises(RuntimeError, match="torn"):
        bad.result(10)


def test_port_in_use_is_a_one_line_error(
    server: PolicyServer, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.server_port)

    assert main(["serve", str(files["cartpole"]), "--port", port]) == 1

    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: " in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_signal_shuts_the_server_down_cleanly(
    files: dict[str, Path], number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "ml_pipeline", "serve", str(files["cartpole"]), "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{TESTS}"},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving CartPole-v1 on http://127.0.0.1:")
            port = int(line.split("127.0.0.1:")[1].split()[0])
            assert ask(port, "/predict", {"obs": OBS})[0] == 200
            idle = socket.create_connection(("127.0.0.1", port))  # must not delay the shutdown

            process.send_signal(number)
            out, err = process.communicate(timeout=30)
            idle.close()
        finally:
            process.kill()

    assert process.returncode == code
    assert out == f"stopped by {number.name}\n"
    assert err == ""
