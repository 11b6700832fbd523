"""Studies in a PostgreSQL database: several workers, a server that goes away, and passwords."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY, TESTS, Capture, small, wait_until

pytestmark = pytest.mark.xdist_group("database")  # one server for all tests

pytest.importorskip("optuna", reason="needs the extra: pip install -e '.[study]'")
pytest.importorskip("psycopg", reason="needs the extra: pip install -e '.[postgresql]'")

from optuna.trial import TrialState, create_trial  # noqa: E402

from ml_pipeline.__main__ import main  # noqa: E402
from ml_pipeline.metrics import EVAL_RETURN  # noqa: E402
from ml_pipeline.study import folder as folder_module  # noqa: E402
from ml_pipeline.study.database import hidden  # noqa: E402
from ml_pipeline.study.folder import StudyFolder, StudySettings, finished  # noqa: E402

PASSWORD = "s3cret/@:pw"
QUOTED = "s3cret%2F%40%3Apw"
# Debian does not put the programs of a server into PATH.
_DEBIAN = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
PROGRAMS = os.pathsep.join([os.environ.get("PATH", ""), *_DEBIAN])
SPACE = "agent.gamma: {choices: [0.9, 0.99]}\n"


class Server:
    """A PostgreSQL server in a folder of its own, with a user and a password."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(folder, self._user)
        (folder / "password").write_text(PASSWORD)
        self._call("initdb", "-D", self.data, "-U", "me", "--auth=scram-sha-256", "--no-sync",
                   f"--pwfile={folder / 'password'}")  # fmt: skip
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.start()

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k '' -F"
        self._call("pg_ctl", "-D", self.data, "-l", self.data / "log", "-w", "-o", options, "start")

    def stop(self) -> None:
        self._call("pg_ctl", "-D", self.data, "-m", "immediate", "-w", "stop")

    def _call(self, *command: str | Path) -> None:
        program = shutil.which(str(command[0]), path=PROGRAMS)
        call = [str(program), *command[1:]]
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL, user=self._user, cwd="/")

    def url(self, password: str = "") -> str:
        return f"postgresql://me{password}@127.0.0.1:{self.port}/postgres"

    @property
    def storage(self) -> str:
        return f"storage={self.url(f':{QUOTED}')}"


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    for program in ("postgres", "initdb", "pg_ctl"):
        if shutil.which(program, path=PROGRAMS) is None:
            pytest.skip(f"needs a PostgreSQL server: there is no {program} in PATH")
    folder = Path(tempfile.mkdtemp(prefix="ml_pipeline_pg_"))  # not below a folder that is 0700
    server = Server(folder)
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def server(started: Server, here: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("PGPASSWORD", "")  # study start sets it; this restores it
    monkeypatch.delenv("PGPASSWORD")
    (here / "space.yaml").write_text(SPACE)
    return started


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ml_pipeline", "study", "start", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(TESTS), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files_with(text: str, folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_share_a_database_and_the_password_is_in_no_file(
    server: Server, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    process = begin(
        here, "two", "n_trials=4", "n_jobs=2", "space=space.yaml", server.storage, *small()
    )
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output

    monkeypatch.setenv("PGPASSWORD", PASSWORD)  # of this later command
    trials = StudyFolder.open("two").read_trials()
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert len({trial.user_attrs["pid"] for trial in trials}) == 2
    assert main(["study", "status", "two"]) == 0
    assert "study two: 4 of 4 trials" in capsys.readouterr().out
    assert not (here / "studies/two/journal.log").exists()
    assert "s3cret" not in output
    assert files_with("s3cret", here) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_study_waits_for_a_server_that_goes_away_and_loses_nothing(
    server: Server, here: Path
) -> None:
    name = "away"
    arguments = [name, "n_trials=3", "space=space.yaml", server.storage, *small(total_steps=2_000)]
    process = begin(here, *arguments)
    assert process.stdout is not None
    try:
        wait_until(lambda: bool(list(here.glob("runs/*/*/metrics.csv"))), 100)
        server.stop()
        line = next(line for line in process.stdout if "the trials continue when" in line)
        logs = here / "studies" / name / "logs"
        wait_until(lambda: bool(files_with("waiting for it, nothing is lost", logs)), 100)
    finally:
        server.start()
    output, _ = process.communicate(timeout=110)

    assert process.returncode == 0, output
    assert line.startswith(f"storage={server.url()}: ")
    assert line.count("\n") == 1
    assert output.count("answers again") == 1
    assert "study away has all 3 trials" in output
    os.environ["PGPASSWORD"] = PASSWORD
    assert len(finished(StudyFolder.open(name).read_trials())) == 3


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("storage=postgresql://me:wrong-one@127.0.0.1:{port}/postgres",
         'password authentication failed for user "me"; set PGPASSWORD, or write ~/.pgpass'),
        ("storage=postgresql://me@127.0.0.1:{port}/postgres", "no password supplied; set PG"),
        ("storage=postgresql://me:wrong-one@127.0.0.1:1/postgres", "Connection refused"),
        ("storage=mysql://me:wrong-one@127.0.0.1/x",
         "storage=mysql://me:***@127.0.0.1/x: must begin with postgresql://"),
        ("storage=postgresql://me:wrong-one@127.0.0.1:port/x", "write postgresql://USER@HOST:5432/"),
        ("storage=postgresql://me@h/x?password=wrong-one", "leave it out; set PGPASSWORD"),
        ("storag=postgresql://me:wrong-one@h/x", "did you mean storage?"),
    ],
)  # fmt: skip
def test_bad_address_is_one_line_without_the_password(
    storage: str, words: str, server: Server, here: Path, capsys: Capture
) -> None:
    words_of_study = ["study", "start", "bad", "n_trials=1", storage.format(port=server.port)]

    assert main(words_of_study) == 1

    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert words in line
    assert "wrong-one" not in printed.out + printed.err
    assert files_with("wrong-one", here) == []
    assert not (here / "studies/bad/study.yaml").exists()


def test_missing_driver_names_the_extra(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if not installed

    assert main(["study", "start", "x", "n_trials=1", "storage=postgresql://me:pw@h/x"]) == 1

    error = capsys.readouterr().err
    assert 'needs psycopg, which is not installed: pip install "ml_pipeline[postgresql]"' in error


def test_password_of_an_address_is_hidden() -> None:
    assert (
        hidden(f"storage=postgresql://me:{PASSWORD}@h:1/x") == "storage=postgresql://me:***@h:1/x"
    )
    assert hidden("postgresql://me@h:1/x") == "postgresql://me@h:1/x"


def new_study(name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> StudyFolder:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    study = StudyFolder(name)
    study.storage_url = server.url()
    study.make()
    study.write(StudySettings([], {}, 3, 1, EVAL_RETURN, storage=server.url()))
    study.share()
    return study


def test_machine_without_the_folder_finds_the_settings_in_the_database(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_study("shared", server, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    there, unknown = StudyFolder("shared"), StudyFolder("unknown")
    there.storage_url = unknown.storage_url = server.url()

    assert there.exists()
    assert not unknown.exists()

    assert there.read_own(trust=False).n_trials == 3
    here.add_trial(create_trial(value=1.0))
    assert [trial.value for trial in there.read_trials()] == [1.0]


def test_server_that_a_foreign_study_names_is_not_contacted(here: Path, capsys: Capture) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        study = StudyFolder("foreign")
        study.make()
        url = f"postgresql://me@127.0.0.1:{server.getsockname()[1]}/x"
        study.write(StudySettings([], {}, 3, 1, EVAL_RETURN, storage=url))
        study.settings.write_text(study.settings.read_text().partition("# sha256")[0])

        for arguments in (["study", "status", "foreign"], ["compare", "studies/foreign"]):
            assert main(arguments) == 1
            assert "this user did not write it" in capsys.readouterr().err
        with pytest.raises(BlockingIOError):  # no connection is waiting
            server.accept()


def test_trial_of_another_machine_is_dead_only_without_a_heartbeat(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = new_study("beats", server, monkeypatch)
    theirs = study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs={"host": "other"}))
    assert study.database is not None
    study.database.answers_since = 0.0
    monkeypatch.setattr(folder_module.time, "time", lambda: now[0])
    now = [time.monotonic() + 4e9]  # long after the trial started

    assert not study.is_alive(study.read_trials()[0])
    study.database.beat("beats", theirs.number)
    assert study.is_alive(study.read_trials()[0])
    now[0] += 61.0
    assert not study.is_alive(study.read_trials()[0])
    study.database.answers_since = now[0]  # the server was away: nobody could write a beat
    assert study.is_alive(study.read_trials()[0])


def test_only_one_machine_at_a_time_claims_a_trial(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_study("claims", server, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    code = (
        "from ml_pipeline.study.folder import StudyFolder\n"
        f"study = StudyFolder('claims')\nstudy.storage_url = {server.url()!r}\n"
        "study.make()\nprint('asks', flush=True)\n"
        "with study.alone():\n    print(len(study.read_trials()))"
    )
    with here.alone():
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path / "elsewhere",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        here.add_trial(create_trial(value=1.0))
    output, _ = process.communicate(timeout=60)

    assert output == "1\n"
