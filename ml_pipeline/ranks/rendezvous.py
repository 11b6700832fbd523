"""How the ranks that torchrun has started find each other: its store and the network interface.

torchrun's store outlives its ranks. After a restart it still has the keys of the ranks before, and
the number of the restart may differ between machines. So ranks agree on new keys when they meet.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import struct
import sys
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from ml_pipeline.errors import UserError, last_line, shorten

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_POLL_SECONDS = 0.01
_INTERFACE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_meetings = itertools.count()


class RankError(UserError):
    """Another rank failed, ended or does not answer."""


def is_launched() -> bool:
    """Whether this process is one of several ranks."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def launched_rank() -> int:
    """The rank that torchrun gave to this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_launched() else 0


def meet(message: str, timeout_seconds: float) -> tuple[Store, str]:
    """Wait for all ranks; returns a store with their own keys, and the ``message`` of rank 0."""
    # Not every build of torch has it.
    from torch._C._distributed_c10d import PrefixStore

    rank, size = launched_rank(), int(os.environ["WORLD_SIZE"])
    shared = launcher_store(timeout_seconds)
    try:
        # Ranks meet in the same order; a rank may reach the next meeting first.
        lobby = PrefixStore(f"meeting {next(_meetings)}", shared)
        if rank == 0:
            name = f"ranks {secrets.token_hex(8)}"
            store = PrefixStore(name, shared)
            _welcome(lobby, store, size, json.dumps([name, message]), timeout_seconds)
            return store, message
        # A name that the dead rank of the same number did not have.
        token = secrets.token_hex(8)
        lobby.set(f"hello/{rank}", token)
        name, message = json.loads(lobby.get(f"welcome/{token}"))
        store = PrefixStore(name, shared)
        store.set(f"met/{rank}", "")
        return store, message
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise _not_joined(error, timeout_seconds) from error


def _not_joined(error: Exception, seconds: float) -> RankError:
    rank, size = launched_rank(), os.environ["WORLD_SIZE"]
    return RankError(
        f"WORLD_SIZE={size}: not all ranks joined rank {rank} within {seconds:g} s "
        f"({shorten(last_line(error))}); look for the first error among the others"
    )


def _welcome(lobby: Store, store: Store, size: int, message: str, seconds: float) -> None:
    """Answer the other ranks until all have read the message."""
    missing = list(range(1, size))
    deadline = time.monotonic() + seconds
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"missing: {', '.join(f'rank {each}' for each in missing)}")
        for rank in missing:
            if lobby.check([f"hello/{rank}"]):
                lobby.set(f"welcome/{lobby.get(f'hello/{rank}').decode()}", message)
        time.sleep(_POLL_SECONDS)
        missing = [rank for rank in missing if not store.check([f"met/{rank}"])]


@cache
def launcher_store(timeout_seconds: float) -> Store:
    """The store of torchrun; it outlives the ranks, also if torchrun restarts them."""
    from torch.distributed.rendezvous import rendezvous

    rank, size = launched_rank(), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_seconds)
    store: Store
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise _not_joined(error, timeout_seconds) from error
    return store


def choose_interface() -> None:
    """Let Gloo use the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names one.

    Otherwise Gloo uses the address of the host name, which is often 127.0.1.1.
    """
    is_one_machine = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    if is_one_machine or _INTERFACE in os.environ or sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing; any port does
            name = _interface_of(probe, probe.getsockname()[0])
        except OSError:  # a name that does not resolve, or IPv6 only: leave the choice to Gloo
            return
    if name not in ("", "lo"):
        os.environ[_INTERFACE] = name


def _interface_of(any_socket: socket.socket, address: str) -> str:
    """The name of the network interface with an IPv4 address, or an empty text."""
    import fcntl

    for _, name in socket.if_nameindex():
        try:
            reply = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has no address
            continue
        if socket.inet_ntoa(reply[20:24]) == address:
            return name
    return ""
