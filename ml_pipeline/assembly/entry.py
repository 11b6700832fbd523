"""Training from a command line: Hydra composes the config, ``build.run`` trains.

Torch is imported inside functions, so that --help and errors of the config come quickly.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import hydra
import yaml
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ml_pipeline.assembly.compose import (
    COMPOSE_ERRORS,
    as_typed,
    checked_config,
    compose_config,
    find_modules_in_cwd,
    opened,
    own_conf,
    own_folders,
    preset_of_env,
    resumed_folder,
    store_schema,
    with_newest_run,
)
from ml_pipeline.assembly.explain import ConfigError, explained
from ml_pipeline.assembly.sweeps import SweepReport, check_launcher
from ml_pipeline.assembly.words import check_order, pasteable, repeated, translated
from ml_pipeline.errors import UserError, refused_path
from ml_pipeline.foreign import TEXT_BYTES, read_regular
from ml_pipeline.moved import moved
from ml_pipeline.runs.console import numbered_output, say, user_command
from ml_pipeline.runs.run_folder import RunFolder, check_yaml, stamped_name
from ml_pipeline.shelves import CONF, conf_folders, preset_files
from ml_pipeline.targets import ALGORITHM_OF_OLD_RUNS

# The keys that choose an env, or a run or data that fit only one.
_CHOOSES_ENV = ("env", "env.id", "env.target", "experiment", "data", "init_from")


def with_agent(words: Sequence[str], agent: str, preset: str | None = None) -> list[str]:
    """The command line with agent=``agent``; one with its own agent= and a resume stay.

    ``preset`` replaces agent= if nothing on the command line chooses an env.
    """
    if any(word.startswith("agent=") for word in words):
        return list(words)
    if any(word.startswith("resume=") for word in words):
        _check_agent(words, agent, "resume", _agent_of_run)
        return list(words)
    _check_agent(words, agent, "experiment", _agent_of)
    if preset is not None and not any(word.partition("=")[0] in _CHOOSES_ENV for word in words):
        return with_overrides(words, [f"experiment={preset}"])
    return list(words) if agent == default_agent() else with_overrides(words, [f"agent={agent}"])


def check_words(command_line: Sequence[str], agent: str | None = None) -> None:
    """Refuse words that are not key=value, in one line that shows what to type instead."""
    words = list(command_line[1:])
    if not any(translated(words, {}, {})[1:]):
        return
    options = group_options()
    # A second time, as flags may change the agent or the size of a rollout.
    first = translated(words, config_of(words, agent), options)
    found = translated(words, config_of(first.arguments, agent), options)
    facts = list(found.needless)
    if others := [*found.replaced, *found.unknown]:
        facts.insert(0, f"{', '.join(others)}: settings are key=value")
    if found.unknown:
        facts.append(f"no setting is like {', '.join(found.unknown)}, --help lists them")
    if found.replaced or found.needless:
        command = f"{user_command('train', agent=agent)} {pasteable(found.arguments)}"
        facts.append(f"write: {command.rstrip()}")
    raise ConfigError("; ".join(facts))


def group_options() -> dict[str, list[str]]:
    """The groups of the config and their options, also those of conf/ in this folder."""
    groups = {each.name for folder in (CONF, *conf_folders()) for each in folder.iterdir()}
    options = {
        group: list(preset_files(group)) for group in sorted(groups - {"study", "train.yaml"})
    }
    for path in (each for folder in own_folders(None) for each in folder.glob("*/*.yaml")):
        options.setdefault(path.parent.name, []).append(path.stem)
    return options


def config_of(words: Sequence[str], agent: str | None) -> dict[str, object]:
    """The config of the key=value words; of fewer if they contain a mistake, reported later."""
    pairs = [word for word in words if "=" in word and not word.startswith("-")]
    if agent is not None and not any(each.startswith("agent=") for each in pairs):
        pairs = [f"agent={agent}", *pairs]
    top = [each for each in pairs if "." not in each.partition("=")[0]]
    for overrides in (pairs, top, [each for each in top if each.startswith("agent=")], []):
        with suppress(ConfigError):
            cfg = compose_config(overrides)
            return cast("dict[str, object]", OmegaConf.to_container(cfg, resolve=False))
    return {}


def default_agent() -> str:
    """The option of agent= in conf/train.yaml."""
    groups = (each for each in _defaults(CONF / "train.yaml") if isinstance(each, dict))
    return next(str(each["agent"]) for each in groups if "agent" in each)


def _check_agent(
    words: Sequence[str], agent: str, key: str, agent_of: Callable[[str], str | None]
) -> None:
    """Refuse a preset or a run of another agent of ours; those of a user's own are accepted."""
    for value in _values(words, key):
        trained = agent_of(value)
        if trained is None:
            continue
        script = trained
        if not (CONF.parent / f"train_{trained}.py").is_file():  # any script resumes its runs
            script = agent if key == "resume" else default_agent()
        if script != agent:
            raise ConfigError(f"{key}={value}: trains agent={trained}; use train_{script}.py")


def _values(words: Sequence[str], key: str) -> list[str]:
    """The values of ``key`` on the command line, without Hydra's quotes; several in a sweep."""
    pairs = (word.partition("=") for word in words)
    return [each.strip("'\"") for name, _, text in pairs if name == key for each in text.split(",")]


def _agent_of(name: str) -> str | None:
    """The agent of an experiment or of the one that it extends; None for an unknown name."""
    path = preset_files("experiment").get(name)
    if path is None:
        return None
    agent = default_agent()
    for entry in _defaults(path):
        if isinstance(entry, str):
            agent = _agent_of(entry) or agent
        else:
            agent = entry.get("override /agent", agent)
    return agent


def _agent_of_run(path: str) -> str | None:
    """The agent of a run folder; None if it is not ours, or for a folder that cannot be read."""
    try:
        content = read_regular(RunFolder.open(path).config, most_bytes=TEXT_BYTES)
        text = content.decode("utf-8")
        check_yaml(text)
        config = yaml.safe_load(text)
    except (UserError, OSError, ValueError, yaml.YAMLError):
        return None  # the resume reports it
    settings = config.get("agent") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return None
    algorithm = moved(str(settings.get("algorithm") or ALGORITHM_OF_OLD_RUNS))
    for option, file in preset_files("agent").items():
        if yaml.safe_load(file.read_text(encoding="utf-8")).get("algorithm") == algorithm:
            return option
    return None


def _defaults(path: Path) -> list[str | dict[str, str]]:
    return list(yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", []))


def with_overrides(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """The command line with more overrides; Hydra accepts them only next to each other."""
    is_override = [not w.startswith("-") and ("=" in w or w.startswith("~")) for w in words[1:]]
    place = 1 + (is_override.index(True) if True in is_override else len(is_override))
    return [*words[:place], *added, *words[place:]]


def train(command_line: Sequence[str]) -> None:
    """Train with a program name and Hydra's arguments; raises ``UserError``."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    store_schema()
    OmegaConf.register_new_resolver("command", partial(user_command, python="python"), replace=True)

    def run_job(cfg: DictConfig) -> float:
        sys.argv = list(command_line)  # the run folder records it
        return _run(cfg)

    failure: Exception | None = None
    all_finished = True
    check_launcher(command_line)
    check_order(command_line)
    for line in repeated(command_line[1:]):
        say(line)
    command_line = with_newest_run(command_line)
    own = [
        *preset_of_env(command_line[1:]),
        *own_conf(command_line),
        *_own_folder(command_line),
    ]
    callers = sys.argv
    sys.argv = opened(with_overrides(command_line, own))  # Hydra reads it
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(run_job)()
    except _FailedError as failed:
        failure = failed.error
    except COMPOSE_ERRORS as error:
        raise ConfigError(explained(error, command_line[1:])) from error
    except BrokenProcessPool:
        failure = UserError(
            "the process of a job was killed, often for memory; fewer at a time: "
            "hydra.launcher.n_jobs=1"
        )
    finally:
        all_finished = SweepReport.tell()
        sys.argv = callers
    if failure is not None:
        raise failure
    if not all_finished:
        sys.exit(1)  # each job has printed its error


def _own_folder(command_line: Sequence[str]) -> list[str]:
    """A sweep folder with a random suffix: two sweeps may start within one second."""
    if not {"-m", "--multirun"} & set(command_line):
        return []
    if any(word.startswith("hydra.sweep.dir=") for word in command_line):
        return []
    return [f"hydra.sweep.dir=${{run_root}}/sweeps/{stamped_name()}"]


class _FailedError(BaseException):
    """Carries an error past Hydra, which adds its own lines to every ``Exception``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _run(cfg: DictConfig) -> float:
    """One run; returns the value of ``cfg.objective`` for sweepers."""
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return _run_in_sweep(cfg, job)
    try:
        from ml_pipeline.assembly.restarts import find_start
        from ml_pipeline.assembly.run import run as run_once

        find_modules_in_cwd()
        start = find_start(cfg, _typed_overrides(job))
        if start.is_complete:
            return math.nan
        return run_once(start.cfg, start.overrides, folder=start.folder).objective
    except Exception as error:
        raise _FailedError(error) from None


def _typed_overrides(job: HydraConf) -> list[str]:
    # Not resolved: a value may be an interpolation, whose error belongs to its key.
    return as_typed(cast("list[str]", OmegaConf.to_container(job.overrides.task, resolve=False)))


def _run_in_sweep(cfg: DictConfig, job: HydraConf) -> float:
    """One job of a sweep, recorded in the folder of the sweep, with its share of the cores.

    Returns nan if the job failed.
    """
    from ml_pipeline.assembly.plan import new_folder
    from ml_pipeline.assembly.run import run as run_once
    from ml_pipeline.assembly.sweeps import end_with_parent, noted_job, requeued_run, share_of_cores
    from ml_pipeline.envs.workers.cores import CORES_VARIABLE, available_cores
    from ml_pipeline.signals import Interrupted

    if "n_jobs" in job.launcher and CORES_VARIABLE not in os.environ:  # one process per job
        os.environ[CORES_VARIABLE] = str(share_of_cores(job.launcher.n_jobs, available_cores()))
        end_with_parent()
    folder, overrides, number = Path(job.sweep.dir), _typed_overrides(job), job.job.num
    earlier = requeued_run(folder, number)
    with numbered_output(number):
        try:
            with noted_job(folder, number, overrides) as note:
                say(" ".join(each for each in overrides if each not in sys.argv))  # the swept ones
                find_modules_in_cwd()
                if earlier is not None:
                    overrides = [f"resume={earlier}"]  # the stored config has all the rest
                    cfg = compose_config(overrides)
                run = new_folder(checked_config(cfg))
                note.started(
                    resumed_folder(str(cfg.resume), trust=cfg.trust).path
                    if cfg.resume
                    else run.path
                )
                objective = run_once(cfg, overrides, sweep=folder.name, folder=run).objective
                note.finished(objective)
                return objective
        except Interrupted as stop:
            raise SystemExit(stop.exit_code) from None
        # Raised, an error would reach the user twice, through Hydra after all other jobs.
        except UserError as error:
            print(f"failed: {error}", file=sys.stderr)
        except Exception as error:
            if line := refused_path(error):
                print(f"failed: {line}", file=sys.stderr)
            else:
                traceback.print_exc()
    return math.nan
