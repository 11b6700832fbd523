"""Trained agents and exported policies, loaded from run folders and files.

init_from=RUN reads only the checkpoint of that run, with ``weights_only=True``. Its config names
classes, but nothing imports them, so a folder of another user needs no trust.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from ml_pipeline.analysis.evaluate import (
    MOST_ENVS,
    Evaluation,
    evaluate_batch,
    make_evaluation_envs,
    without_repeats,
)
from ml_pipeline.analysis.listing import newest_run
from ml_pipeline.assembly.agent import build_agent, find_algorithm
from ml_pipeline.assembly.build import build_env_factory, cpu_context
from ml_pipeline.assembly.compose import find_modules_in_cwd, stored_config
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.assembly.trust import check_names
from ml_pipeline.config.train import RUN_ROOT, EnvConfig, TrainConfig
from ml_pipeline.deploy.export import Agreement, export_policy
from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.device import torch_threads
from ml_pipeline.envs.factory import close_env
from ml_pipeline.envs.judged import HasExportFacts
from ml_pipeline.envs.kinds import AnyEnv, AnyVectorEnv
from ml_pipeline.errors import UserError, first_line
from ml_pipeline.policy.contracts import Policy, Spaces
from ml_pipeline.policy.space_data import space_to_data
from ml_pipeline.runs.checkpoint import (
    best_or_latest,
    check_fits,
    checkpoint_path,
    load_checkpoint,
    misfit_explained,
    named_checkpoint,
)
from ml_pipeline.runs.console import is_job, say
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.contracts import Agent

_LATEST_RUN = "latest"


class TrainedAgent(NamedTuple):
    """An agent from a checkpoint, and a single env of the kind that evaluates it."""

    agent: Agent
    env: AnyEnv
    make_envs: Callable[..., AnyVectorEnv]  # n_envs=: for evaluate_batch
    env_name: str
    seed: int  # of the run
    checkpoint: str
    env_steps: int
    is_deterministic: bool  # the env declares that the actions alone decide an episode

    def evaluate(self, *, n_episodes: int, seed: int, deterministic: bool) -> Evaluation:
        """Play episodes in several envs at once, without those that repeat the first ones."""
        is_one_enough = deterministic and self.is_deterministic
        n_envs = 1 if is_one_enough else min(n_episodes, MOST_ENVS)
        with closing(self.make_envs(n_envs=n_envs)) as envs:
            return without_repeats(
                partial(evaluate_batch, self.agent, envs, deterministic=deterministic),
                n_episodes=n_episodes,
                seed=seed,
                deterministic=deterministic,
                is_deterministic=self.is_deterministic,
            )


def load_agent(
    path: Path | str,
    checkpoint: str | None = None,
    *,
    render_mode: str | None = None,
    env: EnvConfig | None = None,
    trust: bool = False,
) -> TrainedAgent:
    """The agent of a run folder or checkpoint file, on the CPU.

    ``checkpoint`` None: the file's, or the best if there is one. ``env`` None: that of the run.

    ``trust`` accepts a config of another user that names their own classes, which run code.
    """
    path = chosen(path)
    run_folder = RunFolder.open(path, trust=trust)
    config = stored_config(run_folder)
    checkpoint = checkpoint or named_checkpoint(path) or best_or_latest(run_folder)
    played = env or config.evaluated_env
    if env is None and config.needs_two_players:
        raise ConfigError(f"env {played.name} needs two players; name the other one by --opponent")
    make_env = build_env_factory(played)
    if render_mode is not None:
        make_env = make_env.rendering(render_mode)
    made = own = make_env()
    if env is not None:
        own = build_env_factory(config.evaluated_env)()
        close_env(own)
        _check_spaces(made, own, played.name, run_folder)
    own_spaces = Spaces(own.observation_space, own.action_space)
    agent, env_steps = restored_agent(run_folder, config, checkpoint, own_spaces)
    make_envs = partial(make_evaluation_envs, make_env, config.vec_env)
    return TrainedAgent(
        agent,
        made,
        make_envs,
        played.name,
        config.seed,
        checkpoint,
        env_steps,
        make_env.is_deterministic,
    )


def _check_spaces(env: AnyEnv, own: AnyEnv, name: str, run_folder: RunFolder) -> None:
    """Refuse an env with other spaces; bounds of observations do not matter to a policy."""
    same = is_space_dtype_shape_equiv(env.observation_space, own.observation_space)
    for fits, new, old in (
        (same, env.observation_space, own.observation_space),
        (env.action_space == own.action_space, env.action_space, own.action_space),
    ):
        if not fits:
            close_env(env)
            raise ConfigError(
                f"env {name} has the space {new}, but {run_folder.path} was trained with {old}"
            )


def restored_agent(
    run_folder: RunFolder,
    config: TrainConfig,
    checkpoint: str,
    env_spaces: Spaces,
    *,
    noise_seed: int | None = None,
) -> tuple[Agent, int]:
    """The agent of a checkpoint and its env steps; ``env_spaces``: of a single env.

    ``noise_seed`` None: sampled actions continue with the generator of the checkpoint.
    """
    state = load_checkpoint(run_folder, checkpoint)
    context = cpu_context(config)
    if noise_seed is not None:
        context = context._replace(seed=noise_seed)
    agent = build_agent(config, env_spaces, context)
    with misfit_explained(run_folder):
        own, saved = agent.state_dict(), state["agent"]
        check_fits(own, saved, "agent")
        if noise_seed is not None:
            saved |= {name: own[name] for name in own if name.startswith("act_")}
        agent.load_state_dict(saved)
        return agent, int(state["env_steps"])


def is_run(path: Path | str) -> bool:
    """Whether ``path`` can be a run folder or a checkpoint; False for an exported policy."""
    return os.path.isdir(path) or named_checkpoint(path) is not None


def load_policy(
    path: Path | str, *, render: str | None = None, trust: bool = False
) -> tuple[Policy, AnyEnv, str]:
    """The policy of an exported file or of a run, an env for it, and the env's name.

    ``latest`` is the run in ``runs`` that was started or resumed last. ``trust`` accepts files of
    another user that can run code.
    """
    path = chosen(path)
    if is_run(path):
        trained = load_agent(path, render_mode=render, trust=trust)
        return trained.agent, trained.env, trained.env_name
    policy = ExportedPolicy.load(path, trust=trust)
    make_env = build_env_factory(exported_env(policy, path, trust=trust))
    env = make_env() if render is None else make_env.rendering(render)()
    for own, expected in (
        (env.observation_space, policy.observation_space),
        (env.action_space, policy.action_space),
    ):
        if space_to_data(own) != space_to_data(expected):
            close_env(env)
            raise ConfigError(
                f"env {policy.env_name} has the space {own}, but {path} was made for {expected}"
            )
    return policy, env, policy.env_name


def exported_env(policy: ExportedPolicy, path: Path | str, *, trust: bool) -> EnvConfig:
    """The env that a policy file names; refuses code of other people unless ``trust``."""
    if policy.is_own or trust:
        find_modules_in_cwd()
    else:
        check_names({"env": policy.metadata["env"]}, path)
    try:
        env = EnvConfig(**policy.metadata["env"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a damaged env: {first_line(error)}") from error
    for part in (env.kwargs, env.wrappers):
        if not isinstance(part, dict):
            raise ConfigError(f"{path} has a damaged env: {part!r} must be a mapping")
    return env


def export_run(
    path: Path | str,
    out: Path | None,
    *,
    file_format: str,
    checkpoint: str | None = None,
    trust: bool = False,
) -> tuple[TrainedAgent, Path, ExportedPolicy, Agreement]:
    """Write the policy of a run as one file: ``out``, or policy.<format> in its folder."""
    path = chosen(path)
    run = RunFolder.open(path, trust=trust)
    config = stored_config(run)
    trained = load_agent(path, checkpoint, trust=trust)
    out = out or run.path / f"policy.{file_format}"
    facts = {
        "env_name": trained.env_name,
        "env": dataclasses.asdict(config.evaluated_env),
        "run": run.name,
        "checkpoint": trained.checkpoint,
        "env_steps": trained.env_steps,
        "seed": trained.seed,
        "commit": run.read_summary().get("git_commit"),  # of the code that trained it
        **_facts_of(trained.env.unwrapped),
    }
    try:
        with torch_threads(torch.device("cpu")):
            policy, agreement = export_policy(
                trained.agent, trained.env, out, file_format=file_format, facts=facts
            )
    finally:
        close_env(trained.env)
    return trained, out, policy, agreement


def _facts_of(env: object) -> dict[str, object]:
    return env.export_facts() if isinstance(env, HasExportFacts) else {}


def started_from(config: TrainConfig, agent: Agent) -> TrainConfig:
    """Load the weights that ``config.init_from`` names; returns the config with the file's path."""
    given = str(config.init_from)
    start_from = find_algorithm(config).start_from
    if start_from is None:
        raise ConfigError(
            f"init_from={given}: {config.agent.algorithm} cannot start from another run; "
            "give its Algorithm a start_from function"
        )
    try:
        if _is_latest(given) and is_job():
            raise ConfigError("jobs of a sweep would find each other; name a run folder")
        run = RunFolder.open(chosen(given, root=config.run_root))
        name = named_checkpoint(given) or best_or_latest(run)
        state = load_checkpoint(run, name)
        start_from(agent, state["agent"])
        env_steps = int(state["env_steps"])
    except UserError as error:
        raise ConfigError(f"init_from={given}: {error}") from error
    except Exception as error:  # the state of another algorithm, or a damaged one, may raise any
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{first_line(error)}; use the env, network and agent of that run"
        raise ConfigError(f"init_from={given}: {reason}") from error
    path = checkpoint_path(run, name)
    say(f"started from {path}, env step {env_steps:,}, with a new optimiser")
    return dataclasses.replace(config, init_from=str(path))


def chosen(given: Path | str, *, root: str = RUN_ROOT) -> Path | str:
    """The path of a run; ``latest`` is the newest in ``root``, unless a file has that name."""
    return newest_run(Path(root)).path if _is_latest(str(given)) else given


def _is_latest(given: str) -> bool:
    return given == _LATEST_RUN and not Path(given).exists()
