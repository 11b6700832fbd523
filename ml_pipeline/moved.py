"""Where modules of earlier versions are now, so that old runs, policies and scripts still load.

A run folder, an exported policy, a study and a pickled env name classes by dotted path. ``moved``
gives the current path. ``OldModules`` lets ``import`` find the old paths too, for a user's code.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "ml_pipeline."

# Both tables: paths below ml_pipeline, from the oldest name that was ever released.
_MODULES = {
    "agents.acting_noise": "policy.acting_noise",
    "agents.adam": "policy.optimiser",
    "agents.box_scale": "policy.box_scale",
    "agents.distributions": "policy.distributions",
    "agents.dqn": "algorithms.dqn.agent",
    "agents.fast.adam_kernels": "algorithms.ppo.fast.adam_kernels",
    "agents.fast.choice": "algorithms.ppo.fast.choice",
    "agents.fast.mlp_sac": "algorithms.sac.fast.mlp_sac",
    "agents.fast.numpy_dqn": "algorithms.dqn.fast.numpy_dqn",
    "agents.fast.numpy_mlp": "policy.numpy_mlp",
    "agents.fast.numpy_ppo": "algorithms.ppo.fast.numpy_ppo",
    "agents.fast.triton_kernels": "algorithms.ppo.fast.triton_kernels",
    "agents.fast.triton_ppo": "algorithms.ppo.fast.triton_ppo",
    "agents.image_networks": "policy.image_networks",
    "agents.masks": "policy.masks",
    "agents.networks": "policy.networks",
    "agents.observations": "policy.observations",
    "agents.policy": "policy.actor_critic",
    "agents.ppo": "algorithms.ppo.agent",
    "agents.ppo_loss_check": "algorithms.ppo.loss_check",
    "agents.recurrent": "policy.recurrent",
    "agents.sac": "algorithms.sac.agent",
    "agents.sac_networks": "algorithms.replay.networks",
    "agents.soft_actions": "algorithms.sac.soft_actions",
    "agents.space_data": "policy.space_data",
    "agents.squashed": "algorithms.sac.soft_actions",
    "agents.update_noise": "algorithms.replay.agent",
    "algorithms.old_weights": "training.old_weights",
    "analysis.games": "games.matches",
    "analysis.ratings": "games.ratings",
    "analysis.replay_audit": "algorithms.replay.audit",
    "analysis.tournament": "games.tournament",
    "analysis.tournament_report": "games.tournament_report",
    "analysis.trading_judgement": "worlds.trading.judgement",
    "analysis.trading_report": "worlds.trading.report",
    "analysis.trading_statistics": "worlds.trading.statistics",
    "analysis.trading_walk": "worlds.trading.walk",
    "api": "assembly.api",
    "build": "assembly.run",
    "callbacks.opponents": "games.opponent_report",
    "commands.data": "worlds.trading.commands.data",
    "commands.judge": "worlds.trading.commands.judge",
    "commands.paper": "worlds.trading.commands.paper",
    "commands.replay": "algorithms.replay.commands.replay",
    "config.data": "worlds.trading.config",
    "config.dqn": "algorithms.dqn.config",
    "config.off_policy": "algorithms.replay.config",
    "config.ppo": "algorithms.ppo.config",
    "config.sac": "algorithms.sac.config",
    "data.align": "worlds.trading.data.align",
    "data.bars": "worlds.trading.data.bars",
    "data.cache": "worlds.trading.data.cache",
    "data.edge": "worlds.trading.data.edge",
    "data.errors": "worlds.trading.data.market",
    "data.features": "worlds.trading.data.features",
    "data.files": "worlds.trading.data.files",
    "data.layouts": "worlds.trading.data.layouts",
    "data.load": "worlds.trading.data.load",
    "data.market": "worlds.trading.data.market",
    "data.mistakes": "worlds.trading.data.layouts",
    "data.normalise": "worlds.trading.data.load",
    "data.read": "worlds.trading.data.read",
    "data.resample": "worlds.trading.data.bars",
    "data.rolling": "worlds.trading.data.rolling",
    "data.split": "worlds.trading.data.load",
    "data.synthetic": "worlds.trading.data.synthetic",
    "data.zones": "worlds.trading.data.read",
    "deploy.paper": "worlds.trading.paper",
    "deploy.paper_log": "worlds.trading.paper_log",
    "distributed": "ranks.world",
    "door.compose": "assembly.compose",
    "door.entry": "assembly.entry",
    "door.env_parts": "assembly.run",
    "door.exits": "assembly.script",
    "door.explain": "assembly.explain",
    "door.judge": "worlds.trading.judge",
    "door.load": "assembly.load",
    "door.parts": "assembly.build",
    "door.phases": "assembly.phases",
    "door.plan": "assembly.plan",
    "door.players": "assembly.players",
    "door.presets": "assembly.entry",
    "door.ranks": "assembly.plan",
    "door.restarts": "assembly.restarts",
    "door.script": "assembly.script",
    "door.self_play": "assembly.players",
    "door.slurm": "assembly.slurm",
    "door.trust": "assembly.trust",
    "door.warm_start": "assembly.load",
    "envs.atari": "envs.wrappers.atari",
    "envs.evaluation": "analysis.evaluate",
    "envs.parallel_api": "games.parallel_api",
    "envs.self_play": "games.self_play",
    "envs.tasks.acrobot": "envs.classic_control.acrobot",
    "envs.tasks.cartpole": "envs.classic_control.cartpole",
    "envs.tasks.expressions": "worlds.game_boy.expressions",
    "envs.tasks.game_boy": "worlds.game_boy.env",
    "envs.tasks.game_boy_emulator": "worlds.game_boy.emulator",
    "envs.tasks.game_boy_rules": "worlds.game_boy.rules",
    "envs.tasks.hide_velocity": "envs.wrappers.hide_velocity",
    "envs.tasks.hockey": "worlds.hockey.env",
    "envs.tasks.hockey_drawing": "worlds.hockey.drawing",
    "envs.tasks.hockey_opponents": "worlds.hockey.opponents",
    "envs.tasks.hockey_physics": "worlds.hockey.physics",
    "envs.tasks.mountain_car_continuous": "envs.classic_control.mountain_car_continuous",
    "envs.tasks.pendulum": "envs.classic_control.pendulum",
    "envs.tasks.petting_zoo": "games.petting_zoo",
    "envs.tasks.real_hockey": "worlds.hockey.real_hockey",
    "envs.tasks.trading": "worlds.trading.env",
    "envs.tasks.trading_account": "worlds.trading.account",
    "envs.tasks.trading_rewards": "worlds.trading.rewards",
    "envs.tasks.trading_task": "worlds.trading.task",
    "envs.tensor_self_play": "games.tensor_self_play",
    "envs.tensor_tasks.acrobot": "envs.classic_control.acrobot",
    "envs.tensor_tasks.cartpole": "envs.classic_control.cartpole",
    "envs.tensor_tasks.hockey": "worlds.hockey.tensor_env",
    "envs.tensor_tasks.mountain_car_continuous": "envs.classic_control.mountain_car_continuous",
    "envs.tensor_tasks.pendulum": "envs.classic_control.pendulum",
    "envs.tensor_tasks.trading": "worlds.trading.tensor_env",
    "envs.two_players": "games.two_players",
    "envs.wrappers.hockey_terms": "worlds.hockey.shaping_terms",
    "games.tensor_opponents": "games.tensor_self_play",
    "meeting": "ranks.rendezvous",
    "protocols": "training.contracts",
    "rank_memory": "ranks.shared_memory",
    "runs.replay_files": "algorithms.replay.files",
    "study.trading": "worlds.trading.task",
    "sweeps": "assembly.sweeps",
    "training.collector": "algorithms.ppo.collect",
    "training.episode_window": "envs.episode_stats",
    "training.final_observations": "algorithms.replay.windows",
    "training.frame_stacks": "algorithms.replay.windows",
    "training.gpu.acting": "training.acting",
    "training.gpu.device_rows": "algorithms.replay.device_rows",
    "training.gpu.epochs": "algorithms.ppo.on_device",
    "training.gpu.programs": "training.graphs",
    "training.off_policy_trainer": "algorithms.replay.trainer",
    "training.opponent_pool": "games.opponent_pool",
    "training.ppo_trainer": "algorithms.ppo.trainer",
    "training.rank_epochs": "algorithms.ppo.trainer",
    "training.rank_learning": "algorithms.replay.learning",
    "training.rank_replay": "algorithms.replay.rank_replay",
    "training.replay_buffer": "algorithms.replay.buffer",
    "training.replay_learning": "algorithms.replay.learning",
    "training.replay_rows": "algorithms.replay.files",
    "training.replay_steps": "algorithms.replay.trainer",
    "training.replay_windows": "algorithms.replay.windows",
    "training.rollout_buffer": "algorithms.ppo.rollout",
    "training.sum_tree": "algorithms.replay.priorities",
    "training.tensor.buffer": "algorithms.ppo.rollout",
    "training.tensor.collector": "algorithms.ppo.collect",
    "training.tensor.gae_kernel": "training.gae_kernel",
    "training.tensor.opponents": "games.tensor_self_play",
    "training.tensor.replay_steps": "algorithms.replay.trainer",
    "training.tensor.returns": "training.returns",
    "training.undo": "algorithms.ppo.trainer",
}
_NAMES = {
    "agents.sac_networks.Temperature": "algorithms.sac.agent.Temperature",
    "door.env_parts.find_tensor_env": "assembly.build.find_tensor_env",
    "door.env_parts.make_tensor_env": "assembly.build.make_tensor_env",
    "door.compose.find_algorithm": "assembly.agent.find_algorithm",
    "door.parts.build_agent": "assembly.agent.build_agent",
    "door.parts.build_network": "assembly.agent.build_network",
    "door.parts.build_trainer": "assembly.agent.build_trainer",
    "door.parts.build_loop": "assembly.run.build_loop",
    "door.parts.build_record": "assembly.run.build_record",
    "door.parts.memory_advice": "assembly.run.memory_advice",
    "door.parts.read_saved_episodes": "assembly.run.read_saved_episodes",
    "door.parts.resume": "assembly.run.resume",
    "protocols.Place": "training.contracts.RunContext",
    "training.tensor.returns.TensorRewardScaler": "training.reward_scaler.RewardScaler",
    "agents.networks.CNN": "policy.image_networks.CNN",
    "agents.networks.DictNetwork": "policy.image_networks.DictNetwork",
    "agents.networks.Recurrent": "policy.recurrent.Recurrent",
    "agents.ppo.LossTerms": "algorithms.ppo.loss.LossTerms",
    "agents.ppo.normalised": "algorithms.ppo.loss.normalised",
    "agents.ppo.policy_change": "algorithms.ppo.loss.policy_change",
    "agents.ppo.ppo_loss": "algorithms.ppo.loss.ppo_loss",
    "algorithms.dqn.DQN": "algorithms.dqn.algorithm.DQN",
    "algorithms.ppo.PPO": "algorithms.ppo.algorithm.PPO",
    "algorithms.sac.SAC": "algorithms.sac.algorithm.SAC",
    "protocols.BatchPart": "ranks.batches.BatchPart",
    "protocols.Episode": "envs.episode_stats.Episode",
    "protocols.Metrics": "records.Metrics",
    "protocols.Minibatch": "algorithms.ppo.loss.Minibatch",
    "protocols.NetworkBuilder": "policy.contracts.NetworkBuilder",
    "protocols.Obs": "policy.contracts.Obs",
    "protocols.Policy": "policy.contracts.Policy",
    "protocols.PolicyInput": "policy.contracts.PolicyInput",
    "protocols.PolicySample": "policy.contracts.PolicySample",
    "protocols.Rates": "algorithms.ppo.loss.Rates",
    "protocols.ReplayBatch": "algorithms.replay.contracts.ReplayBatch",
    "protocols.Scripted": "games.two_players.Scripted",
    "protocols.Spaces": "policy.contracts.Spaces",
    "protocols.StateDict": "records.StateDict",
    "protocols.UpdateResult": "algorithms.ppo.loss.UpdateResult",
}
# Packages that are gone; import must find them before it finds a module inside.
_PACKAGES = {
    ".".join(name.split(".")[:n]) for name in _MODULES for n in range(1, name.count(".") + 1)
}


def moved(path: str) -> str:
    """The current path of a module, or of a name in it; ``path`` may be an older one."""
    name = path.removeprefix(_PACKAGE)
    if name == path:
        return path
    module, _, last = name.rpartition(".")
    if name in _NAMES or name in _MODULES:
        return _PACKAGE + (_NAMES.get(name) or _MODULES[name])
    return f"{_PACKAGE}{_MODULES[module]}.{last}" if module in _MODULES else path


class OldModules(MetaPathFinder, Loader):
    """Finds modules at their old paths; looks up their names at the new ones, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(_PACKAGE)
        if name == fullname or not (name in _MODULES or name in _PACKAGES):
            return None
        return ModuleSpec(fullname, self, is_package=name in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        def look_up(name: str) -> Any:
            old = f"{module.__name__}.{name}"
            if name.startswith("__") or moved(old) == old:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            place, _, new_name = moved(old).rpartition(".")
            found = getattr(importlib.import_module(place), new_name)
            warnings.warn(f"{old} is now {place}.{new_name}", DeprecationWarning, stacklevel=2)
            return found

        module.__getattr__ = look_up  # type: ignore[method-assign]


def find_old_modules() -> None:
    """Let ``import`` find the old paths; after all others, so that it costs nothing."""
    if not any(isinstance(each, OldModules) for each in sys.meta_path):
        sys.meta_path.append(OldModules())
