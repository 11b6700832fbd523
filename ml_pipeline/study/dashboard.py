"""A study in a browser: optuna-dashboard, reachable from this machine alone."""

from __future__ import annotations

import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ml_pipeline.extras import import_extra
from ml_pipeline.runs.console import say
from ml_pipeline.study.folder import StudyError, StudyFolder


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """The page asks every few seconds: not worth a line each."""


def show(name: str, *, port: int) -> None:
    """Serve until Ctrl-C."""
    dashboard = import_extra("optuna_dashboard", needed_by="study dashboard")
    app = dashboard.wsgi(StudyFolder.open(name).storage())
    try:
        # Whoever reaches it can change the study: not from other machines.
        server = make_server(
            "127.0.0.1", port, app, server_class=_Server, handler_class=_QuietHandler
        )
    except (OSError, OverflowError) as error:
        raise StudyError(f"--port {port} cannot be used: {error}; choose another one") from error
    say(f"http://127.0.0.1:{port}/   Ctrl-C ends it")
    # Not in the main thread: a request that is being answered would swallow Ctrl-C.
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    thread.join()
