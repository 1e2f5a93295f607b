"""Where the processes of a run meet: the store of torch.distributed.

On one host it is a file in a folder of the run that only its user can read. On several hosts, the
first process listens on the address that the launcher chose and on no other, and every key begins
with a token of the run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

FILE, TOKEN = "PIPER_STORE", "PIPER_STORE_TOKEN"  # set by Piper's launchers
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun


def open_store(timeout: timedelta, given: Mapping[str, str] = os.environ) -> dist.Store:
    """The store of this run."""
    world = int(given["WORLD_SIZE"])
    if path := given.get(FILE):
        store: dist.Store = dist.FileStore(path, world)
        store.set_timeout(timeout)
        return store
    if token := given.get(TOKEN):
        return dist.PrefixStore(token, own_store(given, timeout))
    found, *_ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    # After a restart, torchrun's store still has the keys of the attempt before.
    return dist.PrefixStore(f"attempt {given.get(ATTEMPT, '0')}", found)


def second_connection(given: Mapping[str, str] = os.environ) -> dist.Store:
    """The same store, for another thread: a wait in the first connection would block it."""
    soon = timedelta(seconds=5)
    if path := given.get(FILE):
        return dist.FileStore(path, -1)  # one more user, who never deletes the file
    attempt = given.get(TOKEN) or f"attempt {given.get(ATTEMPT, '0')}"
    address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    return dist.PrefixStore(attempt, dist.TCPStore(address, port, None, False, soon))


def own_store(given: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """A store that listens on one address only. By default it would listen on all of them."""
    address, port, world = given["MASTER_ADDR"], int(given["MASTER_PORT"]), int(given["WORLD_SIZE"])
    if int(given["RANK"]):
        return dist.TCPStore(address, port, world, False, timeout)
    family, *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server((address, port), family=family, backlog=max(128, world))
    return dist.TCPStore(address, port, world, True, timeout, master_listen_fd=listener.detach())
