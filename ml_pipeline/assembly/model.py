"""PPO, DQN and SAC as one object: it learns, predicts, is evaluated, saved and loaded.

``PPO("CartPole-v1", seed=1).learn(100_000)`` is ``train`` with an object around its run folder:
commands, checkpoints and a resume work as for every other run.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from ml_pipeline.analysis.evaluate import Evaluation, left_out
from ml_pipeline.assembly import api
from ml_pipeline.assembly.agent import agent_name, config_class
from ml_pipeline.assembly.arguments import Callbacks, named_callbacks
from ml_pipeline.assembly.compose import stored_config
from ml_pipeline.assembly.load import TrainedAgent, chosen, load_agent
from ml_pipeline.assembly.loaded_policy import LoadedPolicy
from ml_pipeline.envs.factory import close_env
from ml_pipeline.errors import UserError
from ml_pipeline.given import name_of
from ml_pipeline.runs.checkpoint import LATEST
from ml_pipeline.runs.console import quiet_console, say
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.shelves import preset_files
from ml_pipeline.training.contracts import Callback

ModelT = TypeVar("ModelT", bound="Model")


class ModelError(UserError):
    """A model cannot do what was asked of it now."""


class Model:
    """An agent with its envs and settings; ``PPO``, ``DQN`` and ``SAC`` are the classes to use."""

    agent: ClassVar[str]  # the option of agent=

    def __init__(
        self,
        env: object,
        *more: object,
        network: object = None,
        callbacks: Callbacks | None = None,
        seed: int = 1,
        run_folder: bool = True,
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        """``env``, ``network`` and ``callbacks`` as for ``train``.

        ``settings`` are hyperparameters of the agent, such as ``learning_rate``, or other settings
        of ``train``, such as ``n_envs``. With ``run_folder=False`` nothing is left on the disk.
        """
        name = type(self).__name__
        if more or (isinstance(env, str) and env.endswith("Policy")):
            raise ModelError(
                f"{name} takes the env first and no policy: {name}('CartPole-v1', network='mlp')"
            )
        hyperparameters = _hyperparameters(self.agent)
        own = {key: settings.pop(key) for key in list(settings) if key in hyperparameters}
        if "agent" in settings:
            raise ModelError(f"{name}: agent=...: pass its hyperparameters as arguments")
        self._settings = {"env": env, "seed": seed, "agent": own, **settings}
        if network is not None:
            self._settings["network"] = network
        self._callbacks = named_callbacks(callbacks)
        self._quiet = quiet
        self._temporary = None if run_folder else tempfile.TemporaryDirectory()
        if self._temporary is not None:
            self._settings |= {"run_root": self._temporary.name, "logger": "none"}
        self._run: Path | None = None
        self._is_saved = False  # in a folder that learning must not change
        self._trained: tuple[TrainedAgent, LoadedPolicy] | None = None

    @property
    def run_dir(self) -> Path | None:
        """The run folder, for the commands; None before the first ``learn``."""
        return self._run

    def learn(
        self: ModelT, total_timesteps: float, *, callbacks: Callbacks | None = None
    ) -> ModelT:
        """Train for this many env steps, in whole iterations; a second call continues the run."""
        every: Any = {**self._callbacks, **named_callbacks(callbacks)}
        if self._run is None:
            settings = {**self._settings, "total_steps": total_timesteps}
            result = api.train(
                f"agent={self.agent}", callbacks=every, quiet=self._quiet, **settings
            )
        else:
            run = self._own_run(self._run)
            result = api.train(
                resume=run,
                total_steps=_steps_after(run, total_timesteps),
                callbacks={k: each for k, each in every.items() if isinstance(each, Callback)},
                quiet=self._quiet,
            )
        self._close()
        self._run, self._is_saved = result.run_dir, False
        return self

    def predict(self, obs: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action for one observation, or the actions for a batch of them."""
        _, policy = self._loaded()
        return policy.predict(obs, deterministic=deterministic, action_mask=action_mask)

    def reset(self) -> None:
        """Start new episodes; only a recurrent policy needs it."""
        self._loaded()[1].reset()

    def evaluate(
        self, n_episodes: int = 10, *, seed: int = 0, deterministic: bool = True
    ) -> Evaluation:
        """Play episodes; the result has ``mean``, ``std`` and every episode.

        Episodes of a deterministic env that repeat the first ones are left out, which is said.
        """
        trained, _ = self._loaded()
        result = trained.evaluate(n_episodes=n_episodes, seed=seed, deterministic=deterministic)
        with quiet_console(self._quiet):
            if line := left_out(result, n_episodes):
                say(line)
        return result

    def save(self, path: Path | str) -> Path:
        """Copy the run folder to ``path``, which replaces a model that was saved there."""
        run, path = self._learnt(), Path(path)
        if path.exists() and not (path / "config.yaml").is_file():
            raise ModelError(f"{path} exists and is not a saved model; choose another path")
        if path.exists() and path.samefile(run):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        _copy(run, new)
        if path.exists():
            old = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            os.replace(path, old)
            os.replace(new, path)
            shutil.rmtree(old)
        else:
            os.replace(new, path)
        return path

    @classmethod
    def load(
        cls: type[ModelT],
        path: Path | str,
        *,
        env: object = None,
        network: object = None,
        trust: bool = False,
        quiet: bool = False,
    ) -> ModelT:
        """A saved model or a run folder; ``learn`` continues in a new run folder.

        ``env`` and ``network`` are classes that cannot be imported. ``trust`` accepts files of
        another user that can run code.
        """
        for given in (env, network):
            if given is not None:
                name_of(given)
        run = RunFolder.open(chosen(path), trust=trust)
        trained_by = agent_name(stored_config(run))
        if trained_by != cls.agent:
            raise ModelError(f"{path}: was trained by agent={trained_by}, not {cls.agent}")
        model = cls(env, quiet=quiet)
        model._run, model._is_saved = run.path, True
        model._trained = _load(run.path, trust=trust)
        return model

    def _learnt(self) -> Path:
        if self._run is None:
            raise ModelError("the model has learnt nothing yet; call learn(total_timesteps) first")
        return self._run

    def _loaded(self) -> tuple[TrainedAgent, LoadedPolicy]:
        if self._trained is None:
            self._trained = _load(self._learnt())
        return self._trained

    def _own_run(self, run: Path) -> Path:
        """The run folder to continue in; a saved model stays as it is."""
        if not self._is_saved:
            return run
        config = stored_config(RunFolder(run))
        own = RunFolder.unused(Path(config.run_root), config.env.name, config.name).path
        own.parent.mkdir(parents=True, exist_ok=True)
        _copy(run, own)
        return own

    def _close(self) -> None:
        if self._trained is not None:
            close_env(self._trained[0].env)
        self._trained = None


def _load(run: Path, *, trust: bool = False) -> tuple[TrainedAgent, LoadedPolicy]:
    trained = load_agent(run, LATEST, trust=trust)
    spaces = trained.env.observation_space, trained.env.action_space
    return trained, LoadedPolicy(trained.agent, trained.env_name, *spaces)


def _copy(run: Path, new: Path) -> None:
    shutil.copytree(run, new, ignore=shutil.ignore_patterns("wandb", "tensorboard", ".lock"))


def _steps_after(run: Path, more: float) -> int:
    """The goal of a run that trains ``more`` env steps, at least one iteration."""
    config = stored_config(RunFolder(run))
    done = int(str(RunFolder(run).read_summary().get("env_steps", 0)))
    iteration = config.agent.iteration_steps(int(config.n_envs))
    return done + max(int(more) // iteration, 1) * iteration


def _hyperparameters(agent: str) -> set[str]:
    text = preset_files("agent")[agent].read_text(encoding="utf-8")
    found = config_class(str(yaml.safe_load(text)["algorithm"]), "agent.algorithm")
    return {field.name for field in dataclasses.fields(found)}


class PPO(Model):
    """Proximal policy optimisation."""

    agent = "ppo"


class DQN(Model):
    """Deep Q-learning, for discrete actions."""

    agent = "dqn"


class SAC(Model):
    """Soft actor-critic."""

    agent = "sac"
