"""Events of a scheduler for its metrics."""

from __future__ import annotations


class Watch:
    """Gets a scheduler's events; this one ignores them."""

    def unclaimed(self) -> None:
        """The watchdog freed a worker from a batch that no process had any more."""

    def rehearsed(self, held: bool, took_s: float) -> None:
        """A rehearsal succeeded or failed after `took_s` seconds."""

    def setting(self, before: str, now: str) -> None:
        """The setting of `auto` changed; `before` is empty for the first one."""
