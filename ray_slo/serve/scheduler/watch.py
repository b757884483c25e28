"""Events of a scheduler for its metrics."""

from __future__ import annotations


class Watch:
    """Gets a scheduler's events. This class ignores them; subclasses count them."""

    def unclaimed(self) -> None:
        """Note that the watchdog freed a worker from a batch that no process had any more."""

    def rehearsed(self, held: bool, took_s: float) -> None:
        """Note that a rehearsal succeeded or failed after `took_s` seconds."""

    def setting(self, before: str, now: str) -> None:
        """Note that the setting of `auto` changed. `before` is empty for the first setting."""
