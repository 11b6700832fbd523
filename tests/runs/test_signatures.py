"""The key that signs files: only one that no other user can know or replace is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Capture

from ml_pipeline.runs import signatures
from ml_pipeline.runs.signatures import NoKeyError, is_signed, signature, user_key
from ml_pipeline.worlds.trading.data.cache import default_folder


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "it is a link or a special file"),
    "fifo": (fifo, "it is a link or a special file"),
    "folder": (folder, "it is a link or a special file"),
    **{
        oct(mode): (lambda path, mode=mode: path.chmod(mode), "others can read or change it")
        for mode in (0o666, 0o602, 0o620, 0o644, 0o640)
    },
}


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
@pytest.mark.parametrize("kind", UNSAFE)
def test_key_that_others_may_know_is_not_used_and_said_once(
    kind: str, config_home: Path, capsys: Capture
) -> None:
    signed = b"text" + signature("config", b"text")
    assert is_signed("config", signed)
    make, reason = UNSAFE[kind]
    path = config_home / "ml_pipeline" / "snapshot.key"
    make(path)
    signatures.warn_once.cache_clear()

    assert not is_signed("config", signed)
    assert signature("config", b"text") == b""
    with pytest.raises(NoKeyError, match=reason):
        user_key()

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"the key {path} is not used: {reason}")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has no user ids")
def test_key_of_another_user_is_not_used(
    config_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54_321)

    with pytest.raises(NoKeyError, match="it belongs to another user"):
        user_key()


@pytest.mark.parametrize("given", ["config", "./config", "..", ""])
def test_relative_folders_of_the_environment_are_ignored(
    given: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", given)
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(here / "home"))

    assert len(user_key()) == 32

    assert (here / "home" / ".config" / "ml_pipeline" / "snapshot.key").is_file()
    assert default_folder() == here / "home" / ".cache" / "ml_pipeline" / "markets"
    assert [path.name for path in here.iterdir()] == ["home"]
