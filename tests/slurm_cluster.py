"""A Slurm cluster on this machine, for tests: its own daemons, ports, key and folders."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cleanup
from conftest import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("node1", "node2")
STATES_OF_ENDED_JOBS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# Nodes claim more cores, memory and GPUs than this machine has, so that jobs may ask for them.
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs=8 RealMemory=64000 Gres=gpu:8 State=UNKNOWN"
)


class SlurmCluster:
    """Runs munged, slurmctld and one slurmd per node until ``stop``."""

    def __init__(self) -> None:
        # A short path, unlike tmp_path: the name of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm_"))
        self.config = self.folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.config)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        # Another process, because the tests may be killed.
        self._cleanup = subprocess.Popen(
            [sys.executable, slurm_cleanup.__file__, self.folder], stdin=subprocess.PIPE
        )

    def start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        (self.folder / "state").mkdir()
        control_port, *ports = _free_ports(1 + len(NODES))
        nodes = [NODE.format(name=n, host=host, port=p) for n, p in zip(NODES, ports, strict=True)]
        self.config.write_text(
            CONFIG.format(
                host=host, folder=self.folder, control_port=control_port, nodes="\n".join(nodes)
            )
        )
        gpus = [self.folder / f"gpu{index}" for index in range(8)]  # in place of devices
        for gpu in gpus:
            gpu.touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        self.folder.chmod(0o711)  # munged refuses a socket that others cannot reach
        files = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "pid-file": self.folder / "munge.pid",
            "log-file": self.folder / "munge.log",
            "seed-file": self.folder / "munge.seed",
        }
        options = [f"--{name}={path}" for name, path in files.items()]
        self._start("munged", "--foreground", "--force", "--num-threads=2", *options)
        wait_until((self.folder / "munge.socket").exists, 10)
        self._start("slurmctld", "-D", "-i", "-f", str(self.config))
        for node in NODES:
            self._start("slurmd", "-D", "-N", node, "-f", str(self.config))
        wait_until(self._is_ready, 30)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}_output.log").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _is_ready(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} has ended:\n{self.logs()}"
        command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout.split() == ["idle"] * len(NODES)

    def call(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path, **variables: str) -> str:
        """Submit a batch script and return the id of the job."""
        return self.call("sbatch", "--parsable", *words, cwd=cwd, **variables)

    def states(self, job: str) -> list[str]:
        """The states of a job, one for each task of an array."""
        words = ["squeue", "--noheader", "--array", "--states=all", "--format=%T"]
        return self.call(*words, f"--jobs={job}").split()

    def wait_for_end(self, job: str, seconds: float) -> list[str]:
        """Wait until all tasks of a job have ended, and return their states."""
        wait_until(lambda: all(each in STATES_OF_ENDED_JOBS for each in self.states(job)), seconds)
        return self.states(job)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts += [f"== {path.name}", *lines]
        return "\n".join(parts)

    def stop(self) -> None:
        """End all jobs and daemons."""
        assert self._cleanup.stdin is not None
        self._cleanup.stdin.close()
        assert self._cleanup.wait(timeout=30) == 0
        for daemon in self._daemons:
            daemon.wait(timeout=10)


def _free_ports(n_ports: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@contextlib.contextmanager
def running_cluster() -> Iterator[SlurmCluster]:
    """A cluster of two nodes; skips the test where there is no Slurm."""
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("only root can start the daemons of Slurm")
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
