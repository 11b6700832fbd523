"""From a composed config to the objects of a run, one short function per object; then the run.

This is the door's inner side: with ``__main__``, ``study`` and ``sweeps`` all that knows Hydra and
OmegaConf under ``ml_pipeline``. ``train(overrides)`` is the same door for notebooks.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import torch
import yaml
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from threadpoolctl import threadpool_limits

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.agents.space_data import space_to_data
from ml_pipeline.config import TrainConfig
from ml_pipeline.device import precision_of_products, program_mode, resolve_device
from ml_pipeline.envs.cores import available_cores
from ml_pipeline.envs.env_worker import WorkerError
from ml_pipeline.envs.episode_stats import counts_episodes
from ml_pipeline.envs.factory import EnvFactory, close_env, try_env
from ml_pipeline.envs.snapshots import why_no_snapshot
from ml_pipeline.envs.torch_env import TorchVectorEnv
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.envs.vec_env_choice import choose_mode, choose_n_envs
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback, Logger, Policy, State
from ml_pipeline.runs.checkpoint import (
    LATEST,
    CheckpointError,
    best_or_latest,
    check_plain,
    checkpoint_path,
    load_checkpoint,
)
from ml_pipeline.runs.console import say
from ml_pipeline.runs.evaluate import batched
from ml_pipeline.runs.export import Agreement, export_policy
from ml_pipeline.runs.exported import ExportedPolicy
from ml_pipeline.runs.record import Record
from ml_pipeline.runs.resuming import resume_episodes, save_latest, sweep_litter
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.runs.stop_signals import Interrupted, StopSignals
from ml_pipeline.seeding import first_env_seed, seed_global_generators, stream_seed
from ml_pipeline.targets import import_dotted, instantiate
from ml_pipeline.training.collectors import Collector
from ml_pipeline.training.device_collector import DeviceCollector
from ml_pipeline.training.memory import (
    NETWORK_ADVICE,
    activation_bytes,
    memory_advice,
    memory_explained,
    ran_out_of_memory,
)
from ml_pipeline.training.ppo_trainer import PPOTrainer
from ml_pipeline.training.programs import Programs

REPOSITORY = Path(__file__).resolve().parent.parent
RUN_ROOT = Path("runs")


class ConfigError(UserError):
    """The config says something that cannot be."""


class RunResult(NamedTuple):
    """What a run left behind."""

    run_dir: Path
    env_steps: int
    mean_reward: float  # of the last 100 training episodes; nan if none has ended
    agent: PPOAgent
    objective: float  # the metric named by the config's ``objective``; nan if never taken


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
    state: State | None  # of the checkpoint to resume from
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


class TrainedAgent(NamedTuple):
    """An agent as a checkpoint holds it, and a single env of the kind it was trained in."""

    agent: PPOAgent
    env: gym.Env[Any, Any]
    env_name: str
    seed: int  # of the run
    checkpoint: str
    env_steps: int


def train(
    overrides: Sequence[str] = (), *, callbacks: Mapping[str, Callback] | None = None
) -> RunResult:
    """Train as ``python train_ppo.py`` does: ``train(["env=cartpole", "n_envs=4"])``.

    ``callbacks`` are more than the config names, and hear of everything after those.
    """
    return run(compose_config(overrides), overrides, callbacks=callbacks)


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """What Hydra makes of conf/ and ``overrides``; a wrong key or type is refused here."""
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    # The caller may be a Hydra program itself, and Hydra is one per process.
    callers = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return compose("train_ppo", overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = callers


def run(
    cfg: DictConfig,
    overrides: Sequence[str],
    *,
    sweep: str | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    folder: RunFolder | None = None,
) -> RunResult:
    """One run from a composed config; ``overrides`` is what the command line named.

    ``folder`` is where a run that begins is kept; None: a new one under ``RUN_ROOT``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "a worker has imported the script that starts it, which would start another run; put "
            "the call of train under: if __name__ == '__main__':"
        )
    find_modules_in_cwd()
    with ExitStack() as stack:
        if cfg.resume is not None:
            # Locked before anything is read: another process may be about to save.
            stack.enter_context(RunFolder.open(str(cfg.resume)).locked())
            cfg = resumed_config(cfg, overrides)
        plan = make_plan(checked_config(cfg), callbacks=callbacks, folder=folder)
        stack.callback(close_env, plan.first_env)
        stack.enter_context(torch_threads(plan.device))
        stack.enter_context(precision_of_products(plan.config.precision, plan.device))
        signals = stack.enter_context(StopSignals(on_wait=_say_stopping))
        if plan.state is None:
            plan.run.make()
            stack.enter_context(plan.run.locked())
        else:
            sweep_litter(plan.run, plan.state)
        record = build_record(plan, overrides, sweep)
        stack.callback(record.close)
        try:
            with memory_explained(plan.device, partial(_memory_advice, plan)):
                envs, how = build_vec_envs(plan)
                for env in envs:
                    stack.callback(env.close)
                trainer = build_trainer(plan, envs, record, signals)
                resumed = _resume(plan, trainer)
                write_text(plan.run.config, stored_text(plan.config))
                record.begin(f"{plan.config.env.name}: {how}, {plan.device}")
                if resumed:
                    say(resumed)
                _train(trainer, plan, record, signals)
        except Interrupted as stop:
            with signals.shielded():
                record.end("interrupted", f"stopped by {stop.signal_name}")
            raise
        except BaseException as error:
            with signals.shielded():
                record.end("failed", f"failed with {type(error).__name__}")
            raise
        record.end("finished", trainer.stop_reason or "finished")
        objective = record.value(plan.config.objective)
        if math.isnan(objective):
            say(f"objective={plan.config.objective} was never measured; see {plan.run.metrics}")
        return RunResult(
            plan.run.path, trainer.env_steps, record.mean_reward, plan.agent, objective
        )


def _say_stopping() -> None:
    # Not by print, which may be at work when the signal comes, and cannot be entered twice.
    with suppress(OSError):  # the terminal may be gone
        os.write(1, b"stopping after this iteration; once more to stop sooner\n")


def _memory_advice(plan: RunPlan) -> str:
    """What the run needs and how to need less; ``DeviceMemoryError`` begins with the fact."""
    config, space = plan.config, plan.first_env.observation_space
    per_transition = None
    with suppress(Exception):  # a user's network may do anything, and there is little memory left
        # Another agent, since the run's is where no memory is.
        agent = build_agent(config, plan.first_env, torch.device("cpu"))
        one = agent.reader.read(batched(space, [space.sample()]))
        per_transition = activation_bytes(agent, one)
    advice = memory_advice(
        plan.agent,
        per_transition,
        n_steps=config.agent.n_steps,
        n_envs=int(config.n_envs),
        n_minibatches=config.agent.n_minibatches,
        keeps_final_obs=plan.torch_env is not None,
    )
    saved = checkpoint_path(plan.run, LATEST).is_file()
    return advice + ("; the last checkpoint is kept" if saved else "")


def _resume(plan: RunPlan, trainer: PPOTrainer) -> str:
    """Go on where the envs stood, if they can; what is to be said of this resume, or of a later."""
    if plan.state is not None:
        saved_env = (yaml.safe_load(plan.state["config"]) or {}).get("env")
        if saved_env == dataclasses.asdict(plan.config.env):
            how = resume_episodes(plan.run, trainer, plan.state, trust=plan.config.trust)
        else:
            how = "with new episodes: the env's settings have changed"
        return f"resumed at env step {plan.first_step:,} {how}"
    if plan.no_snapshot is not None:
        return f"a resume of this run will begin new episodes: {plan.no_snapshot}"
    return ""


def _train(trainer: PPOTrainer, plan: RunPlan, record: Record, signals: StopSignals) -> None:
    """Train to the end; a stop signal leaves a checkpoint of the last whole iteration.

    So does an env that fails, which it does amid a rollout: no weight has changed since.
    """
    try:
        with record.timed():
            trainer.train(plan.config.wanted_steps)
    except (Interrupted, WorkerError) as error:
        if isinstance(error, Interrupted) or trainer.env_steps > plan.first_step:
            with signals.shielded():
                save_latest(plan.run, trainer)
        raise


@contextmanager
def _misfit_explained(run_folder: RunFolder) -> Iterator[None]:
    """Tell a state that does not fit the objects it is loaded into from a failure of ours."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise CheckpointError(
            f"the checkpoint in {run_folder.path} does not fit its env, agent and network: {reason}"
        ) from error


def load_agent(
    path: Path | str, checkpoint: str | None = None, *, render_mode: str | None = None
) -> TrainedAgent:
    """The agent of a run folder, on the CPU; ``checkpoint`` None: the best where there is one."""
    find_modules_in_cwd()
    run_folder = RunFolder.open(path)
    config = checked_config(stored_config(run_folder))
    checkpoint = checkpoint or best_or_latest(run_folder)
    state = load_checkpoint(run_folder, checkpoint)
    make_env = build_env_factory(config)
    if render_mode is not None:
        make_env = make_env.rendering(render_mode)
    env = make_env()
    agent = build_agent(config, env, torch.device("cpu"))
    with _misfit_explained(run_folder):
        agent.load_state_dict(state["agent"])
        env_steps = int(state["env_steps"])
    return TrainedAgent(agent, env, config.env.name, config.seed, checkpoint, env_steps)


def load_policy(
    path: Path | str, *, render: str | None = None
) -> tuple[Policy, gym.Env[Any, Any], str]:
    """The policy of an exported file or of a run, an env for it, and the env's name."""
    if Path(path).is_dir():
        trained = load_agent(path, render_mode=render)
        return trained.agent, trained.env, trained.env_name
    find_modules_in_cwd()
    policy = ExportedPolicy.load(path)
    make_env = EnvFactory(**policy.metadata["env"])
    env = make_env() if render is None else make_env.rendering(render)()
    for own, wanted in (
        (env.observation_space, policy.observation_space),
        (env.action_space, policy.action_space),
    ):
        if space_to_data(own) != space_to_data(wanted):
            close_env(env)
            raise ConfigError(f"env {policy.env_name} has {own}, {path} was made for {wanted}")
    return policy, env, policy.env_name


def export_run(
    path: Path | str, out: Path | None, *, file_format: str, checkpoint: str | None = None
) -> tuple[TrainedAgent, Path, ExportedPolicy, Agreement]:
    """Write the policy of a run as one file, ``out`` or policy.<format> in its folder."""
    trained, run = load_agent(path, checkpoint), RunFolder.open(path)
    out = out or run.path / f"policy.{file_format}"
    facts = {
        "env_name": trained.env_name,
        "env": plain_config(path)["env"],
        "run": run.name,
        "checkpoint": trained.checkpoint,
        "env_steps": trained.env_steps,
        "seed": trained.seed,
        "commit": run.read_summary().get("git_commit"),  # of the code that trained it
    }
    try:
        with torch_threads(trained.agent.device):
            policy, agreement = export_policy(
                trained.agent, trained.env, out, file_format=file_format, facts=facts
            )
    finally:
        close_env(trained.env)
    return trained, out, policy, agreement


def plain_config(path: Path | str) -> dict[str, Any]:
    """A run's config as nested dicts."""
    return dataclasses.asdict(checked_config(stored_config(RunFolder.open(path))))


def checked_config(cfg: DictConfig) -> TrainConfig:
    """The config as checked dataclasses; what breaks a rule is named with its full key."""
    try:
        config = OmegaConf.to_object(cfg)
    except (ValueError, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error
    if not isinstance(config, TrainConfig):
        raise TypeError(f"the schema of the composed config is {type(config).__name__}")
    return config


def resumed_config(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The config of the run to resume, changed only where this command line says so."""
    base = stored_config(RunFolder.open(str(cfg.resume)))
    named = [
        each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))
    ]
    if "experiment" in named:
        raise ConfigError("experiment= cannot be combined with resume=; name single keys")
    # Never from the folder: whoever made it would decide whether it is trusted.
    base.trust = cfg.trust
    if "total_steps" in named and "num_episodes" not in named:
        base.num_episodes = None  # the newer goal counts
    with open_dict(base):
        for key in named:
            if not key.startswith("hydra"):
                _take_over(base, cfg, key)
    return base


def _take_over(base: DictConfig, cfg: DictConfig, key: str) -> None:
    """Let ``base`` have at ``key`` what ``cfg`` has, which may be nothing."""
    parent, _, name = key.rpartition(".")
    if parent and OmegaConf.select(base, parent) is None:
        # logger.wandb.mode=... for a run without W&B: it needs all of logger.wandb.
        _take_over(base, cfg, parent)
        return
    old = OmegaConf.select(base, parent) if parent else base
    new = OmegaConf.select(cfg, parent) if parent else cfg
    if new is not None and name in new:
        old[name] = new[name]
    elif name in old:
        del old[name]


def stored_config(run_folder: RunFolder) -> DictConfig:
    """A run's config.yaml under today's schema."""
    try:
        stored = OmegaConf.load(run_folder.config)
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), stored)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{run_folder.config} is no config of a run: {error}") from error
    if not isinstance(merged, DictConfig) or not merged.network:
        raise ConfigError(f"{run_folder.config} is no config of a run: it names no network")
    return merged


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
        with _misfit_explained(run_folder):
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
        with _misfit_explained(run_folder):
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
            env, partial(_act, agent), n_slices=n_slices, allowed=allowed, mask_key=mask_key(config)
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


def mask_key(config: TrainConfig) -> str:
    """Where envs have their masks, in info or observation, while they are only tried out."""
    source = config.agent.action_mask
    return "action_mask" if source in ("auto", "none", "info") else source


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


def find_modules_in_cwd() -> None:
    """A user's own modules lie where the command is typed, which is not where the script lies."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


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


def _act(agent: PPOAgent, obs: Any, infos: Any) -> Any:
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
            partial(_act, plan.agent),
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
    collector: Collector | DeviceCollector
    if isinstance(envs[0], TorchVectorEnv):
        collector = DeviceCollector(envs[0], **same)
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
        with _misfit_explained(plan.run):
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


def stored_text(config: TrainConfig) -> str:
    """What config.yaml holds: all that decides the run, and not which run it went on from."""
    return OmegaConf.to_yaml(
        OmegaConf.create({**dataclasses.asdict(config), "resume": None, "trust": False})
    )
