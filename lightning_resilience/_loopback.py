"""A store that only this machine reaches.

The server of a ``TCPStore`` listens on all interfaces, whatever host it is given, and asks nobody who they are.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

ADDRESS = "127.0.0.1"


def listen() -> socket.socket:
    """A socket for the server of a store that is made later: who connects meanwhile waits."""
    return socket.create_server((ADDRESS, 0))


def serve_store(timeout_s: float, server: socket.socket | None = None) -> Any:
    """A ``TCPStore`` with its server, for as long as what is returned lives.

    One that this process makes afterwards with the same port shares the server, if both are ``multi_tenant``.

    Args:
        timeout_s: How long its operations may take.
        server: See :func:`listen`; default: a new one.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = server or listen()
    return TCPStore(
        ADDRESS,
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,
        master_listen_fd=server.detach(),  # from here on the store's
    )
