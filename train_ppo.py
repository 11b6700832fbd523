"""Train PPO: ``python train_ppo.py env=cartpole n_envs=8 device=mps``; ``--help`` tells more.

Spawned workers import this file again: torch and all that needs it are imported inside ``main``.
"""

import os
import sys

if sys.version_info < (3, 10):
    sys.exit("ml_pipeline needs Python 3.10 or newer, this is %d.%d" % sys.version_info[:2])

from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from ml_pipeline.config.train import TrainConfig
from ml_pipeline.errors import UserError

ConfigStore.instance().store(name="train_schema", node=TrainConfig)


@hydra.main(version_base="1.3", config_path="conf", config_name="train_ppo")
def main(cfg: DictConfig) -> float:
    """One run; returns the value of ``cfg.objective`` for sweepers."""
    from ml_pipeline import build
    from ml_pipeline.signals import Interrupted

    job = HydraConfig.get()
    try:
        if job.mode != RunMode.MULTIRUN:
            return build.run(cfg, job.overrides.task).objective
        return _run_in_sweep(cfg, job)
    except Interrupted as stop:
        raise SystemExit(stop.exit_code) from None
    except UserError as error:
        # Hydra prints an error of this kind without a traceback and ends with exit code 1; in a
        # sweep the other jobs go on.
        raise CompactHydraException(str(error)) from error


def _run_in_sweep(cfg: DictConfig, job: Any) -> float:
    """One job, noted in the folder of the sweep, with its share of the cores."""
    from ml_pipeline import build
    from ml_pipeline.envs.workers.cores import CORES_VARIABLE, available_cores
    from ml_pipeline.sweeps import end_with_parent, noted_job, share_of_cores

    if "n_jobs" in job.launcher and CORES_VARIABLE not in os.environ:  # a process of its own
        os.environ[CORES_VARIABLE] = str(share_of_cores(job.launcher, available_cores()))
        end_with_parent()
    folder, overrides = Path(job.sweep.dir), job.overrides.task
    with noted_job(folder, job.job.num, overrides) as note:
        try:
            result = build.run(cfg, overrides, sweep=folder.name)
        except UserError as error:
            # Hydra reports a failed job when all are done; whoever watches wants to know now.
            print(f"job {job.job.num} failed: {error}", file=sys.stderr, flush=True)
            raise
        note.finished(result.run_dir, result.objective)
    return result.objective


if __name__ == "__main__":
    from ml_pipeline.sweeps import SweepReport, check_launcher

    try:
        check_launcher(sys.argv[1:])
        main()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt as stop:  # of a sweep; or outside of training, with nothing to save
        sys.exit(getattr(stop, "exit_code", 130))
    finally:
        SweepReport.tell()
