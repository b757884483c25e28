"""Processes of this machine, as Linux shows them."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer
_STILL = "TtXZ"  # states of a process that is stopped, traced or dead


def peer_of(line: Any) -> tuple[int, int]:
    """Return the ID of the process at the other end of a socket, and the ID of its user.

    Args:
        line: a Unix socket. The process is 0 if it is in another container.
    """
    said = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(said)
    return process, user


def is_running(process: int) -> bool:
    """Return whether a process of this machine is there, and is not stopped."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] not in _STILL
