"""`accelerate launch` for the ranks of one machine, with their meeting place on its loopback.

torch's store listens on every interface, whatever address it is given, and lets in who reaches it
(torch 2.13). Here it is handed a socket that is bound already."""

from __future__ import annotations

import socket
import sys
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

LOOPBACK = "127.0.0.1"


def store(
    host: str, port: int, world_size: int | None, is_master: bool, *args: Any, **options: Any
) -> TCPStore:
    """The store that static rendezvous asks for; as the server, on the loopback alone."""
    if is_master:
        listener = socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN)
        options["master_listen_fd"] = listener.detach()
    return TCPStore(LOOPBACK, port, world_size, is_master, *args, **options)


if __name__ == "__main__":
    from accelerate.commands import launch

    assert static_tcp_rendezvous.TCPStore is TCPStore, (
        "torch's static rendezvous makes its store in another way now"
    )
    static_tcp_rendezvous.TCPStore = store
    sys.argv[0] = "accelerate-launch"
    launch.main()
