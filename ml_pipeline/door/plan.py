"""RunPlan: everything about a run that can be checked before a folder or a process exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium import spaces

from ml_pipeline.agents.observations import batched
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.device import program_mode, resolve_device
from ml_pipeline.door.compose import ConfigError
from ml_pipeline.door.parts import (
    act_greedily,
    build_agent,
    build_callbacks,
    build_env_factory,
    mask_key,
    torch_threads,
)
from ml_pipeline.envs.choice import choose_n_envs
from ml_pipeline.envs.factory import EnvFactory, try_env
from ml_pipeline.envs.snapshots import why_no_snapshot
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback, StateDict
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint, misfit_explained
from ml_pipeline.runs.console import say
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import first_env_seed, seed_global_generators
from ml_pipeline.targets import import_dotted
from ml_pipeline.training.gpu.programs import Programs
from ml_pipeline.training.out_of_memory import (
    NETWORK_ADVICE,
    memory_explained,
    ran_out_of_memory,
)

RUN_ROOT = Path("runs")


class RunPlan(NamedTuple):
    """A checked config and all that can be made from it before a file or a process is."""

    config: TrainConfig
    device: torch.device
    programs: Programs
    make_env: EnvFactory
    torch_env: type[TorchVectorEnv] | None  # the envs are tensors; None: they are in processes
    first_env: gym.Env[Any, Any]  # shows that the env can be made; measured by vec_env=auto
    agent: PPOAgent
    run: RunFolder  # of a new run: not yet on the disk
    callbacks: dict[str, Callback]
    state: StateDict | None  # of the checkpoint to resume from
    remark: str  # on what was chosen while planning; empty where nothing was
    no_snapshot: str | None  # why episodes cannot go on in a resumed run; None: they can

    @property
    def first_step(self) -> int:
        """Env steps that the run has behind it."""
        return int(self.state["env_steps"]) if self.state is not None else 0

    @property
    def env_seed(self) -> int:
        """Seed of env 0; env i has this + i."""
        return first_env_seed(self.config.seed, env_steps=self.first_step)


def make_plan(
    config: TrainConfig,
    *,
    callbacks: Mapping[str, Callback] | None = None,
    folder: RunFolder | None = None,
) -> RunPlan:
    """Find every mistake that can be found before a run folder or a worker exists."""
    run_folder, state = folder or RunFolder.unused(RUN_ROOT, config.env.name), None
    if config.resume is not None:
        if config.n_envs == "auto":
            raise ConfigError("n_envs=auto cannot be combined with resume=; give a number")
        run_folder = RunFolder.open(config.resume)
        state = load_checkpoint(run_folder, LATEST)
        with misfit_explained(run_folder):
            done, wanted = int(state["env_steps"]), config.wanted_steps
        if done >= wanted:
            raise ConfigError(
                f"{run_folder.path} is complete: {done:,} of {wanted:,} env steps; "
                f"to go on, raise the goal: total_steps={2 * max(done, wanted)}"
            )
    device = resolve_device(config.device)
    if device.index is not None and device.type == "cuda":
        # Streams and kernels go to the current one unless told otherwise, and not all are.
        torch.cuda.set_device(device)
    programs = Programs(device, program_mode(config.compile, device), tell=say)
    seed_global_generators(config.seed)
    make_env = build_env_factory(config)
    torch_env = find_torch_env(config)
    all_callbacks = build_callbacks(config, run_folder, make_env, device)
    for name, callback in (callbacks or {}).items():
        if name in all_callbacks:
            raise ConfigError(f"callbacks.{name} is named by the config and given; rename one")
        all_callbacks[name] = callback
    first_env = make_env()
    obs, info, step_info = try_env(first_env, config.env.name, mask_key=mask_key(config))
    config = with_mask_source(config, first_env, info, step_info)
    with memory_explained(device, lambda: NETWORK_ADVICE):
        agent = build_agent(config, first_env, device)
        _try_agent(agent, first_env, obs, info)
    if agent.remark:
        say(agent.remark)
    _check_sequences(config, agent)
    if state is not None:
        with misfit_explained(run_folder):
            agent.load_state_dict(state["agent"])
    remark = ""
    if torch_env is not None:
        _check_torch_env(config, agent)
    if config.n_envs == "auto":
        if torch_env is not None:
            config, remark = with_n_tensor_envs(config, device)
        else:
            config, remark = with_n_envs(config, first_env, agent)
        _check_sequences(config, agent)
    return RunPlan(
        config,
        device,
        programs,
        make_env,
        torch_env,
        first_env,
        agent,
        run_folder,
        all_callbacks,
        state,
        remark,
        no_snapshot=None
        if torch_env is not None
        else why_no_snapshot(first_env, make_env, mask_key=mask_key(config)),
    )


def find_torch_env(config: TrainConfig) -> type[TorchVectorEnv] | None:
    """The class of envs that are tensors, if env.target names one."""
    if config.env.target is None:
        return None
    target = import_dotted(config.env.target, key="env.target")
    is_one = isinstance(target, type) and issubclass(target, TorchVectorEnv)
    return target if is_one else None


def _check_torch_env(config: TrainConfig, agent: PPOAgent) -> None:
    """What envs in processes can have, and envs that are tensors cannot."""
    name = config.env.name
    for wrong, key, way_out in (
        (config.env.wrappers, "env.wrappers", "write what they do into the class"),
        (config.vec_env.mode != "auto", "vec_env", "leave vec_env=auto"),
        (config.collector != "sync", "collector", "leave collector=sync"),
        (agent.state_size, "network", "take one without a memory, such as network=mlp"),
        (agent.is_masked, "agent.action_mask", "set agent.action_mask=none"),
        (not agent.reader.is_single, "its observation space", "give one Box or Discrete"),
    ):
        if wrong:
            raise ConfigError(
                f"env {name} is a batch of tensors: {key} does not apply to it; {way_out}"
            )


def with_n_tensor_envs(config: TrainConfig, device: torch.device) -> tuple[TrainConfig, str]:
    """The config with as many envs as fill a device, as far as the budget of steps allows."""
    n_envs = 256 if device.type == "cpu" else 4096
    while n_envs > 1 and not config.suits(n_envs):
        n_envs //= 2
    try:
        return dataclasses.replace(config, n_envs=n_envs), f"n_envs=auto: {n_envs} envs"
    except ValueError as error:
        raise ConfigError(f"n_envs=auto found {n_envs}, but {error}") from error


def with_n_envs(
    config: TrainConfig, env: gym.Env[Any, Any], agent: PPOAgent
) -> tuple[TrainConfig, str]:
    """The config with a number of envs that was found by measuring, and why it is this one."""
    n_slices = config.vec_env.n_workers or available_cores()
    if config.vec_env.mode == "serial":
        n_slices = 1
    whole = config.agent.n_minibatches if agent.state_size else 1  # sequences, one per env

    def allowed(n_envs: int) -> bool:
        return config.suits(n_envs) and n_envs % whole == 0

    with torch_threads(agent.device):
        n_envs, reason = choose_n_envs(
            env,
            partial(act_greedily, agent),
            n_slices=n_slices,
            allowed=allowed,
            mask_key=mask_key(config),
        )
    try:
        return dataclasses.replace(config, n_envs=n_envs), reason
    except ValueError as error:
        raise ConfigError(f"n_envs=auto found {n_envs}, but {error}") from error


def with_mask_source(
    config: TrainConfig,
    env: gym.Env[Any, Any],
    info: dict[str, Any],
    step_info: dict[str, Any],
) -> TrainConfig:
    """The config with agent.action_mask=auto replaced by where this env has its masks, if at all.

    Masks in infos are wanted at every step, so these must all be sent.
    """
    source = config.agent.action_mask
    if source == "auto":
        in_obs = isinstance(env.observation_space, spaces.Dict)
        in_obs = in_obs and "action_mask" in env.observation_space.spaces  # type: ignore[attr-defined]
        can_be_masked = not isinstance(env.action_space, spaces.Box)
        in_info = "action_mask" in info and can_be_masked
        if can_be_masked and not in_obs and "action_mask" in step_info and not in_info:
            raise ConfigError(
                f"env {config.env.name} gives an action_mask with a step, but none with reset; let "
                "reset give one too, or set agent.action_mask=none"
            )
        source = "action_mask" if in_obs else "info" if in_info else "none"
    infos = "all" if source == "info" else config.vec_env.infos
    return dataclasses.replace(
        config,
        agent=dataclasses.replace(config.agent, action_mask=source),
        vec_env=dataclasses.replace(config.vec_env, infos=infos),
    )


def _try_agent(agent: PPOAgent, env: gym.Env[Any, Any], obs: Any, info: dict[str, Any]) -> None:
    """One forward pass, so that a network of the wrong shape is found out."""
    # Two, since a network that mixes the envs of a batch may take one.
    mask = agent.mask_of({name: [value, value] for name, value in info.items()})
    batch = batched(env.observation_space, [obs, obs])
    try:
        agent.act_batch(batch, True, action_mask=mask, memory=agent.new_memory(2))
    except UserError:
        raise
    except Exception as error:  # a user's network may do anything
        if ran_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        shapes = {name or "obs": shape for name, shape in agent.reader.shapes.items()}
        shown = shapes["obs"] if list(shapes) == ["obs"] else shapes
        raise ConfigError(
            f"network cannot take an observation of shape {shown}: {reason}"
        ) from error


def _check_sequences(config: TrainConfig, agent: PPOAgent) -> None:
    """A policy with a memory learns from whole sequences, one per env."""
    if agent.state_size and config.n_envs != "auto" and config.n_envs % config.agent.n_minibatches:
        raise ConfigError(
            f"a network with a memory learns from whole sequences, one per env: n_envs="
            f"{config.n_envs} cannot be cut into agent.n_minibatches="
            f"{config.agent.n_minibatches} equal parts; choose one of its divisors"
        )
