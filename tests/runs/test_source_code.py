"""The record of the code: commits and changes of the package and of the user's own repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY, small, summary_of

from ml_pipeline import train
from ml_pipeline.runs import source_code
from ml_pipeline.runs.source_code import Code, user_code


def git(*arguments: str) -> str:
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    done = subprocess.run(
        ["git", *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def commit(here: Path) -> str:
    """The only commit of a repository in the current folder: it has my_env.py."""
    git("init", "-q")
    (here / "my_env.py").write_text("speed = 1\n")
    git("add", "my_env.py")
    git("commit", "-qm", "Add an env")
    return git("rev-parse", "HEAD")


def test_run_records_the_commit_and_the_changes_of_the_users_repository(
    commit: str, here: Path
) -> None:
    (here / "my_env.py").write_text("speed = 2\n")
    (here / "passwords").write_text("secret")

    run = train(small(), quiet=True).run_dir

    assert summary_of(run)["user_git_commit"] == f"{commit}+"
    changes = (run / "user_changes.diff").read_text()
    assert "-speed = 1\n+speed = 2\n" in changes
    assert "secret" not in changes
    git("checkout", "-q", "my_env.py")
    git("apply", str(run / "user_changes.diff"))
    assert (here / "my_env.py").read_text() == "speed = 2\n"


def test_code_without_changes_is_its_commit(commit: str, here: Path) -> None:
    (here / "sub").mkdir()

    assert user_code(here / "sub") == Code(commit, "")


def test_a_repository_is_recorded_once_and_only_if_there_is_one(here: Path) -> None:
    assert user_code(here) is None
    assert user_code(REPOSITORY / "tests") is None  # package_code records it
    git("init", "-q")
    assert user_code(here) is None  # no commit yet


def test_variables_of_a_git_hook_do_not_lead_to_another_repository(
    commit: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(REPOSITORY / ".git"))

    assert user_code(here) == Code(commit, "")


def test_huge_changes_are_cut(commit: str, here: Path) -> None:
    (here / "my_env.py").write_text(200_000 * "speed = 2\n")

    code = user_code(here)

    assert code is not None
    assert len(code.changes) < 1_000_100
    assert code.changes.endswith("# cut after 1,000,000 bytes\n")


def test_without_git_nothing_is_recorded(
    commit: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))

    assert user_code(here) is None


@pytest.mark.slow
def test_diff_that_hangs_is_stopped(
    commit: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = here / "bin" / "git"
    program.parent.mkdir()
    answers = f'*show-toplevel*) echo "{here}";; *) echo {commit};;'
    program.write_text(f'#!/bin/sh\ncase "$*" in *"diff --no"*) exec sleep 100;; {answers} esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(source_code, "_SECONDS", 2.0)

    code = user_code(here)

    assert code is not None
    assert code.commit == f"{commit}+"
    assert code.changes.startswith("# unknown: git diff failed")


TRAPS = {
    "fsmonitor": [("core.fsmonitor", "touch sprung; false")],
    "hooks": [("core.hooksPath", "hooks"), ("core.fsmonitor", "true")],
    "filter": [("filter.a.b=c.clean", "touch sprung; cat")],
    "process": [("filter.a.b=c.process", "touch sprung; cat"), ("filter.a.b=c.required", "true")],
    "external diff": [("diff.external", "touch sprung; true")],
    "textconv": [("diff.a.b=c.textconv", "touch sprung; cat")],
    "driver": [("diff.a.b=c.command", "touch sprung; true")],
    "transport": [
        ("remote.origin.url", "ext::touch sprung"),
        ("remote.origin.promisor", "true"),
        ("extensions.partialClone", "origin"),
        ("protocol.ext.allow", "always"),
    ],
}


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("trap", TRAPS)
def test_config_of_an_unpacked_repository_runs_no_program(
    trap: str, included: bool, commit: str, here: Path
) -> None:
    (here / ".gitattributes").write_text("*.py filter=a.b=c diff=a.b=c\n")
    (here / "my_env.py").write_text("speed = 2\n")
    (here / "hooks").mkdir()
    for name in ("query-watchman", "post-index-change"):
        (here / "hooks" / name).write_text("#!/bin/sh\ntouch sprung\n")
        (here / "hooks" / name).chmod(0o755)
    where = ["--file", "included"] if included else ["--local"]
    for key, value in TRAPS[trap]:
        git("config", *where, key, value)
    if included:
        git("config", "include.path", "../included")
    if trap == "transport":  # an object that only the remote has
        blob = git("rev-parse", "HEAD:my_env.py")
        (here / ".git" / "objects" / blob[:2] / blob[2:]).unlink()

    user_code(here)

    assert not (here / "sprung").exists()


def test_changed_submodule_does_not_run_the_programs_of_its_config(commit: str, here: Path) -> None:
    git("init", "-q", "part")
    (here / "part" / "a.py").write_text("a = 1\n")
    git("-C", "part", "add", "a.py")
    git("-C", "part", "commit", "-qm", "Add a part")
    git("-c", "advice.addEmbeddedRepo=false", "add", "part")
    git("commit", "-qm", "Add the part")
    (here / "part" / "a.py").write_text("a = 2\n")
    git("-C", "part", "config", "filter.x.clean", f"touch {here}/sprung; cat")
    (here / "part" / ".git" / "info" / "attributes").write_text("*.py filter=x\n")

    user_code(here)

    assert not (here / "sprung").exists()


@pytest.mark.parametrize(
    "name", [".env", "a/.ENV.local", "prod.env", "b/server.pem", "id_rsa", "credentials.json"]
)
def test_tracked_file_of_passwords_is_named_and_not_copied(
    name: str, commit: str, here: Path
) -> None:
    (here / name).parent.mkdir(exist_ok=True)
    (here / name).write_text("TOKEN=old\n")
    git("add", "-f", name)
    git("commit", "-qm", "Add a token")
    (here / name).write_text("TOKEN=hunter2\n")
    (here / "my_env.py").write_text("speed = 2\n")

    code = user_code(here)

    assert code is not None
    assert "hunter2" not in code.changes
    assert "TOKEN" not in code.changes
    assert "+speed = 2" in code.changes
    assert f"# left out, it may hold passwords: {name}" in code.changes
