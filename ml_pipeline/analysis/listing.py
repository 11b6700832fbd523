"""The list of runs under a folder, and the removal of some of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml

from ml_pipeline.analysis.settings import differing_keys, fitted, short_names, shown_value
from ml_pipeline.errors import UserError, first_line, shorten
from ml_pipeline.foreign import TEXT_BYTES, read_regular
from ml_pipeline.metrics import shown_return
from ml_pipeline.runs.run_folder import YAML_LOADER, RunFolder, check_yaml, flat
from ml_pipeline.runs.signatures import report_change, warn_once

_TOP_LEVEL = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)  # before each key of a config
_LABELS = ("name", "tags", "notes")  # config keys that describe a run
_MOST_CHARACTERS = 60  # of a label
_MOST_BLOCKS = 1_000  # of a config; a run writes fewer than 30


class RunInfo(NamedTuple):
    """One line of the list."""

    run: RunFolder
    status: str  # "died" if the summary says running, but no process trains it
    summary: dict[str, object]


def find_runs(root: Path) -> list[RunInfo]:
    """The runs under ``root``, a folder such as runs/; the one started or resumed last is last."""
    if not root.is_dir():
        raise UserError(
            f"--root {root}: not a folder; runs/ is in the folder where you train, or name your "
            "run_root with --root"
        )
    paths = [path for env in root.iterdir() for path in _folders(env)]  # glob ignores errors
    return sorted((_info(RunFolder(path)) for path in paths), key=_age)


def _folders(env: Path) -> list[Path]:
    """The run folders of an env; a line says if another user does not let this one read them."""
    try:
        return [path for path in env.iterdir() if os.path.isfile(path / "config.yaml")]
    except NotADirectoryError:
        return []
    except OSError as error:
        warn_once(f"{env}: {error.strerror}; its runs are left out")
        return []


def newest_run(root: Path) -> RunFolder:
    """The run under ``root`` that was started or resumed last."""
    runs = find_runs(root) if root.is_dir() else []
    if not runs:
        raise UserError(
            f"latest: {root}/ has no runs; train in this folder, or name a run folder"
            ", or name its run_root with --root"
        )
    return runs[-1].run


def _age(info: RunInfo) -> tuple[float, str]:
    started = _started(info)
    seconds = info.run.config.stat().st_mtime if started is None else started.timestamp()
    return seconds, info.run.name


def _started(info: RunInfo) -> datetime | None:
    """When the run was started or resumed, in local time; None if its summary does not say."""
    try:
        return datetime.fromisoformat(str(info.summary.get("started"))).astimezone()
    except ValueError:
        return None


def _info(run: RunFolder) -> RunInfo:
    try:
        summary = run.read_summary()
    except UserError as error:  # the run is also listed
        warn_once(str(error))
        summary = {}
    status = str(summary.get("status", "unknown"))
    if status == "running" and not run.is_locked():
        status = "died"
    return RunInfo(run, status, summary)


def runs_table(runs: Sequence[RunInfo], width: int) -> tuple[dict[str, list[str]], list[str]]:
    """A row per run with the config keys that differ, and the columns that did not fit."""
    configs = [stored_values(info.run) for info in runs]
    # The path shows the env and the root; labels have columns of their own. A key that older runs
    # lack does not differ for that reason alone.
    keys = [
        key
        for key in differing_keys(configs)
        if key not in ("env.id", "env.target", "run_root", *_LABELS)
        and len({str(config[key]) for config in configs if key in config}) > 1
    ]
    names = short_names(list(dict.fromkeys(["seed", *keys])))
    settings = {
        name: [shown_value(config, key) for config in configs] for key, name in names.items()
    }
    started = [_started(info) for info in runs]
    times = ["-" if each is None else each.isoformat(" ", "minutes") for each in started]
    facts = [info.summary for info in runs]
    steps, means = ([each.get(key) for each in facts] for key in ("env_steps", "mean_reward"))
    needed = {
        "run": [str(info.run.path) for info in runs],
        "status": [info.status for info in runs],
    }
    figures = {
        "env steps": [f"{each:,}" if isinstance(each, int) else "-" for each in steps],
        "return": [shown_return(each) if isinstance(each, float) else "-" for each in means],
    }
    labels = {
        key: [_shown_label(config.get(key)) for config in configs]
        for key in _LABELS
        if any(config.get(key) for config in configs)
    }
    extra = {"seed": settings.pop("seed"), **figures, **labels, **settings, "started": times}
    return fitted(needed, extra, width)


def _shown_label(value: object) -> str:
    words = value if isinstance(value, list) else str(value or "").split()
    text = (", " if isinstance(value, list) else " ").join(map(str, words))
    return shorten(text, _MOST_CHARACTERS) or "-"


def stored_values(run: RunFolder) -> dict[str, object]:
    """The config of a run with dotted keys; empty if it is damaged."""
    try:
        content = read_regular(run.config, most_bytes=TEXT_BYTES)
        report_change(run.config, content)
        return _values(content.decode("utf-8"))
    except (UserError, OSError, ValueError, yaml.YAMLError) as error:  # the run is also listed
        warn_once(f"{run.config} cannot be read: {first_line(error)}")
        return {}


def _values(text: str) -> dict[str, object]:
    """A config with dotted keys. Runs share most of their blocks, so each is parsed once."""
    blocks = _TOP_LEVEL.split(text)
    if len(blocks) > _MOST_BLOCKS:
        return _parsed(text)
    try:
        parts = [_parsed(block) for block in blocks]
    except yaml.YAMLError:  # a text that continues at the start of a line
        return _parsed(text)
    return {key: value for part in parts for key, value in part.items()}


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> dict[str, object]:
    check_yaml(text)
    values = yaml.load(text, Loader=YAML_LOADER)
    return flat(values) if isinstance(values, dict) else {}


def prune(runs: Sequence[RunInfo]) -> None:
    """Remove run folders; raises ``RunFolderError`` for one that a process is training."""
    for info in runs:
        with info.run.locked():
            try:
                shutil.rmtree(info.run.path)
            except OSError as error:
                raise UserError(f"could not remove {info.run.path}: {error}") from error
