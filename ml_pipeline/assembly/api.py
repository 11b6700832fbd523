"""The public functions: ``train`` starts a run, ``load`` returns a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_pipeline.assembly import run
from ml_pipeline.assembly.arguments import (
    Callbacks,
    as_overrides,
    callback_words,
    env_settings,
    named_callbacks,
    network_settings,
)
from ml_pipeline.assembly.compose import with_config_dir
from ml_pipeline.assembly.load import load_policy
from ml_pipeline.assembly.loaded_policy import LoadedPolicy
from ml_pipeline.assembly.run import RunResult
from ml_pipeline.envs.factory import close_env
from ml_pipeline.given import name_of
from ml_pipeline.runs.console import quiet_console
from ml_pipeline.training.contracts import Callback


def train(
    *overrides: str | Sequence[str],
    callbacks: Callbacks | None = None,
    config_dir: Path | str | None = None,
    quiet: bool = False,
    **settings: object,
) -> RunResult:
    """Train as the command line does: ``train("env=acrobot", n_envs=16, agent={"gamma": 0.98})``.

    ``env`` and ``network`` may be classes or functions: ``train(env=MyEnv, network=MyNetwork)``.
    ``callbacks`` are called after those of the config: one, a list, or a dict of ``Callback``
    objects and functions of the loop and the metrics; one that returns False ends the training.
    In a dict, a dict of settings changes a callback of the config, and None removes it.
    ``config_dir`` is a folder with your own YAML files, as for ``--config-dir``. ``quiet`` prints
    nothing.
    """
    words = [word for each in overrides for word in ([each] if isinstance(each, str) else each)]
    named = named_callbacks(callbacks)
    objects = {name: each for name, each in named.items() if isinstance(each, Callback)}
    words += [*setting_words(settings, config_dir), *callback_words(named)]
    with quiet_console(quiet):
        return run.train([*words, *with_config_dir(config_dir)], callbacks=objects)


def setting_words(settings: dict[str, object], config_dir: Path | str | None) -> list[str]:
    """Keyword arguments of ``train`` as words of the command line."""
    resumes = settings.get("resume") is not None
    words: list[str] = []
    for name, value in settings.items():
        if name == "env":
            words += as_overrides(env_settings(value, config_dir))
        elif name == "network":
            for part in network_settings(value, resumes=resumes):
                words += as_overrides(part)
        else:
            words += as_overrides({name: value})
    return words


def load(
    path: Path | str, *, trust: bool = False, env: object = None, network: object = None
) -> LoadedPolicy:
    """The policy of a run folder, or of an exported .onnx or .pt2 file.

    ``latest`` is the run in ``runs`` that was started or resumed last.
    ``trust`` accepts files of another user that can run code (docs/runs.md). ``env`` and
    ``network`` are classes that the run was given and that cannot be imported.
    """
    for given in (env, network):
        if given is not None:
            name_of(given)
    policy, env, env_name = load_policy(path, trust=trust)
    close_env(env)
    return LoadedPolicy(policy, env_name, env.observation_space, env.action_space)
