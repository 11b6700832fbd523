"""MLflow: curves and settings in a local store, a resumed run, and servers that do not answer."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import read_rows, small

pytestmark = [
    pytest.mark.xdist_group("mlflow"),
    pytest.mark.slow,
]  # making its tables takes seconds

pytest.importorskip("mlflow", reason="needs the extra: pip install -e '.[mlflow]'")

from mlflow.tracking import MlflowClient  # noqa: E402

from ml_pipeline.assembly.run import train  # noqa: E402
from ml_pipeline.errors import UserError  # noqa: E402
from ml_pipeline.runs.mlflow_logger import MLflowLogger  # noqa: E402
from ml_pipeline.runs.run_folder import RunFolder  # noqa: E402

CONFIG = {"env_name": "CartPole-v1", "agent_name": "ppo", "agent": {"gamma": 0.9}, "seed": 1}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run_root whose store several tests use."""
    return tmp_path_factory.mktemp("mlflow")


def new_run(root: Path, name: str) -> RunFolder:
    run = RunFolder(root / "CartPole-v1" / name)
    run.make()
    return run


def stored(root: Path, experiment: str = "CartPole-v1") -> Any:
    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return client, {r.info.run_name: r for r in client.search_runs([found.experiment_id])}


def test_run_logs_to_a_local_store_and_a_resumed_run_continues_there(here: Path) -> None:
    run = train([*small(logger="mlflow")]).run_dir
    train([f"resume={run}", "total_steps=128"])

    client, runs = stored(here / "runs")
    assert list(runs) == [run.name]
    data = runs[run.name].data
    assert (data.params["agent.gamma"], data.params["total_steps"]) == ("0.99", "64")
    assert runs[run.name].info.status == "FINISHED"
    history = client.get_metric_history(runs[run.name].info.run_id, "loss/policy")
    rows = [row for row in read_rows(run) if row["loss/policy"]]
    assert [each.step for each in history] == [int(row["env_steps"]) for row in rows]
    assert [each.value for each in history] == [float(row["loss/policy"]) for row in rows]
    assert {path.name for path in here.iterdir()} == {"runs"}  # no mlruns/ here


def test_names_that_mlflow_refuses_and_values_that_are_not_finite_are_logged(root: Path) -> None:
    logger = MLflowLogger(new_run(root, "odd"), {**CONFIG, "env": {"a+b": 1}}, "morning")
    logger.log({"rollout/info/x[0]": 1.0, "nan": float("nan")}, env_steps=5)
    logger.close()

    _, runs = stored(root)
    assert runs["odd"].data.metrics["rollout/info/x_0_"] == 1.0
    assert runs["odd"].data.params["env.a_b"] == "1"
    assert runs["odd"].data.tags["sweep"] == "morning"
    assert logger.status == f"MLflow, experiment CartPole-v1 in sqlite:///{root / 'mlflow.db'}"


def test_variables_of_mlflow_replace_defaults_but_not_what_the_config_names(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "thesis")

    for name, experiment in (("variable", None), ("named", "mine")):
        MLflowLogger(new_run(root, name), CONFIG, None, experiment=experiment).close()

    assert list(stored(root, "thesis")[1]) == ["variable"]
    assert list(stored(root, "mine")[1]) == ["named"]


def test_without_a_server_at_the_start_the_local_store_is_used(root: Path) -> None:
    logger = MLflowLogger(new_run(root, "dead"), CONFIG, None, "http://127.0.0.1:1")
    logger.log({"a": 1.0}, env_steps=1)
    logger.close()

    assert logger.status.endswith("mlflow.db; http://127.0.0.1:1 does not answer")
    assert stored(root)[1]["dead"].data.metrics == {"a": 1.0}


class _Dying(http.server.BaseHTTPRequestHandler):
    """Answers as MLflow does until a run exists, then with errors."""

    answers: ClassVar = {
        "experiments/get-by-name": b'{"experiment": {"experiment_id": "1", "name": "x"}}',
        "runs/search": b"{}",
        "runs/create": b'{"run": {"info": {"run_id": "r", "experiment_id": "1"}, "data": {}}}',
    }
    is_dead = False

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = [text for path, text in self.answers.items() if path in self.path]
        self.send_response(500 if type(self).is_dead else 200)
        body = found[0] if found else b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def dying() -> Iterator[str]:
    _Dying.is_dead = False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("user", ["", "me:s3cret@"])
def test_server_that_dies_ends_the_logging_and_not_the_run(
    user: str, root: Path, dying: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dying.replace("://", f"://{user}"))
    logger = MLflowLogger(new_run(root, "dying"), CONFIG, None, timeout_seconds=8)
    assert logger.status == f"MLflow, experiment CartPole-v1 in {dying}"

    _Dying.is_dead = True
    for env_steps in (7, 14, 21):
        logger.log({"a": 1.0}, env_steps=env_steps)
    logger.log_file(root / "mlflow.db", kind="checkpoint", env_steps=21)
    logger.close()
    logger.log({"a": 1.0}, env_steps=28)

    assert logger.status.startswith("MLflow stopped at env step 7: ")
    assert "s3cret" not in logger.status


def test_password_in_the_config_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match="set MLFLOW_TRACKING_USERNAME") as caught:
        MLflowLogger(new_run(root, "password"), CONFIG, None, "https://me:s3cret@h")

    assert "s3cret" not in str(caught.value)


def test_store_that_mlflow_refuses_does_not_stop_the_run(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database" * 100)
    logger = MLflowLogger(new_run(tmp_path, "refused"), CONFIG, None)
    logger.log({"a": 1.0}, env_steps=1)
    logger.close()

    assert logger.status.startswith("MLflow off; sqlite:///")
