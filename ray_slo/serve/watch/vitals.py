"""What a process of ours holds, so that a soak can see whether it grows."""

from __future__ import annotations

import asyncio
import os
import sys


def vitals(**tables: int) -> dict[str, int]:
    """Process id, asyncio tasks of the running loop, and memory blocks that Python has allocated.

    Args:
        tables: lengths of the caller's own tables; all of them are 0 when nothing is to be done.
    """
    return {
        "pid": os.getpid(),
        "tasks": len(asyncio.all_tasks()),
        "blocks": sys.getallocatedblocks(),
        **tables,
    }
