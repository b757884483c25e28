"""Decides which of two actors schedules. Workers enforce it.

An application without an embedded scheduler has two scheduler actors, on different nodes where
there are several. One leads; the other is a hot spare (Symphony, section 4). A frontend that hears
nothing from the leader asks the other one to lead. Who leads has a *term*, which grows with every
change. The two actors never choose the same term.

A scheduler uses only workers that have told it that they obey it (`Heartbeat.leader`). A worker
obeys one scheduler at a time, the one with the highest term. It changes when its batches of the
earlier scheduler are over, and refuses later pieces of that scheduler's batches. So two schedulers
never book a worker at the same time, and one that returns after a pause is not obeyed.

Frontends that are cut off with one of the two actors choose it, with a higher term. When they come
back, the actor that serves the others takes a higher term still (`SchedulerActor._serves`).
"""

from __future__ import annotations

CANDIDATES = 2


def candidate_name(app_key: str, number: int) -> str:
    """Return the name of one of the two scheduler actors. No group can have the spare's name."""
    return app_key if number == 0 else f"{app_key}#~spare"


class Lease:
    """An actor's knowledge of terms.

    Args:
        number: number of the actor, 0 or 1.

    Attributes:
        term: term with which it leads. 0 if it does not lead.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._highest = 0
        self.term = 0

    def take(self, highest: int) -> bool:
        """Lead. Return whether the actor did not lead before, or has to lead with a new term.

        Args:
            highest: the highest term that the client knows.
        """
        self.heard(highest)
        return not self.term and self.renew()

    def renew(self) -> bool:
        """Lead with a new term, because the scheduler is new."""
        step = (self._number - self._highest) % CANDIDATES or CANDIDATES
        self.term = self._highest = self._highest + step
        return True

    def heard(self, term: int) -> bool:
        """Note a term that a client or worker knows. Return whether the actor led until now."""
        self._highest = max(self._highest, term)
        if not 0 < self.term < term:
            return False
        self.term = 0
        return True
