"""Train DQN: ``python train_dqn.py experiment=dqn_cartpole``; ``--help`` lists everything else."""

import sys

if sys.version_info < (3, 10):
    sys.exit("ml_pipeline needs Python 3.10 or newer, this is %d.%d" % sys.version_info[:2])

from ml_pipeline.assembly.script import main

if __name__ == "__main__":
    sys.exit(main(agent="dqn"))
