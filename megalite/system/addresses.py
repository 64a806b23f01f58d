"""The address under which other hosts of a job reach this one."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def own_address() -> str:
    """Return the address that this host uses to reach the rendezvous store."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(link.getsockname()[0])
    return "127.0.0.1"
