"""Serves a ``TCPStore`` that only this machine can reach.

By default the server of a ``TCPStore`` listens on all interfaces, whatever host it is given, without authentication.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

ADDRESS = "127.0.0.1"


def listen() -> socket.socket:
    """A socket for the server of a store that is created later: clients that connect before that wait."""
    return socket.create_server((ADDRESS, 0))


def serve_store(timeout_s: float, server: socket.socket | None = None) -> Any:
    """Creates a ``TCPStore`` with its server, which runs while the returned store exists.

    Another ``TCPStore`` that this process creates later with the same port shares the server, if both are
    ``multi_tenant``.

    Args:
        timeout_s: How many seconds its operations may take.
        server: The socket, see :func:`listen`; default: a new one.
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
        master_listen_fd=server.detach(),  # from here on the store owns the socket
    )
