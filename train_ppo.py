"""Train PPO: ``python train_ppo.py env=cartpole n_envs=8 device=mps``; ``--help`` tells more.

Spawned workers import this file again: torch and all that needs it are imported inside ``main``.
"""

import sys

if sys.version_info < (3, 10):
    sys.exit("ml_pipeline needs Python 3.10 or newer, this is %d.%d" % sys.version_info[:2])

from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from ml_pipeline.config import TrainConfig
from ml_pipeline.errors import UserError

ConfigStore.instance().store(name="train_schema", node=TrainConfig)


@hydra.main(version_base="1.3", config_path="conf", config_name="train_ppo")
def main(cfg: DictConfig) -> float:
    """One run; returns the value of ``cfg.objective`` for sweepers."""
    from ml_pipeline import build
    from ml_pipeline.runs.stop_signals import Interrupted

    job = HydraConfig.get()
    in_sweep = job.mode == RunMode.MULTIRUN
    sweep = Path(job.sweep.dir).name if in_sweep else None
    try:
        return build.run(cfg, job.overrides.task, sweep=sweep).objective
    except Interrupted as stop:
        raise SystemExit(stop.exit_code) from None
    except UserError as error:
        if in_sweep:
            # Hydra reports a failed job when all are done; whoever watches wants to know now.
            print(f"job {job.job.num} failed: {error}", file=sys.stderr, flush=True)
        # Hydra prints an error of this kind without a traceback and ends with exit code 1; in a
        # sweep the other jobs go on.
        raise CompactHydraException(str(error)) from error


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before or after training, where nothing is to be saved
        sys.exit(130)
