"""Bounds the lines of a log that others can cause, such as clients, or other users of a machine."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ray_slo.core.recent import Recent

EVERY_S = 60.0
_KINDS = 100  # that are remembered


class Seldom(logging.Filter):
    """Passes a few lines of each kind per minute: `logger.addFilter(Seldom())`.

    Lines with the same text before its arguments are inserted, and the same type of exception, are
    of one kind. The next line that passes says how many did not.

    Args:
        most: number of lines of a kind that pass in `EVERY_S` seconds.
    """

    def __init__(self, most: int = 1) -> None:
        super().__init__()
        self._most = most
        self._lock = threading.Lock()
        # By kind: time of the first line in this minute, lines that passed, lines that did not.
        self._seen: Recent[Any, tuple[float, int, int]] = Recent(_KINDS)

    def filter(self, record: logging.LogRecord) -> bool:
        raised = record.exc_info[0] if record.exc_info else None
        kind = record.name, str(record.msg), raised
        with self._lock:
            began, passed, held = self._seen.get(kind, (record.created, 0, 0))
            if not 0 <= record.created - began < EVERY_S:
                began, passed = record.created, 0
            if passed >= self._most:
                self._seen[kind] = began, passed, held + 1
                return False
            self._seen[kind] = began, passed + 1, 0
        if held:
            text = f"{record.getMessage()} ({held} more lines of this kind were left out)"
            record.msg, record.args = text, ()
        return True

    def forget(self) -> None:
        """Pass the next lines as if there had been none."""
        self._seen.clear()
