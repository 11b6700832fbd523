"""Two hosts on one machine: network namespaces joined by a cable, each with its own host name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
PORT = 29500  # no other process is in these namespaces


class Hosts:
    """Hosts a and b; ``running`` makes and removes them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._n_starts = 0

    def _namespace(self, host: str) -> str:
        return f"mp{os.getpid()}{host}"

    def _interface(self, host: str) -> str:
        return f"v{os.getpid()}{host}"

    def make(self) -> None:
        a, b = ADDRESSES
        for host in ADDRESSES:
            _ip("netns", "add", self._namespace(host))
            # As Debian installs it: the host's own name leads to an address without a cable.
            folder = Path("/etc/netns") / self._namespace(host)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{host}\n")
        ends = [self._interface(a), "netns", self._namespace(a), "type", "veth", "peer", "name"]
        _ip("link", "add", *ends, self._interface(b), "netns", self._namespace(b))
        for host, address in ADDRESSES.items():
            in_host = ["-n", self._namespace(host)]
            _ip(*in_host, "addr", "add", f"{address}/24", "dev", self._interface(host))
            _ip(*in_host, "link", "set", "lo", "up")
            self.set_link(host, "up")

    def remove(self) -> None:
        for host in ADDRESSES:
            if self._namespace(host) in _ip("netns", "list").split():
                self.kill(host)
                _ip("netns", "del", self._namespace(host))
            shutil.rmtree(Path("/etc/netns") / self._namespace(host), ignore_errors=True)

    def set_link(self, host: str, state: str) -> None:
        _ip("-n", self._namespace(host), "link", "set", self._interface(host), state)

    def pids(self, host: str) -> list[int]:
        return [int(each) for each in _ip("netns", "pids", self._namespace(host)).split()]

    def kill(self, host: str) -> None:
        """End every process of a host at once, as a power cut does."""
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)

    def rank_pid(self, host: str) -> int:
        for pid in self.pids(host):
            if b"LOCAL_RANK=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(f"host {host} has no rank")

    def start(self, *words: str, c10d: bool = True, on: str = "ab") -> list[Launched]:
        """Start torchrun with one rank on each host, or on those of ``on``."""
        self._n_starts += 1
        launched = []
        for number, (host, address) in enumerate(ADDRESSES.items()):
            if host not in on:
                continue
            if c10d:
                endpoint = f"--rdzv_endpoint={ADDRESSES['a']}:{PORT}"
                is_host = f"--rdzv_conf=is_host={int(number == 0)}"
                options = ["--rdzv_backend=c10d", endpoint, is_host, f"--local_addr={address}"]
            else:
                options = [f"--master_addr={ADDRESSES['a']}", f"--master_port={PORT}"]
                options += [f"--node_rank={number}"]
            named = ["unshare", "--uts", "sh", "-c", f'hostname node{host} && exec "$@"', "sh"]
            command = ["ip", "netns", "exec", self._namespace(host), *named]
            command += [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            command += ["--nproc_per_node=1", *options, *words]
            log = self._logs / f"{self._n_starts}{host}.log"
            launched.append(Launched(command, log))
        return launched


class Launched:
    """torchrun on one host."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def ended(self, seconds: float) -> tuple[int, str]:
        """The exit code and the output, at most ``seconds`` from now."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running:\n{self._log.read_text()}") from error
        return code, self._log.read_text()


@contextmanager
def running(logs: Path) -> Iterator[Hosts]:
    hosts = Hosts(logs)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def why_no_hosts() -> str | None:
    """Why this machine cannot have hosts; None: it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [each for each in ("ip", "unshare") if shutil.which(each) is None]
    if missing:
        return f"needs the program {missing[0]}"
    name = f"mp{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def wait_for(path: Path, pattern: str, seconds: float = 60.0) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + seconds
    while not list(path.glob(pattern)):
        assert time.monotonic() < deadline, f"no {pattern} in {path}"
        time.sleep(0.01)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
