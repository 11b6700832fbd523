"""A study in a browser: optuna-dashboard, reachable from this machine only."""

from __future__ import annotations

import threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ml_pipeline.extras import import_extra
from ml_pipeline.runs.console import say
from ml_pipeline.study.folder import StudyError, StudyFolder


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page sends a request every few seconds."""


def show(name: str, *, port: int) -> None:
    """Serve until Ctrl-C."""
    dashboard = import_extra("optuna_dashboard", needed_by="study dashboard")
    folder = StudyFolder.open(name)
    folder.read_trials()  # says in one line if the journal is damaged
    app = dashboard.wsgi(folder.storage)
    try:
        # Not for other machines: the page can change the study.
        server = make_server(
            "127.0.0.1", port, app, server_class=_Server, handler_class=_QuietHandler
        )
    except (OSError, OverflowError) as error:
        raise StudyError(f"--port {port}: {error}; choose another port") from error
    say(f"http://127.0.0.1:{port}/   Ctrl-C ends it")
    # In the main thread, a request in progress would swallow Ctrl-C.
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    thread.join()
