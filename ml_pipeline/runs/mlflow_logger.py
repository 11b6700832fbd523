"""MLflowLogger: MLflow, in a local database unless a tracking server is named.

A server that does not answer never blocks or stops training: a thread writes, and gives up after
the first failure. metrics.csv has every value in any case.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ml_pipeline.errors import UserError, first_line
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.console import python_command
from ml_pipeline.runs.loggers import server_answers
from ml_pipeline.runs.run_folder import RunFolder, flat

_RUN_TAG = "ml_pipeline.run"  # by which a resumed run finds itself
_MOST_METRICS = 1_000  # in one request, as MLflow allows
_MOST_PARAMS = 100
_MOST_CHARACTERS = 500  # of a param
_PARAM_TAGS = ("name", "notes", "tags")


class _Metrics(NamedTuple):
    values: dict[str, float]
    env_steps: int
    milliseconds: int


class MLflowLogger:
    """Metrics, hyperparameters and the best checkpoint; artifacts only on a tracking server."""

    def __init__(
        self,
        run: RunFolder,
        run_config: Mapping[str, Any],
        sweep: str | None,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        timeout_seconds: float = 20.0,
    ) -> None:
        """``tracking_uri`` None: MLFLOW_TRACKING_URI, or mlflow.db in the run_root.

        ``experiment`` None: MLFLOW_EXPERIMENT_NAME, or the name of the env.
        """
        address = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if tracking_uri and urlsplit(tracking_uri).password:
            raise UserError(
                "logger.mlflow.tracking_uri: has a password, which config.yaml would store; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        # A request to a dead server would otherwise be repeated for many minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_TIMEOUT", f"{max(1, round(timeout_seconds / 2))}"
        )
        self._mlflow = import_extra("mlflow", needed_by="logger=mlflow")
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._run = run
        self._timeout_seconds = timeout_seconds
        self._run_id: str | None = None
        self._queue: queue.SimpleQueue[_Metrics | Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.hint = ""
        self.status = "MLflow off"
        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run_config["env_name"]
        root = run.path.absolute().parent.parent
        local = f"sqlite:///{root / 'mlflow.db'}"
        trouble = ""
        if address and _is_server(address) and not server_answers(_shown(address), seconds=5.0):
            trouble, address = f"; {_shown(address)} does not answer", None
        for uri in dict.fromkeys([address or local, local]):
            try:
                self._start(uri, str(name), root, run_config, sweep)
            except Exception as error:  # MLflow raises many types; training continues
                trouble = trouble or f"; {_shown(uri)}: {_shown(first_line(error))}"
                self.status = f"MLflow off{trouble}"
                continue
            self.status = f"MLflow, experiment {name} in {_shown(uri)}{trouble}"
            if uri == local:
                self.hint = f"look with: {python_command()} -m mlflow ui --backend-store-uri {uri}"
            return

    def _start(
        self, uri: str, experiment: str, root: Path, config: Mapping[str, Any], sweep: str | None
    ) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        self._sends_files = _is_server(uri)
        found = client.get_experiment_by_name(experiment)
        if found is not None:
            experiment_id = found.experiment_id
        else:  # without a place, MLflow makes a folder in the current one
            place = None if self._sends_files else (root / "mlartifacts").as_uri()
            experiment_id = client.create_experiment(experiment, artifact_location=place)
        name = self._run.name
        earlier = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{name}'")
        if earlier:
            self._client, self._run_id = client, earlier[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        tags = {
            _RUN_TAG: name,
            "run_folder": str(self._run.shown),
            "agent": str(config["agent_name"]),
            "sweep": sweep,
            "tags": ", ".join(config.get("tags") or ()),
            "mlflow.note.content": config.get("notes"),
        }
        made = client.create_run(
            experiment_id,
            run_name=str(config.get("name") or name),
            tags={key: str(each) for key, each in tags.items() if each},
        )
        params = [Param(key, value) for key, value in _params(config).items()]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(made.info.run_id, params=params[first : first + _MOST_PARAMS])
        self._client, self._run_id = client, made.info.run_id

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        if self._run_id is None:
            return
        named = {re.sub(r"[^/\w. -]", "_", name): float(each) for name, each in metrics.items()}
        self._put(_Metrics(named, env_steps, round(time.time() * 1_000)))

    def log_file(self, path: Path, *, kind: str, env_steps: int) -> None:
        """Send a checkpoint or a video to a tracking server; a local store has the run folder."""
        if self._run_id is not None and self._sends_files:
            self._put(path)

    def close(self) -> None:
        """Write what is left, for at most ``timeout_seconds``."""
        if self._run_id is None:
            return
        self._put(None)
        if self._thread is not None:
            self._thread.join(self._timeout_seconds)
            if self._thread.is_alive():
                self.status = f"MLflow did not finish in {self._timeout_seconds:g} s"
        self._run_id = None

    def _put(self, item: _Metrics | Path | None) -> None:
        self._queue.put(item)
        if self._thread is None:  # not before: envs may be forked after the logger is made
            self._thread = threading.Thread(target=self._write_all, daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        """Write until ``close``, or until the first failure."""
        run_id = str(self._run_id)
        env_steps = 0
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, Path):
                    self._client.log_artifact(run_id, str(item))
                    continue
                env_steps = item.env_steps
                self._write(run_id, item)
            self._client.set_terminated(run_id)
        except Exception as error:  # as at the start
            self._run_id = None
            reason = _shown(first_line(error))
            self.status = f"MLflow stopped at env step {env_steps:,}: {reason}"

    def _write(self, run_id: str, item: _Metrics) -> None:
        from mlflow.entities import Metric

        rows = [
            Metric(name, value, item.milliseconds, item.env_steps)
            for name, value in item.values.items()
        ]
        for first in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(run_id, metrics=rows[first : first + _MOST_METRICS])


def _params(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted keys and their values, as texts that MLflow accepts."""
    params = {re.sub(r"[^/\w. -]", "_", key): value for key, value in flat(config).items()}
    return {k: str(v)[:_MOST_CHARACTERS] for k, v in params.items() if k not in _PARAM_TAGS}


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _shown(text: str) -> str:
    """A URI, or a text with one, without a user and password."""
    return re.sub(r"://[^/@\s]*@", "://", text)
