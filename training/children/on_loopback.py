"""Run `accelerate launch` for the ranks of one machine, with a rendezvous on its loopback only.

torch's store listens on every interface, whatever its address, and accepts anybody who reaches it
(torch 2.13). Here the store gets a socket that is already bound."""

import runpy
import socket
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

LOOPBACK = "127.0.0.1"


def store(
    host: str, port: int, world_size: int | None, is_master: bool, *args: Any, **options: Any
) -> TCPStore:
    """Make the store of the static rendezvous; the server listens on the loopback only."""
    if is_master:
        listener = socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN)
        options["master_listen_fd"] = listener.detach()
    return TCPStore(LOOPBACK, port, world_size, is_master, *args, **options)


if __name__ == "__main__":
    assert static_tcp_rendezvous.TCPStore is TCPStore, (
        "torch's static rendezvous makes its store in another way in this version"
    )
    static_tcp_rendezvous.TCPStore = store
    runpy.run_path(str(Path(__file__).with_name("accelerate_launch.py")), run_name="__main__")
