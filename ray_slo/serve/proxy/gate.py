"""The rules of admission: which requests go on, in what order, and which would be late.

On its way to the scheduler, a request costs milliseconds of CPU time. If thousands come at once and
all go on together, each waits for all the others, and none is in time. So one or a few go on per
turn of the event loop, the earliest deadline first. A request that cannot be in time is refused
before it costs more. There are two reasons: too many requests wait before it here, or more have
gone on than the workers can answer by its deadline. In a proxy, this happens before a frontend sees
the request.

A client chooses the path and the class of its request. So requests for which nothing is known
(`Rank`) go on only when no other can. Few of them may be on their way, and they give way first.

`Gate` makes the decisions, without an event loop or a clock. `door.Door` lets coroutines wait for
them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ray_slo.core.recent import Recent

if TYPE_CHECKING:  # HAProxy's rules import this module, and must not import Ray
    from ray_slo.serve.errors import RefusedEarly

FEW = 16  # this many requests of an application may always be on their way
REFUSED_S = 1.0
"""An application may refuse as many requests as it answers, and `FEW` more. Those beyond count as
on their way until their deadline, and for this many seconds at most. Otherwise, the sooner the
scheduler refuses requests, the more go on to it, and they take the CPU time of the workers."""
MOST = 2
"""At most so many times the requests that can be answered by the deadline are on their way."""
PACE_S = 0.1
"""The pace of requests is counted over so many seconds."""
PLACES_KEPT = 1024  # largest number of places that a proxy knows
OURS_S = 60.0  # an application of ray-slo is known to a proxy for this long after an answer
_MOST_WAITING = 2000  # largest number of waiting requests
_STRANGERS = 16  # largest number of strangers on their way that count
STRANGER_S = 1.0  # seconds for which a stranger on its way counts, because nobody may answer it
_HOPELESS = 8  # largest number of refusals per turn, so that other requests need not wait for them
_AGAIN_S = 1.0  # seconds until a refused client may try again, if nothing is known
_NEWEST = 0.1  # weight of the newest interval between two requests that went on


class ClientLeft(Exception):
    """The client left while its request waited."""


class Known(NamedTuple):
    """Known capacity of the frontends and workers that will answer a request.

    Attributes:
        rate: requests per second that the workers can answer. None: unknown.
        most: number of requests that the frontends keep. None: unknown.
        least_s: least time that a request needs from here to its answer, in seconds.
        who: their application. Requests for others do not take its capacity.
    """

    rate: float | None = None
    most: int | None = None
    least_s: float = 0.0
    who: str | None = None


NOTHING = Known()


class Rank(IntEnum):
    """Order of requests at a gate, before their deadlines.

    Attributes:
        KNOWN: the one who answers is known.
        ELSEWHERE: perhaps for an application that is not of ray-slo.
        STRANGE: for an application of ray-slo, which has not answered such a request.
    """

    KNOWN = 0
    ELSEWHERE = 1
    STRANGE = 2


class NowKnown(Exception):
    """More is known of a request that waits than when it came. It has to come again."""


Verdict: TypeAlias = "RefusedEarly | NowKnown | None"
"""None if a request goes on."""
Key = tuple[Rank, float, int]
_rank_of = itemgetter(0)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request at the gate.

    Attributes:
        number: number of the request, in order of arrival.
        deadline: deadline in seconds of the host's clock.
        known: capacity for the request. If the rate is known, the gate's window applies to it.
        told: called once: with None when the request goes on, or with the reason why it does not.
        rank: requests of another rank come before or after it.
        place: address that the request names.
        inside: whether the request went on.
    """

    number: int
    deadline: float
    known: Known
    told: Callable[[Verdict], None]
    rank: Rank = Rank.KNOWN
    place: Any = None
    inside: bool = False

    @property
    def key(self) -> Key:
        return self.rank, self.deadline, self.number


class Gate:
    """Lets requests on one by one, by rank, and then the earliest deadline first.

    Beyond those that the workers can answer by the deadline, requests go on at a pace, because the
    scheduler chooses among them. For a batch it wants requests that came lately. If they went on as
    soon as there is room, most would come right after the last batch has begun, and be too old for
    the next one. What the scheduler refuses has cost a frontend and a proxy CPU time.

    Args:
        most: number of requests that may wait. If there are more, the last one is refused.
        pace: the pace, as a multiple of the rate of the workers; at least 10 requests per second.

    Attributes:
        window: a request whose `rate` is known goes on while fewer than this with earlier deadlines
            are on their way.
    """

    def __init__(self, most: int = _MOST_WAITING, pace: float = math.inf) -> None:
        self._most, self._pace = most, pace
        self.window = math.inf
        self._numbers = itertools.count()
        self._waiting: dict[Key, Ticket] = {}
        self._order: list[Key] = []  # sorted keys of the waiting requests
        self._inside: list[Key] = []  # sorted keys of requests that are on their way
        # Sorted keys by application: of requests that wait or are on their way, and of refused ones
        # that still count.
        self._of: dict[str | None, list[Key]] = {}
        # Times and deadlines of requests that came lately, by application.
        self._came: Recent[str | None, deque[tuple[float, float]]] = Recent(PLACES_KEPT)
        # How many more requests were refused than answered lately, by application.
        self._excess: Counter[str | None] = Counter()
        self._strangers: set[Ticket] = set()  # those on their way that count
        self._interval_s = 0.0  # mean time between two requests that go on while others wait
        self._last_at: float | None = None  # time when the last one went on, if others waited

    @property
    def waiting(self) -> int:
        return len(self._order)

    @property
    def inside(self) -> int:
        return len(self._inside)

    def arrive(
        self,
        now: float,
        deadline: float,
        told: Callable[[Verdict], None],
        known: Known = NOTHING,
        rank: Rank = Rank.KNOWN,
        place: Any = None,
    ) -> Ticket | None:
        """Take a request that arrived. Return its ticket, or None if it is refused at once."""
        ticket = Ticket(next(self._numbers), deadline, known, told, rank, place)
        before = bisect_right(self._order, ticket.key)
        refused = self._refused(now, ticket.key, before, known)
        if refused is not None:
            told(refused)
            return None
        self._waiting[ticket.key] = ticket
        insort(self._order, ticket.key)
        self._note(now, ticket)
        if len(self._order) > self._most:
            last = self._take(-1)
            self.forget(last)
            said = f"{self._most} requests wait for admission, and all go before it"
            last.told(_refusal("queue_full", said, self._most * self._interval_s))
            if last is ticket:
                return None
        return ticket

    def hopeless(self, now: float, deadline: float, known: Known = NOTHING) -> RefusedEarly | None:
        """Return the error with which a request would be refused if it arrived now, or None. See
        `arrive`."""
        key = Rank.KNOWN, deadline, next(self._numbers)
        return self._refused(now, key, bisect_right(self._order, key), known)

    def _refused(self, now: float, key: Key, before: int, known: Known) -> RefusedEarly | None:
        left_s, (rate, most, least_s, who) = key[1] - now, known
        wait_s = before * self._interval_s
        if before and wait_s + least_s > left_s:
            said = (
                f"{before} requests wait for admission before it, which takes {wait_s:.2g} s; of "
                f"its time, {max(left_s, 0.0):.2g} s are left"
            )
            return _refusal("would_miss", said, wait_s)
        ahead = bisect_right(self._of.get(who, ()), key)
        too_many_for_them = rate is not None and self._is_crowded(now, key[1], ahead, rate, who)
        if not too_many_for_them and (most is None or ahead < most):
            return None
        again_s = ahead / rate if rate else _AGAIN_S
        said = f"{ahead} requests with earlier deadlines are on their way"
        if rate is not None and too_many_for_them:
            can = max(rate * left_s, 0.0)
            said += f"; by its deadline about {can:.0f} can be answered"
            return _refusal("queue_full", said, again_s)
        return _refusal("queue_full", f"{said}, which is all that the frontends take now", again_s)

    def _is_crowded(
        self, now: float, deadline: float, ahead: int, rate: float, who: str | None
    ) -> bool:
        """Whether a request is one too many."""
        free = max(FEW, rate * (deadline - now))
        if ahead < free:
            return False
        lately = sum(at > now - PACE_S and its <= deadline for at, its in self._came.get(who, ()))
        return ahead >= MOST * free or lately + 1 > max(self._pace * PACE_S * rate, 1.0)

    def _note(self, now: float, ticket: Ticket) -> None:
        """Note that a request goes on, or waits for it."""
        self._count(ticket)
        came = self._came.get(ticket.known.who) or deque()
        self._came[ticket.known.who] = came
        came.append((now, ticket.deadline))
        while came[0][0] < now - PACE_S:
            came.popleft()

    def walk_in(
        self,
        now: float,
        deadline: float,
        known: Known = NOTHING,
        rank: Rank = Rank.KNOWN,
        place: Any = None,
    ) -> Ticket | None:
        """Let a request go on at once if no other request waits, as `arrive` and `turn` would.
        Return its ticket, or None if it has to wait.

        Raises:
            RefusedEarly: it would be late.
        """
        if self._order:
            return None
        ticket = Ticket(next(self._numbers), deadline, known, _unheard, rank, place)
        if (refused := self._refused(now, ticket.key, 0, known)) is not None:
            raise refused
        if not self._may_go_on(ticket):
            return None
        if deadline - now < known.least_s and self._inside:
            raise self.too_late()
        self._note(now, ticket)
        self._let_on(now, ticket)
        return ticket

    @property
    def can_turn(self) -> bool:
        """Whether a waiting request may go on."""
        return self._next() is not None

    def _next(self) -> int | None:
        """Return the place in the order of the request that goes on next, if one may."""
        index = 0
        while index < len(self._order):  # once per rank
            first = self._waiting[self._order[index]]
            if self._may_go_on(first):
                return index
            index = bisect_left(self._order, first.rank + 1, index, key=_rank_of)
        return None

    def _may_go_on(self, ticket: Ticket) -> bool:
        if ticket.rank is Rank.STRANGE:
            return len(self._strangers) < _STRANGERS
        return ticket.known.rate is None or bisect_right(self._inside, ticket.key) < self.window

    def turn(self, now: float) -> bool:
        """Let one request go on, if one may and can be in time. Return whether another one could go
        on now."""
        for _ in range(_HOPELESS):
            index = self._next()
            if index is None:
                self._last_at = None
                return False
            ticket = self._take(index)
            left_s = ticket.deadline - now
            if left_s >= ticket.known.least_s or not self._inside:
                self._let_on(now, ticket)
                break
            self.forget(ticket)
            ticket.told(self.too_late())
        return self.can_turn

    def too_late(self) -> RefusedEarly:
        """Return the error for a request whose time passed while it waited here."""
        said = "it waited for admission until its deadline was out of reach"
        return _refusal("would_miss", said, max(len(self._order) * self._interval_s, _AGAIN_S))

    def _let_on(self, now: float, ticket: Ticket) -> None:
        ticket.inside = True
        insort(self._inside, ticket.key)
        if ticket.rank is Rank.STRANGE:
            self._strangers.add(ticket)
        if self._last_at is not None:
            self._interval_s += _NEWEST * (now - self._last_at - self._interval_s)
        # Strangers also wait while others could go on, so that says nothing about the pace.
        do_others_wait = bool(self._order) and self._order[0][0] < Rank.STRANGE
        self._last_at = now if do_others_wait else None
        ticket.told(None)

    def leave(self, ticket: Ticket) -> None:
        """Note that a request is done, or that its client has left."""
        if _discard(self._inside if ticket.inside else self._order, ticket.key):
            self.forget(ticket)
        self._waiting.pop(ticket.key, None)
        self._strangers.discard(ticket)

    def answered(self, ticket: Ticket) -> None:
        """Note that a frontend answered a request, after `leave`."""
        self._excess -= Counter([ticket.known.who])  # counts of 0 are deleted

    def refused(self, ticket: Ticket, now: float) -> float:
        """Note that a frontend refused a request, after `leave`. Return for how many seconds it
        still counts: until `forget` is called, or not at all if this is 0."""
        if ticket.known.rate is None:
            return 0.0
        who, left_s = ticket.known.who, min(ticket.deadline - now, REFUSED_S)
        self._excess[who] = min(self._excess[who] + 1, FEW + 1)
        if self._excess[who] <= FEW or left_s <= 0:
            return 0.0
        self._count(ticket)
        return left_s

    def _count(self, ticket: Ticket) -> None:
        insort(self._of.setdefault(ticket.known.who, []), ticket.key)

    def forget(self, ticket: Ticket) -> None:
        """Note that a request no longer counts."""
        keys = self._of.get(ticket.known.who, [])
        _discard(keys, ticket.key)
        if not keys:
            self._of.pop(ticket.known.who, None)

    def discount(self, ticket: Ticket) -> None:
        """Note that a stranger on its way no longer counts. Another one may go on."""
        self._strangers.discard(ticket)

    def call_again(self, is_known: Callable[[Ticket], bool]) -> None:
        """Let waiting requests come again, because more is known of them now."""
        begin = bisect_right(self._order, Rank.KNOWN, key=_rank_of)
        called = [t for key in self._order[begin:] if is_known(t := self._waiting[key])]
        for ticket in called:
            self.leave(ticket)
            ticket.told(NowKnown())

    def _take(self, index: int) -> Ticket:
        return self._waiting.pop(self._order.pop(index))


def _discard(keys: list[Key], key: Key) -> bool:
    """Remove a key from a sorted list. Return whether it was there."""
    index = bisect_right(keys, key) - 1
    if index < 0 or keys[index] != key:
        return False
    del keys[index]
    return True


def _unheard(said: Verdict) -> None:
    """Do nothing: the caller of `walk_in` gets the result directly."""


def _refusal(reason: str, said: str, retry_after_s: float) -> RefusedEarly:
    from ray_slo.serve.errors import RefusedEarly

    return RefusedEarly(said, reason=reason, retry_after_s=retry_after_s)
