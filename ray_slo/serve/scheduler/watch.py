"""What a scheduler tells whoever keeps metrics of it."""

from __future__ import annotations


class Watch:
    """Told of what a scheduler does; this one keeps nothing."""

    def unclaimed(self) -> None:
        """The watchdog freed a worker of a batch that nobody had any more."""

    def rehearsed(self, held: bool, took_s: float) -> None:
        """A rehearsal was held, or failed, after `took_s` seconds."""

    def setting(self, before: str, now: str) -> None:
        """Another setting of `auto` is in force; `before` is empty for the first."""
