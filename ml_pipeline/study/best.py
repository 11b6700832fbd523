"""The best trial of a study: as an experiment of conf/, and as a policy in a folder of its own.

A deployed folder is a link to a folder beside it, so that a single rename replaces all of it.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from optuna.trial import FrozenTrial

from ml_pipeline.analysis.evaluate import Evaluation, evaluate
from ml_pipeline.door.compose import CONF, REPOSITORY, compose_config, plain_config
from ml_pipeline.door.load import export_run, load_agent
from ml_pipeline.envs.factory import close_env
from ml_pipeline.errors import UserError
from ml_pipeline.runs.checkpoint import BEST, best_or_latest, checkpoint_path
from ml_pipeline.runs.console import python_command, say
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.study.folder import FileLock, StudyError, StudyFolder, StudySettings
from ml_pipeline.study.report import best_trial
from ml_pipeline.study.space import hydra_explained, param_overrides

EXPERIMENTS = CONF / "experiment"
DEPLOYED = "deployed.json"

_HOW_IT_RUNS = ("device", "logger", "vec_env")  # nothing of what was found


class Duel(NamedTuple):
    """Two policies on the same episodes; there may be no old one."""

    seed: int  # of the first episode
    n_episodes: int
    new: Evaluation
    old: Evaluation | None

    @property
    def is_won(self) -> bool:
        return self.old is None or self.new.mean > self.old.mean


def write_best(name: str, *, deploy: Path | None, n_episodes: int, seed: int | None) -> None:
    """Write the best trial as an experiment; ``deploy`` lets its policy replace a worse one."""
    folder = StudyFolder.open(name)
    settings = folder.read()
    best = best_trial(folder.study().get_trials(deepcopy=False))
    if best is None:
        raise StudyError(f"study {name} has no complete trial yet; see: study status {name}")
    path, command = _write_experiment(name, settings, best)
    say(f"trial {best.number}: {settings.objective} {best.value:.1f}, {best.user_attrs['run_dir']}")
    say(f"experiment: {path}")
    say(f"train it:   {command}")
    if deploy is not None:
        facts = {"study": name, "trial": best.number, "objective": best.value}
        _deploy(RunFolder.open(best.user_attrs["run_dir"]), deploy, facts, n_episodes, seed)


def _write_experiment(name: str, settings: StudySettings, best: FrozenTrial) -> tuple[Path, str]:
    """The file and the command that trains with it."""
    overrides = [*settings.overrides, *param_overrides(settings.space, best.params)]
    with hydra_explained():
        cfg = compose_config(overrides)
    defaults: list[str] = []
    values: dict[str, Any] = {}
    unwritten = []  # a file can set, but not take away
    for override in overrides:
        key, _, value = override.partition("=")
        if key.partition(".")[0] in _HOW_IT_RUNS:
            continue
        if key.startswith("~"):
            unwritten.append(override)
        elif key == "experiment":
            defaults[:0] = [f"  - {value}", "  - _self_"]
        elif (CONF / key).is_dir():
            defaults.append(f"  - override /{key}: {value}")
        else:
            _put(values, key.lstrip("+"), OmegaConf.select(cfg, key.lstrip("+")))
    script = os.path.relpath(REPOSITORY / "train_ppo.py")
    arguments = shlex.join([script, f"experiment=best_{name}", *unwritten])
    lines = [
        "# @package _global_",
        f"# python {shlex.join(['train_ppo.py', f'experiment=best_{name}', *unwritten])}   trial "
        f"{best.number} of study {name}: {settings.objective} {best.value:.1f} with "
        f"seed={best.user_attrs['seed']}",
    ]
    if defaults:
        lines += ["defaults:", *defaults, ""]
    lines.append(yaml.safe_dump(values, sort_keys=False, width=1000))
    path = EXPERIMENTS / f"best_{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines))
    return path, f"{python_command()} {arguments}"


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    if key == "total_steps":
        value = int(value)  # 5e5 is a float to YAML
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[last] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _deploy(
    run: RunFolder, target: Path, facts: Mapping[str, Any], n_episodes: int, seed: int | None
) -> None:
    """Put the run's policy into ``target``, unless the one there is as good on new episodes."""
    target = Path(os.path.abspath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_target(target)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    lock.take(wait=True)
    try:
        # Drawn anew each time: seeds that have chosen once are no longer fresh.
        seed = secrets.randbelow(2**31 - 1 - n_episodes) if seed is None else seed
        duel = _compared(run, target, n_episodes, seed)
        old = "nothing there yet" if duel.old is None else f"{duel.old.mean:.1f} before"
        told = f"{duel.new.mean:.1f} over {n_episodes} episodes from seed {seed}, {old}"
        if not duel.is_won:
            say(f"kept {target}: trial {facts['trial']} reaches {told}")
            return
        _replace(run, target, {**facts, **_figures(run, duel)})
        say(f"deployed to {target}: trial {facts['trial']} reaches {told}")
    finally:
        lock.release()


def _check_target(target: Path) -> None:
    if target.is_file():
        raise StudyError(f"--deploy {target} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / DEPLOYED).is_file():
        raise StudyError(f"--deploy {target} holds something else; name a new or an empty folder")


def _compared(run: RunFolder, target: Path, n_episodes: int, seed: int) -> Duel:
    new = _played(run.path, n_episodes, seed)
    if not (target / DEPLOYED).is_file():
        return Duel(seed, n_episodes, new, None)
    envs = [plain_config(path)["env"] for path in (run.path, target)]
    if envs[0] != envs[1]:
        raise StudyError(
            f"--deploy {target} holds a policy for another env, {envs[1]}, not {envs[0]}; name "
            "another folder"
        )
    return Duel(seed, n_episodes, new, _played(target, n_episodes, seed))


def _played(path: Path, n_episodes: int, seed: int) -> Evaluation:
    trained = load_agent(path)
    try:
        return evaluate(
            trained.agent, trained.env, n_episodes=n_episodes, seed=seed, deterministic=True
        )
    finally:
        close_env(trained.env)


def _figures(run: RunFolder, duel: Duel) -> dict[str, Any]:
    return {
        "run_dir": str(run.path),
        "deployed": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": duel.seed,
        "n_episodes": duel.n_episodes,
        "mean": duel.new.mean,
        "std": duel.new.std,
        "mean_of_the_one_before": None if duel.old is None else duel.old.mean,
    }


def _replace(run: RunFolder, target: Path, facts: Mapping[str, Any]) -> None:
    """Make the new folder whole, then let ``target`` be it by one rename."""
    made = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    before = target.resolve()
    try:
        _write_artefact(run, RunFolder(made))
        write_text(made / DEPLOYED, json.dumps(facts, indent=2) + "\n")
        link = made.with_name(f"{made.name}.link")
        link.symlink_to(made.name, target_is_directory=True)
        if target.is_dir() and not target.is_symlink():
            # Empty, or copied here by hand: a link cannot be renamed over a folder.
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
    """What is deployed: the exported policy, and the run folder with the checkpoint it is of."""
    made.make()
    shutil.copy2(run.config, made.config)
    checkpoint = checkpoint_path(run, best_or_latest(run))
    shutil.copy2(checkpoint, checkpoint_path(made, BEST))
    for path in (made.config, checkpoint_path(made, BEST)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        export_run(made.path, None, file_format="pt2")
    except UserError as error:  # a network of the user's that is no graph; the rest serves
        say(f"without policy.pt2: {error}")
