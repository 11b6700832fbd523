"""make_plan: finds every mistake that can be found before a folder or a process exists."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ml_pipeline.assembly.agent import build_agent, find_algorithm, mask_key, with_mask_source
from ml_pipeline.assembly.build import (
    act_greedily,
    build_callbacks,
    build_env_factory,
    find_tensor_env,
    kept_cwd,
    make_tensor_env,
)
from ml_pipeline.assembly.compose import errors_of_resume, resumed_folder
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.assembly.load import restored_agent, started_from
from ml_pipeline.assembly.phases import check_phases
from ml_pipeline.assembly.players import SelfPlay, find_self_play
from ml_pipeline.config.train import EnvConfig, TrainConfig, VecEnvConfig
from ml_pipeline.device import program_mode, resolve_device, torch_threads
from ml_pipeline.envs.choice import choose_n_envs
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.envs.trial import EnvTrial, in_worker, slow_trial, try_env
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.errors import UserError, place_of, type_and_line
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.opponent_report import OpponentReport
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.nonfinite import network_fault
from ml_pipeline.policy.observations import ObservationReader, batched
from ml_pipeline.ranks.world import join_world, rank_device
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import (
    LATEST,
    check_fits,
    load_checkpoint,
    misfit_explained,
    named_checkpoint,
)
from ml_pipeline.runs.console import say, say_if_slow
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import (
    first_env_seed,
    global_generators_state,
    seed_global_generators,
    set_global_generators_state,
)
from ml_pipeline.training.contracts import Agent, Callback, RunContext
from ml_pipeline.training.graphs import Programs
from ml_pipeline.training.loop import state_of_rank
from ml_pipeline.training.out_of_memory import (
    NETWORK_ADVICE,
    memory_explained,
    ran_out_of_memory,
)


class RunPlan(NamedTuple):
    """A checked config and everything built from it before a file or a process exists."""

    config: TrainConfig
    context: RunContext
    make_env: EnvFactory
    tensor_env: type[DeviceVectorEnv] | None  # None: the envs run in processes
    self_play: SelfPlay | None  # None: the env has no opponents from outside
    pool: OpponentPool | None  # of the opponents
    trial: EnvTrial  # of one env, as the agent sees it
    agent: Agent
    run: RunFolder  # of a new run: not yet on disk
    callbacks: dict[str, Callback]
    state: StateDict | None  # of the checkpoint to resume from
    remark: str  # on choices made while planning, or empty

    @property
    def where(self) -> str:
        """The device, for the user."""
        n_threads = self.config.cpu_threads
        is_many = self.context.device.type == "cpu" and n_threads > 1
        return f"{self.context} with {n_threads} threads" if is_many else str(self.context)

    @property
    def first_step(self) -> int:
        """Env steps that the run has already completed."""
        return int(self.state["env_steps"]) if self.state is not None else 0

    @property
    def wanted_steps(self) -> int:
        """Env steps of the complete run, in the envs of all ranks."""
        return _wanted_steps(self.config, self.context)

    @property
    def no_snapshot(self) -> str | None:
        """Why a resumed run cannot continue its episodes; None: it can."""
        return None if self.tensor_env is not None else self.trial.no_snapshot

    @property
    def env_seed(self) -> int:
        """Seed of env 0 of this rank; its env i has this + i."""
        first = self.context.world.envs(self.config.n_envs).start
        is_adjacent = self.config.env_seeds == "adjacent"
        start = first_env_seed(self.config.seed, env_steps=self.first_step, is_adjacent=is_adjacent)
        return start + int(first)


def new_folder(config: TrainConfig) -> RunFolder:
    """The folder of a new run; not yet on disk."""
    return RunFolder.unused(Path(config.run_root), config.env.name, config.name)


@kept_cwd()
def make_plan(
    config: TrainConfig,
    *,
    callbacks: Mapping[str, Callback] | None = None,
    folder: RunFolder | None = None,
) -> RunPlan:
    """Find every mistake that can be found before a run folder or a worker exists."""
    context = _make_context(config)
    run_folder, state = folder or new_folder(config), None
    if config.resume is not None:
        run_folder, state = _resumed(config, config.resume, context)
    # An env may call os.chdir, which must not move the files of the run.
    run_folder = context.world.agreed(run_folder.absolute())
    if state is not None:
        state = _state_of_rank(config, state, context, run_folder)
    seed_global_generators(config.seed)
    tensor_env = find_tensor_env(config)
    is_vector = build_env_factory(config.env).is_vector
    if is_vector:
        _check_vector_env(config)
    self_play = find_self_play(config, tensor_env)
    make_env = build_env_factory(config.env) if self_play is None else self_play.arena.make_env
    trial = _try_envs(config, make_env, self_play)
    one_tensor_env = None if tensor_env is None else _try_tensor_env(config, tensor_env, context)
    config = with_mask_source(config, trial)
    env_spaces = Spaces(trial.observation_space, trial.action_space)
    load_policy = partial(_load_policy, run_folder, config, env_spaces)
    all_callbacks = build_callbacks(config, run_folder, context.device, load_policy)
    for name, callback in (callbacks or {}).items():
        if name in all_callbacks:
            raise ConfigError(f"callbacks.{name}: the config has one of that name; rename one")
        all_callbacks[name] = callback
    if config.curriculum is not None:
        check_phases(
            config,
            config.curriculum,
            list(all_callbacks.values()),
            env=one_tensor_env or make_env,
            opponents=None if self_play is None else self_play.player_names,
        )
    if state is None:  # an old run may have the setting
        _check_actions(config, trial)
    # Its steps will be compiled. After an error, a rank must end at once, without the import.
    if tensor_env is not None and not context.world.is_awaited:
        context.programs.import_compiler()
    with memory_explained(context.device, lambda: NETWORK_ADVICE):
        agent = build_agent(config, env_spaces, context)
        _try_agent(agent, trial)
    _advise_on_images(config, trial)
    if state is not None:
        with misfit_explained(run_folder):
            check_fits(agent.state_dict(), state["agent"], "agent")
            agent.load_state_dict(state["agent"])
    elif config.init_from is not None:
        config = started_from(config, agent)
    if one_tensor_env is not None:
        _check_tensor_env(config, one_tensor_env, trial)
    if trial.has_reset_rows:
        _check_reset_rows(config, context, agent)
    config = _with_cpu_threads(config, agent, context)
    config, remark = _with_n_envs(config, trial, agent, context, is_tensor=tensor_env is not None)
    reason = config.agent.why_not(config.n_envs, recurrent=is_recurrent(agent))
    if reason is not None:
        raise ConfigError(reason)
    _say_rounded(config, context)
    if unexpected := config.agent.remark(_wanted_steps(config, context)):
        say(unexpected)
    check_ranks(config, context, agent)
    pool = None
    if self_play is not None:
        pool = self_play.new_pool(agent, context)
        # First, so that others see its metrics.
        all_callbacks = {"opponents": OpponentReport(pool), **all_callbacks}
    return RunPlan(
        config,
        context,
        make_env,
        tensor_env,
        self_play,
        pool,
        trial,
        agent,
        run_folder,
        all_callbacks,
        state,
        remark,
    )


def _load_policy(
    run_folder: RunFolder, config: TrainConfig, env_spaces: Spaces, checkpoint: str
) -> Agent:
    """The policy of a checkpoint of this run; the generators of the run do not change."""
    before = global_generators_state()
    try:
        return restored_agent(run_folder, config, checkpoint, env_spaces)[0]
    finally:
        set_global_generators_state(before)


def _resumed(config: TrainConfig, path: str, context: RunContext) -> tuple[RunFolder, StateDict]:
    """The run to resume and the state of its last checkpoint, or of the one that ``path`` names."""
    if config.n_envs == "auto":
        raise ConfigError("n_envs=auto cannot be combined with resume=; give a number")
    run_folder = resumed_folder(path, trust=config.trust)
    with errors_of_resume(path):
        state = load_checkpoint(run_folder, named_checkpoint(path) or LATEST)
    with misfit_explained(run_folder):
        done, wanted = int(state["env_steps"]), _wanted_steps(config, context)
    if done >= wanted:
        raise ConfigError(
            f"resume={run_folder.path}: the run is complete, {done:,} of {wanted:,} env steps; "
            f"raise the goal to continue: total_steps={2 * max(done, wanted)}"
        )
    return run_folder, state


def _state_of_rank(
    config: TrainConfig, state: StateDict, context: RunContext, run_folder: RunFolder
) -> StateDict:
    """What this rank loads of a checkpoint; the algorithm may refuse other sizes."""
    own, parts = state_of_rank(state, context.world)
    with misfit_explained(run_folder):
        try:
            algorithm, n_envs = find_algorithm(config), int(config.n_envs)
            return algorithm.state_of_rank(own, parts, context.world, n_envs)
        except UserError as error:
            raise ConfigError(str(error)) from error


def _make_context(config: TrainConfig) -> RunContext:
    device = rank_device(resolve_device(config.device))
    if device.index is not None and device.type == "cuda":
        # New streams and kernels use the current device by default.
        torch.cuda.set_device(device)
    world = join_world(device, config.rank_timeout_seconds)
    mode = program_mode(config.compile, device)
    if mode == "graph" and (reason := world.why_no_graphs()):
        mode = "compiled"
        say(f"compile={config.compile}: {reason}")
    programs = Programs(device, mode, tell=say)
    return RunContext(device, config.seed, config.precision, programs, world)


def is_recurrent(agent: Agent) -> bool:
    return agent.new_memory(1) is not None


def _try_envs(config: TrainConfig, make_env: EnvFactory, self_play: SelfPlay | None) -> EnvTrial:
    """Play the env for a moment, and that of evaluations if it is another.

    A broken env is refused before a run folder exists.
    """
    options: dict[str, Any] = {}
    if config.n_envs == "auto" or config.vec_env.mode == "auto":
        options = {"seconds": 0.1, "least_steps": 20}  # long enough to time a step
    trial = _try_env(config, config.env, make_env, **options)
    if self_play is not None:
        trial = self_play.seen_by_agent(trial)
    if config.needs_two_players:
        if "evaluation" in config.callbacks:
            raise ConfigError(
                f"env {config.evaluated_env.name} needs two players, also in evaluations; name one "
                "by +eval_env.kwargs.opponent=NAME, or use ~callbacks.evaluation and a tournament"
            )
    elif config.evaluated_env != config.env or self_play is not None:
        _check_evaluated_env(config, trial)
    return trial


def _check_evaluated_env(config: TrainConfig, trial: EnvTrial) -> None:
    env = config.evaluated_env
    try:
        evaluated = _try_env(config, env, build_env_factory(env))
    except UserError as error:
        raise ConfigError(f"eval_env: {error}") from error
    for name in ("observation_space", "action_space"):
        theirs, ours = getattr(evaluated, name), getattr(trial, name)
        if theirs != ours:
            raise ConfigError(f"eval_env has the {name} {theirs}, but env has {ours}")


def _try_env(config: TrainConfig, env: EnvConfig, make_env: EnvFactory, **options: Any) -> EnvTrial:
    options |= {"mask_key": mask_key(config), "allow_nonfinite": config.agent.allows_nonfinite}
    is_parallel = config.vec_env.mode == "parallel"
    play = partial(try_env, make_env, env.name, **options)
    with say_if_slow(slow_trial(env.name, config.vec_env, in_worker=is_parallel)):
        trial = in_worker(play, env.name, config.vec_env) if is_parallel else play()
    for remark in trial.remarks:
        say(f"env {env.name}: {remark}")
        warnings.filterwarnings("ignore", re.escape(remark))  # a vector env would repeat it
    return trial


def _try_tensor_env(
    config: TrainConfig, env_class: type[DeviceVectorEnv], context: RunContext
) -> DeviceVectorEnv:
    """One tensor env: its class may refuse arguments that its single env accepts."""
    with memory_explained(context.device, lambda: "one env does not fit; use another device"):
        return make_tensor_env(config, env_class, context.device, n_envs=1, seed=0)


def _check_actions(config: TrainConfig, trial: EnvTrial) -> None:
    """Refuse a setting that would have no effect for these actions."""
    setting = config.agent.needs_box
    if setting is not None and not isinstance(trial.action_space, spaces.Box):
        raise ConfigError(
            f"{setting}: needs Box actions, but env {config.env.name} has "
            f"{trial.action_space}; leave {setting.partition('=')[0]} out"
        )


def _check_tensor_env(config: TrainConfig, env: DeviceVectorEnv, trial: EnvTrial) -> None:
    """Refuse settings that need envs in processes."""
    lacks_masks = config.agent.action_mask == "info" and not env.has_action_masks
    # In self-play, the tensor env has two players.
    is_other = config.opponent is None and env.single_observation_space != trial.observation_space
    for is_wrong, key_and_fix in (
        (bool(config.env.wrappers), "env.wrappers; put their work into the env class"),
        (config.vec_env.mode != "auto", "vec_env; leave vec_env=auto"),
        (config.collector != "sync", "collector; leave collector=sync"),
        (lacks_masks, "agent.action_mask without an action_mask of its class; set it to none"),
        (config.opponent is not None and env.has_action_masks, "opponent with its action_mask"),
        (is_other, "a single_env with another observation space than its own"),
        (config.agent.needs_processes is not None, config.agent.needs_processes),
    ):
        if is_wrong:
            raise ConfigError(
                f"env {config.env.name} is a tensor env, which does not support {key_and_fix}"
            )


def _check_vector_env(config: TrainConfig) -> None:
    """Refuse settings that need single envs."""
    plain, vec_env = VecEnvConfig(), config.vec_env
    of_workers = ("mode", "n_workers", "start_method", "on_worker_death")
    has_workers = any(getattr(vec_env, key) != getattr(plain, key) for key in of_workers)
    for is_wrong, key_and_fix in (
        (has_workers, "vec_env; leave vec_env=auto"),
        (config.collector != "sync", "collector; leave collector=sync"),
        (config.n_envs == "auto", "n_envs=auto; give a number"),
        (config.opponent is not None, "opponent"),
        (config.curriculum is not None, "curriculum"),
    ):
        if is_wrong:
            raise ConfigError(
                f"env {config.env.name} is a vector env, which does not support {key_and_fix}"
            )


def _check_reset_rows(config: TrainConfig, context: RunContext, agent: Agent) -> None:
    """Refuse what needs every step of a vector env to be a transition."""
    for is_wrong, key_and_fix in (
        (is_recurrent(agent), "network; use one that is not recurrent, such as network=mlp"),
        (context.world.size > 1, "torchrun; start one process"),
    ):
        if is_wrong:
            raise ConfigError(
                f"env {config.env.name} is a vector env that resets its envs in the next step, "
                f"which does not support {key_and_fix}"
            )


def _wanted_steps(config: TrainConfig, context: RunContext) -> int:
    """Env steps of the whole run, in the envs of all ranks."""
    return config.wanted_steps_in(context.world.all_envs(int(config.n_envs)))


def _say_rounded(config: TrainConfig, context: RunContext) -> None:
    """Say that a run trains whole iterations, if they are not ``total_steps``."""
    wanted, total = _wanted_steps(config, context), int(config.total_steps)
    if config.num_episodes is None and wanted != total:
        size = config.agent.iteration_steps(context.world.all_envs(int(config.n_envs)))
        n_iterations = f"{wanted // size:,} whole iterations" if wanted > size else "one iteration"
        say(f"total_steps={total:,}: trains {wanted:,} env steps, {n_iterations} of {size:,}")


def check_ranks(config: TrainConfig, context: RunContext, agent: Agent) -> None:
    """Refuse settings that need one process, and sizes that are too small for all ranks."""
    world = context.world
    modules = getattr(agent, "model", nn.Module()).modules()
    has_batch_norm = any(isinstance(each, _BatchNorm) for each in modules)
    for is_wrong, key in (
        (has_batch_norm, "network, which has BatchNorm layers"),
        (not find_algorithm(config).trains_on_ranks, f"agent.algorithm={config.agent.algorithm}"),
        (config.opponent is not None, "opponent"),
        (config.curriculum is not None, "curriculum"),
    ):
        if is_wrong:
            fix = "start one process, without torchrun"
            world.refuse(f"{key}: does not train on {world.name}; {fix}", ConfigError)
    if reason := config.agent.why_not(world.all_envs(int(config.n_envs))):
        world.refuse(f"{world.name}: {reason}", ConfigError)


def _with_cpu_threads(config: TrainConfig, agent: Agent, context: RunContext) -> TrainConfig:
    """The config with cpu_threads=auto replaced by a number.

    The run folder stores it: a resumed run must add in the same order.
    """
    # After a fork from a process with several threads of torch, an env that uses torch hangs.
    forks = config.vec_env.start_method == "fork"
    if config.cpu_threads != "auto":
        if forks and config.cpu_threads > 1:
            say(
                f"cpu_threads={config.cpu_threads} with vec_env.start_method=fork: forked workers "
                "hang if the env uses torch; if it does, set cpu_threads=1 or start_method=spawn"
            )
        return config
    if context.device.type != "cpu":
        return config
    convolutions = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
    has_some = any(isinstance(module, convolutions) for module in agent.greedy().modules())
    n_threads = 1
    if has_some and not forks:
        # torch's own number leaves out hyper-threads, and follows OMP_NUM_THREADS.
        n_threads = min(available_cores(), torch.get_num_threads())
    return dataclasses.replace(config, cpu_threads=context.world.agreed(n_threads))


def _with_n_envs(
    config: TrainConfig, trial: EnvTrial, agent: Agent, context: RunContext, *, is_tensor: bool
) -> tuple[TrainConfig, str]:
    """The config with n_envs=auto replaced by a number, and the reason for this number."""
    if config.n_envs != "auto":
        return config, ""
    if is_tensor:
        n_envs = 256 if context.device.type == "cpu" else 4096  # enough to fill the device
        while n_envs > 1 and not config.suits(n_envs):
            n_envs //= 2
        reason = f"n_envs=auto: {n_envs} envs"
    else:
        n_slices = config.vec_env.n_workers or available_cores()
        with torch_threads(context.device, config.cpu_threads):
            n_envs, reason = choose_n_envs(
                trial,
                partial(act_greedily, agent),
                n_slices=1 if config.vec_env.mode == "serial" else n_slices,
                allowed=partial(config.suits, recurrent=is_recurrent(agent)),
            )
    n_envs = context.world.agreed(n_envs)
    try:
        return dataclasses.replace(config, n_envs=n_envs), reason
    except ValueError as error:
        raise ConfigError(f"n_envs=auto chose {n_envs}, but {error}") from error


def _try_agent(agent: Agent, trial: EnvTrial) -> None:
    """One forward pass, to find a network of the wrong shape."""
    # A batch of two, since BatchNorm refuses one.
    mask = agent.mask_of({name: [value, value] for name, value in trial.info.items()})
    batch = batched(trial.observation_space, [trial.obs, trial.obs])
    try:
        agent.act_batch(batch, True, action_mask=mask, memory=agent.new_memory(2))
    except UserError:
        raise
    except Exception as error:  # a user's network may raise anything
        if ran_out_of_memory(error):
            raise
        _check_features(agent)
        reason = f"{type(error).__name__}: {error}{place_of(error)}"
        shapes = dict(ObservationReader(trial.observation_space).shapes)
        shape = shapes[""] if list(shapes) == [""] else shapes
        raise ConfigError(
            f"network cannot process an observation of shape {shape}: {reason}"
        ) from error
    _check_features(agent)
    if fault := network_fault(
        agent.greedy(), ObservationReader(trial.observation_space).read(batch)
    ):
        raise ConfigError(f"{fault}; it must return finite numbers for finite observations")


def _advise_on_images(config: TrainConfig, trial: EnvTrial) -> None:
    """Say that an MLP reads an image pixel by pixel."""
    space, network = trial.observation_space, str(config.network.get("_target_"))
    is_image = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
    if is_image and network.endswith(".MLP"):
        say(f"network=mlp: the observation is an image of shape {space.shape}; try network=cnn")


def _check_features(agent: Agent) -> None:
    """Refuse a network whose output is not one tensor of the shape that it declares."""
    policy = agent.greedy()
    if not isinstance(policy, GreedyPolicy):
        return
    name, declared = type(policy.trunk).__name__, out_features(policy.trunk)
    policy.trunk.requires_grad_(True)
    inputs = policy.example_inputs()
    try:
        features, _ = policy.features(inputs)
    except Exception:  # the network does not even accept the observation
        return
    if not isinstance(features, Tensor):
        kind = type(features).__name__
        raise ConfigError(
            f"network {name}: forward returned a {kind}; return one tensor, [batch, out_features]"
        )
    n_rows, shape = len(next(iter(inputs.values()))), tuple(features.shape)
    if len(shape) != 2 or shape[0] != n_rows:
        raise ConfigError(
            f"network {name}: forward returned features of shape {shape} for a batch of {n_rows} "
            f"observations; return ({n_rows}, {declared})"
        )
    if shape[1] != declared:
        raise ConfigError(
            f"network {name} has out_features={declared}, but its forward "
            f"returns {shape[1]} features; make them equal"
        )
    if not features.requires_grad and any(True for _ in policy.trunk.parameters()):
        say(
            f"network {name}: its features have no gradient, so training does not change it; "
            "remove detach and no_grad from forward if it should learn"
        )
    elif features.requires_grad:
        try:
            features.sum().backward()  # type: ignore[no-untyped-call]  # of torch
        except Exception as error:  # an operation in place, or a user's own backward
            raise ConfigError(
                f"network {name}: the gradient of forward fails: {type_and_line(error)}"
            ) from error
