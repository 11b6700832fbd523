"""The parts of a run, made from its config: one short function per object."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from threadpoolctl import threadpool_limits

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.door.compose import ConfigError, stored_text
from ml_pipeline.envs.choice import choose_mode
from ml_pipeline.envs.episode_stats import counts_episodes
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.protocols import Callback, Logger
from ml_pipeline.runs.checkpoint import check_plain, misfit_explained
from ml_pipeline.runs.record import Record
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.seeding import seed_global_generators, stream_seed
from ml_pipeline.signals import StopSignals
from ml_pipeline.targets import instantiate
from ml_pipeline.training.collector import Collector
from ml_pipeline.training.ppo_trainer import PPOTrainer
from ml_pipeline.training.tensor.collector import TensorCollector

if TYPE_CHECKING:
    from ml_pipeline.door.plan import RunPlan


def build_env_factory(config: TrainConfig) -> EnvFactory:
    env = config.env
    return EnvFactory(env.id, env.target, env.kwargs, env.wrappers)


def build_agent(config: TrainConfig, env: Any, device: torch.device) -> PPOAgent:
    """``env`` is a single env or any object with its two spaces."""
    network = partial(build_network, config)
    # With more threads, the last bits of the first weights would depend on how many.
    with torch_threads(torch.device("cpu")):
        return PPOAgent(
            env.observation_space,
            env.action_space,
            network,
            config.agent,
            device=device,
            seed=config.seed,
            precision=config.precision,
        )


def build_network(config: TrainConfig, observation_space: gym.Space[Any]) -> torch.nn.Module:
    offers = {"observation_space": observation_space}
    network = instantiate(config.network, key="network", offers=offers)
    if not isinstance(network, torch.nn.Module):
        raise ConfigError(f"network._target_ made {type(network).__name__}, no torch.nn.Module")
    if any(torch.nn.parameter.is_lazy(each) for each in network.parameters()):
        raise ConfigError(
            f"network {type(network).__name__} has lazy layers, whose weights have no size yet; "
            "give them their sizes, from observation_space, in its constructor"
        )
    return network


def mask_key(config: TrainConfig) -> str:
    """Where envs have their masks, in info or observation, while they are only tried out."""
    source = config.agent.action_mask
    return "action_mask" if source in ("auto", "none", "info") else source


def act_greedily(agent: PPOAgent, obs: Any, infos: Any) -> Any:
    """About as in training, to measure how long it takes."""
    n_envs = len(next(iter(agent.reader.read(obs).values())))
    mask, memory = agent.mask_of(infos), agent.new_memory(n_envs)
    return agent.act_batch(obs, True, action_mask=mask, memory=memory)


def build_vec_envs(plan: RunPlan) -> tuple[list[VectorEnv[Any, Any, Any]], str]:
    """The envs, and the words that say how they run; two halves if collector=double."""
    if plan.torch_env is not None:
        return [make_torch_env(plan)], _how_tensors_run(plan)
    return build_process_envs(plan)


def make_torch_env(plan: RunPlan) -> TorchVectorEnv:
    config = plan.config
    try:
        return plan.torch_env(  # type: ignore[misc]
            config.n_envs, device=plan.device, seed=plan.env_seed, **config.env.kwargs
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env.target={config.env.target} cannot be made: {error}") from error


def _how_tensors_run(plan: RunPlan) -> str:
    n_envs, mode = plan.config.n_envs, plan.programs.mode
    how = "1 env" if n_envs == 1 else f"{n_envs} envs"
    # Some seconds, in which nothing else is to be seen.
    how += " as tensors"
    how += ", compiled and captured in the first iterations" if mode == "graph" else ""
    return how + (f" ({plan.remark})" if plan.remark else "")


def build_process_envs(plan: RunPlan) -> tuple[list[VectorEnv[Any, Any, Any]], str]:
    """Envs in this process, in workers, or in both."""
    config, mode, reason = plan.config, plan.config.vec_env.mode, plan.remark
    n_slices = min(config.vec_env.n_workers or available_cores(), config.n_envs)
    halves = [config.n_envs] if config.collector == "sync" else [config.n_envs // 2] * 2
    if mode == "auto":
        mode, why = choose_mode(
            partial(make_vec_env, plan),
            plan.first_env,
            partial(act_greedily, plan.agent),
            n_envs=config.n_envs,
            n_slices=n_slices,
            mask_key=mask_key(config),
        )
        reason = f"{reason}; {why}" if reason else why
    envs: list[ParallelEnv | SerialEnv] = []
    try:
        for number, n_envs in enumerate(halves):
            envs.append(make_vec_env(plan, mode, n_envs=n_envs, first=number * n_envs))
    except BaseException:
        for env in envs:
            env.close()
        raise
    env = envs[0]
    how = "1 env" if config.n_envs == 1 else f"{config.n_envs} envs"
    how += " in two halves" if len(envs) > 1 else ""
    if isinstance(env, ParallelEnv):
        n_workers = sum(each.n_workers for each in envs if isinstance(each, ParallelEnv))
        workers = f"{n_workers} {env.start_method} worker{'s' if n_workers > 1 else ''}"
        how += f", {workers}" + (" and this process" if mode == "shared" else "")
    else:
        how += " in this process"
    return list(envs), how + (f" ({reason})" if reason else "")


def make_vec_env(
    plan: RunPlan, mode: str, *, n_envs: int | None = None, first: int = 0
) -> ParallelEnv | SerialEnv:
    """``n_envs`` (None: all of them), the first of which is number ``first`` of the run."""
    n_envs = plan.config.n_envs if n_envs is None else n_envs
    n_workers = plan.config.vec_env.n_workers
    if n_workers is not None:  # shared among the halves of a double-buffered collector
        n_workers = max(n_workers * n_envs // plan.config.n_envs, 1)
    vec_env, env_fns = plan.config.vec_env, [plan.make_env] * n_envs
    same: dict[str, Any] = {
        "seed": plan.env_seed + first,
        "infos": vec_env.infos,
        "check_finite": vec_env.check_finite,
    }
    if mode == "serial":
        return SerialEnv(env_fns, **same)
    return ParallelEnv(
        env_fns,
        **same,
        n_workers=n_workers,
        start_method=vec_env.start_method,  # type: ignore[arg-type]  # checked by VecEnvConfig
        main_slice=mode == "shared",
        step_timeout=vec_env.step_timeout_seconds,
        on_worker_death=vec_env.on_worker_death,  # type: ignore[arg-type]  # as above
        max_restarts=vec_env.max_restarts,
    )


def build_trainer(
    plan: RunPlan, envs: Sequence[VectorEnv[Any, Any, Any]], record: Record, signals: StopSignals
) -> PPOTrainer:
    """The trainer, in the state of the checkpoint where the run is resumed."""
    seed = plan.config.seed
    same: dict[str, Any] = {
        "env_seed": plan.env_seed,
        "noise_seed": stream_seed(seed, "actions"),
        "programs": plan.programs,
    }
    collector: Collector | TensorCollector
    if isinstance(envs[0], TorchVectorEnv):
        collector = TensorCollector(envs[0], **same)
    else:
        from_infos = counts_episodes(plan.first_env)
        collector = Collector(
            envs,
            episodes_from_infos=from_infos,
            allow_nonfinite=plan.config.agent.on_nonfinite == "skip",
            **same,
        )
    trainer = PPOTrainer(
        plan.agent,
        collector,
        seed=seed,
        programs=plan.programs,
        callbacks=plan.callbacks,
        loggers=record.loggers,
        shield=signals.shielded,
        patience=signals.patient,
    )
    trainer.snapshots_envs = plan.no_snapshot is None
    seed_global_generators(seed)  # once more: an env that was tried here may have drawn
    if plan.state is not None:
        with misfit_explained(plan.run):
            trainer.load_state_dict(plan.state)
    return trainer


def build_record(plan: RunPlan, overrides: Sequence[str], sweep: str | None) -> Record:
    """The run's folder on the disk, and all that is written into it."""
    config = plan.config
    with ExitStack() as on_failure:
        on_failure.callback(plan.run.discard_unstarted)
        loggers = build_loggers(config, plan.run, sweep, plan.first_step, on_failure)
        record = Record(
            plan.run,
            facts={
                "env": config.env.name,
                "agent": _agent_name(config),
                "seed": config.seed,
                "n_envs": config.n_envs,
            },
            overrides=overrides,
            total_steps=config.wanted_steps,
            env_steps=plan.first_step,
            loggers=loggers,
        )
        if plan.state is None:  # that of a resumed run changes when it has been resumed
            write_text(plan.run.config, stored_text(config))
        on_failure.pop_all()
    return record


def _agent_name(config: TrainConfig) -> str:
    return type(config.agent).__name__.removesuffix("Config").lower()


def build_loggers(
    config: TrainConfig,
    run_folder: RunFolder,
    sweep: str | None,
    env_steps: int,
    on_failure: ExitStack,
) -> dict[str, Logger]:
    """Those of the config; the local record and the console are always on besides."""
    run_config = {
        **dataclasses.asdict(config),
        "env_name": config.env.name,
        "agent_name": _agent_name(config),
    }
    offers = {
        "run": run_folder,
        "run_config": run_config,
        "sweep": sweep,
        "env_steps": env_steps,  # where a run is resumed; 0 for a new one
    }
    loggers: dict[str, Logger] = {}
    for name, entry in config.logger.items():
        loggers[name] = instantiate(entry, key=f"logger.{name}", offers=offers)
        if not all(hasattr(loggers[name], method) for method in ("log", "close")):
            raise ConfigError(f"logger.{name} made an object without log and close, no Logger")
        on_failure.callback(loggers[name].close)
    return loggers


def build_callbacks(
    config: TrainConfig, run_folder: RunFolder, make_env: EnvFactory, device: torch.device
) -> dict[str, Callback]:
    offers = {"run": run_folder, "make_env": make_env, "seed": config.seed, "device": device}
    callbacks: dict[str, Callback] = {}
    for name, entry in config.callbacks.items():
        callbacks[name] = instantiate(entry, key=f"callbacks.{name}", offers=offers)
        if not isinstance(callbacks[name], Callback):
            raise ConfigError(f"callbacks.{name} made no ml_pipeline.protocols.Callback")
        check_plain(callbacks[name].state_dict(), f"the state of callbacks.{name}")
    return callbacks


@contextmanager
def torch_threads(device: torch.device) -> Iterator[None]:
    """One thread on the CPU while a run lasts: a second makes small networks slower.

    NumPy's linear algebra keeps to it, too; with more, its results would also depend on how many.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
