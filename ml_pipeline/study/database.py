"""Database: trials in PostgreSQL instead of the journal file, for machines without a shared disk.

No password is written anywhere: libpq finds it in PGPASSWORD or ~/.pgpass. One in the URL of the
command line goes to PGPASSWORD of this process and its workers.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage

from ml_pipeline.errors import UserError, first_line
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.console import say

_CONNECT_SECONDS = 10
_WAIT_SECONDS = 1.0  # between two attempts to connect
# A connection is broken if the machine of the server does not answer for a minute.
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


class DatabaseError(UserError):
    """The database cannot be used now."""


def hidden(text: str) -> str:
    """The text without the password of a URL in it."""
    return re.sub(r"(://[^:/?#\s]*):.*@", r"\1:***@", text)


def read_address(text: str) -> str:
    """The URL of storage= without its password, which goes to PGPASSWORD."""
    import_extra("psycopg", needed_by="storage=postgresql://...")
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError

    shown = f"storage={hidden(text)}"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"{shown}: write postgresql://USER@HOST:5432/DATABASE") from None
    if url.drivername != "postgresql":
        raise DatabaseError(f"{shown}: must begin with postgresql://; without it, a file is used")
    if "password" in url.query:
        raise DatabaseError("storage=...?password=: leave it out; set PGPASSWORD or use ~/.pgpass")
    if url.password is not None:
        os.environ["PGPASSWORD"] = str(url.password)
    parts = url.drivername, url.username, None, url.host, url.port, url.database, url.query
    return URL.create(*parts).render_as_string(hide_password=False)


class Database:
    """The connection to one database; ``waits`` until a server that has gone away is back."""

    def __init__(self, url: str, *, waits: bool = False) -> None:
        import_extra("psycopg", needed_by=f"storage={hidden(url)}")
        import sqlalchemy

        self.url = url
        self.waits = waits
        self.answers_since = 0.0
        self._error = sqlalchemy.exc.SQLAlchemyError
        self._lock = threading.Lock()
        self._is_away = False
        address = sqlalchemy.make_url(url).set(drivername="postgresql+psycopg")
        # Makes no connection; it knows how to.
        self._dialect = sqlalchemy.create_engine(address).dialect
        _, options = self._dialect.create_connect_args(address)
        self._options = {"connect_timeout": _CONNECT_SECONDS, **_KEEPALIVE, **options}
        with self.errors_named():
            self._rdb = RDBStorage(
                address.render_as_string(hide_password=False),
                # Before each use, a connection is tested, and replaced if it is broken.
                engine_kwargs={"creator": self._connect, "pool_pre_ping": True},
            )
        atexit.register(self._rdb.engine.dispose)  # closes its connections
        self.storage: BaseStorage = optuna.storages.get_storage(self._rdb)

    def _connect(self) -> Any:
        while True:
            try:
                connection = self._dialect.connect(**self._options)
            except self._dialect.loaded_dbapi.OperationalError as error:
                if not self.waits:
                    raise
                with self._lock:
                    if not self._is_away:
                        say(f"{self.url}: {_reason(error)}; waiting for it, nothing is lost")
                    self._is_away = True
                time.sleep(_WAIT_SECONDS)
                continue
            with self._lock:
                if self._is_away or not self.answers_since:
                    self.answers_since = time.time()
                if self._is_away:
                    say(f"{self.url} answers again")
                self._is_away = False
            return connection

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Report errors of the database in one line."""
        try:
            yield
        except (optuna.exceptions.StorageInternalError, self._error) as error:
            raise DatabaseError(f"storage={self.url}: {_reason(error)}") from error
        except (RuntimeError, ValueError) as error:  # tables or trials of other programs
            raise DatabaseError(f"storage={self.url}: {first_line(error)}") from error

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep other machines from creating or claiming a trial of this study."""
        from sqlalchemy import text

        with self.errors_named():
            connection = self._rdb.engine.connect()
            # The lock ends with the transaction: also if this process dies.
            lock = text("SELECT pg_advisory_xact_lock(hashtext(:name))")
            connection.execute(lock, {"name": f"ml_pipeline study {name}"})
        try:
            yield
        finally:
            with suppress(self._error):  # a lost connection has no lock
                connection.close()

    def beat(self, name: str, number: int) -> None:
        """Record that a process trains this trial; the next beat follows if this one fails."""
        # RuntimeError: the trial has ended meanwhile.
        with suppress(optuna.exceptions.StorageInternalError, self._error, RuntimeError):
            study_id = self._rdb.get_study_id_from_name(name)
            trial_id = self._rdb.get_trial_id_from_study_id_trial_number(study_id, number)
            self._rdb.set_trial_user_attr(trial_id, "beat", time.time())


def _reason(error: BaseException) -> str:
    """What PostgreSQL says, in one line, and how to give it a password."""
    while error.__cause__ is not None:
        error = error.__cause__
    error = getattr(error, "orig", None) or error
    line = first_line(error).removeprefix("connection failed: ")
    if "password" in line:
        line += "; set PGPASSWORD, or write ~/.pgpass"
    return line
