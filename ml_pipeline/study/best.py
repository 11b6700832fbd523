"""The best trial of a study: write it as an experiment of conf/, and deploy its policy.

A deployed folder is a link to a folder beside it, so one rename replaces all of its files.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

from filelock import FileLock
from omegaconf import OmegaConf
from optuna.trial import FrozenTrial, TrialState

from ml_pipeline.analysis.evaluate import left_out
from ml_pipeline.assembly.compose import (
    compose_config,
    plain_config,
    stored_config,
    with_config_dir,
)
from ml_pipeline.assembly.load import export_run
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import counted
from ml_pipeline.runs.checkpoint import BEST, best_or_latest, checkpoint_path
from ml_pipeline.runs.console import say, user_command
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.study.folder import StudyError, StudyFolder, StudySettings, finished
from ml_pipeline.study.judging import judged_facts
from ml_pipeline.study.report import figure, ranked
from ml_pipeline.study.space import is_group, param_overrides
from ml_pipeline.study.trials import evaluate_run

DEPLOYED = "deployed.json"

# They belong to the machine or to the run, not to the result.
_NOT_WRITTEN = ("device", "cpu_threads", "logger", "vec_env", "name", "notes", "tags", "run_root")


def write_best(
    name: str, *, deploy: Path | None, n_episodes: int, seed: int | None, trust: bool = False
) -> None:
    """Write the best trial as an experiment; deploy its policy if the deployed one is worse.

    An env that judges its runs, such as trading, may refuse the deployment.

    ``trust`` accepts a study, a run and a deployed policy of another user that can run code.
    """
    folder = StudyFolder.open(name)
    folder.trust = trust
    settings = folder.read_own(trust=trust)
    trials = folder.read_trials()
    complete = ranked(trials)
    if not complete:
        raise StudyError(f"study {name} has no complete trial yet; see: study status {name}")
    best = complete[0]
    if not {"run_dir", "seed"} <= set(best.user_attrs):
        raise StudyError(
            f"{folder.journal} is damaged: trial {best.number} has no run_dir and seed"
        )
    path, arguments = _write_experiment(name, settings, best)
    run_dir = best.user_attrs["run_dir"]
    say(f"trial {best.number}: {settings.objective} {figure(best.value)}, {run_dir}")
    say(f"experiment: {path}")
    say(f"train it:   {user_command('train')} {arguments}")
    if deploy is not None:
        run = RunFolder.open(run_dir, trust=trust)
        looked_at = [each for each in finished(trials) if each.state != TrialState.FAIL]
        verdict = judged_facts(run, stored_config(run), n_trials=len(looked_at))
        facts = {"study": name, "trial": best.number, "objective": best.value, **verdict}
        deploy_run(run, deploy, facts, n_episodes=n_episodes, seed=seed, trust=trust)


def _write_experiment(name: str, settings: StudySettings, best: FrozenTrial) -> tuple[Path, str]:
    """Write the YAML file; return its path and the arguments that train with it."""
    overrides = [*settings.overrides, *param_overrides(settings.space, best.params)]
    cfg = compose_config([*overrides, *with_config_dir(settings.config_dir)])
    defaults: list[str] = []
    values = OmegaConf.create()
    removed = []  # a YAML file cannot remove a key
    for override in overrides:
        key, _, value = override.partition("=")
        if key.partition(".")[0] in _NOT_WRITTEN:
            continue
        if key.startswith("~"):
            removed.append(override)
        elif key == "experiment":
            defaults[:0] = [f"  - {value}", "  - _self_"]
        elif is_group(key):
            defaults.append(f"  - override /{key}: {value}")
        else:
            key = key.lstrip("+")
            value = OmegaConf.select(cfg, key)
            # YAML reads 5e5 as a float.
            OmegaConf.update(values, key, int(value) if key == "total_steps" else value)
    options = ["--config-dir", settings.config_dir] if settings.config_dir is not None else []
    arguments = shlex.join([*options, f"experiment=best_{name}", *removed])
    command = user_command("train", python="python")
    lines = [
        "# @package _global_",
        f"# {command} {arguments}   trial {best.number} of study {name}: "
        f"{settings.objective} {figure(best.value)} with seed={best.user_attrs['seed']}",
        *(["defaults:", *defaults, ""] if defaults else []),
        OmegaConf.to_yaml(values),
    ]
    # The user's own folder, not that of the package; Hydra also searches conf/ in this folder.
    path = Path(settings.config_dir or "conf") / "experiment" / f"best_{name}.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"cannot create {path.parent}: {error.strerror}") from error
    write_text(path, "\n".join(lines))
    return path, arguments


def deploy_run(
    run: RunFolder,
    target: Path,
    facts: Mapping[str, object],
    *,
    n_episodes: int,
    seed: int | None,
    trust: bool = False,
) -> None:
    """Put the run's policy into ``target`` if it beats the deployed one on new episodes."""
    target = Path(os.path.abspath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        is_first = _is_first(run, target, trust=trust)
        # A new seed each time: the deployed policy won on the episodes of the last seed.
        seed = secrets.randbelow(2**31 - 1 - n_episodes) if seed is None else seed
        play = partial(evaluate_run, checkpoint=None, n_episodes=n_episodes, seed=seed, trust=trust)
        new = play(run.path)
        old = None if is_first else play(target)
        before = "no policy before" if old is None else f"{figure(old.mean)} before"
        if line := left_out(new, n_episodes):
            say(line)
        played = counted(len(new.episodes), "episode")
        result = f"{figure(new.mean)} over {played} from seed {seed}, {before}"
        if old is not None and new.mean <= old.mean:
            say(f"kept {target}: trial {facts['trial']} reaches {result}")
            return
        figures = {
            "run_dir": str(run.path),
            "deployed": datetime.now().astimezone().isoformat(timespec="seconds"),
            "seed": seed,
            "n_episodes": len(new.episodes),
            "mean": new.mean,
            "std": new.std,
            "mean_of_the_one_before": None if old is None else old.mean,
        }
        _replace(run, target, {**facts, **figures})
        say(f"deployed to {target}: trial {facts['trial']} reaches {result}")


def _is_first(run: RunFolder, target: Path, *, trust: bool) -> bool:
    """Whether ``target`` has no policy yet; refuses a folder with other files."""
    if target.is_file():
        raise StudyError(f"--deploy {target}: is a file; name a folder")
    if not (target / DEPLOYED).is_file():
        if target.is_dir() and any(target.iterdir()):
            raise StudyError(f"--deploy {target}: has other files; name a new or empty folder")
        return True
    new = plain_config(run.path, trust=trust)["env"]
    old = plain_config(target, trust=trust)["env"]
    if new != old:
        raise StudyError(
            f"--deploy {target}: has a policy for another env, {old}, not {new}; name another "
            "folder"
        )
    return False


def _replace(run: RunFolder, target: Path, facts: Mapping[str, object]) -> None:
    """Write a complete new folder, then rename a link to it over ``target``."""
    made = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    before = target.resolve()
    try:
        _write_artefact(run, RunFolder(made, trust=run.trust))
        write_text(made / DEPLOYED, json.dumps(facts, indent=2) + "\n")
        link = made.with_name(f"{made.name}.link")
        link.symlink_to(made.name, target_is_directory=True)
        if target.is_dir() and not target.is_symlink():
            # Empty, or a copy made by hand: a link cannot be renamed over a folder.
            before = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
            target.rename(before)
        os.replace(link, target)
    except BaseException:
        if target.resolve() != made:
            shutil.rmtree(made, ignore_errors=True)
        raise
    if before != target and before.name.startswith(f".{target.name}."):
        shutil.rmtree(before, ignore_errors=True)


def _write_artefact(run: RunFolder, made: RunFolder) -> None:
    """Write the exported policy, and a run folder with its config and checkpoint."""
    made.make()
    best = checkpoint_path(made, BEST)
    shutil.copy2(run.config, made.config)
    shutil.copy2(checkpoint_path(run, best_or_latest(run)), best)
    for path in (made.config, best):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        export_run(made.path, None, file_format="pt2", trust=made.trust)
    except UserError as error:  # the user's network may not be exportable
        say(f"deployed without policy.pt2: {error}")
