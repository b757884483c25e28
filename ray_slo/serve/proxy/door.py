"""The door: the admission control in Serve's proxy. It decides which requests go on to the
frontends, and when.

HTTP (`admission`) and gRPC (`grpc`) share the way to the frontends, so they share the door. Its
rules are those of `gate`. Frontends report their capacity with their answers (`CAPACITY_HEADER`).
So do replicas that called functions with `@ray_slo.batch` for an answer (`BATCH_HEADER`). The next
request that goes on tells frontends how many were refused here (`REFUSED_HEADER`), for their
metrics and for the planner.

A client chooses its path, class and model. So only places that a frontend has confirmed are kept
here (`Place`). All others share one line, which is bounded (`gate.Rank`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ray_slo.core.quantile import FEW_SAMPLES, quantile
from ray_slo.core.recent import Recent
from ray_slo.serve.deadlines import NO_PLACE
from ray_slo.serve.errors import Expired, RefusedEarly
from ray_slo.serve.frontend.http import too_large
from ray_slo.serve.proxy.gate import (
    NOTHING,
    OURS_S,
    PLACES_KEPT,
    STRANGER_S,
    ClientLeft,
    Gate,
    Known,
    NowKnown,
    Rank,
    Ticket,
    Verdict,
)
from ray_slo.serve.proxy.modes import has_door_before, mode
from ray_slo.serve.proxy.places import Place

_LATELY_S = 0.1  # seconds for the mean length of a turn
_WAIT_S = 5.0  # longest wait of a request with an unknown deadline
# If the way to a frontend and back takes longer than the larger of these (seconds, share of the
# SLO), the proxy is too busy.
_WAY_S, _WAY_OF_SLO = 0.05, 0.15
# A request costs a proxy in Python as much CPU time as a frontend. So it lets on fewer for the
# scheduler to choose from than HAProxy does.
_PACE = 1.0
# Requests on their way at a time: at first, least, most; increase per answer, and factor of a
# decrease.
_FIRST, _LEAST, _MOST, _MORE, _FEWER = 64.0, 16.0, 2000.0, 0.5, 0.8
_WAYS, _WAY_KEPT_S = 128, 10.0  # measurements of it that count, and for how many seconds
_ANSWERED_S = 1.0  # so long after an answer, the way takes as long as it took
_LEAST_OF_SLO = 0.25  # upper bound of `least_s`, in SLOs, because a slow place may become fast
_REPLICA_S = 10.0  # a replica counts for this long after an answer
_FORGET = 1.01  # factor of `least_s` per answer, so that it covers about the last 100 answers


class Facts(NamedTuple):
    """Information from the answers of a place.

    Attributes:
        known: capacity of its frontends, or of its batch functions.
        slo_s: SLO of its model, in seconds.
        max_body_bytes: largest body that the frontends accept, in bytes.
        max_json_bytes: largest JSON body that they accept, in bytes.
    """

    known: Known
    slo_s: float
    max_body_bytes: float = math.inf
    max_json_bytes: float = math.inf

    def check_size(self, num_bytes: int, is_json: bool) -> None:
        """Check that the frontends accept a body of this size.

        Raises:
            BodyTooLarge: they do not.
        """
        most, option = self.max_body_bytes, "max_body_bytes"
        if is_json and self.max_json_bytes < most:
            most, option = self.max_json_bytes, "max_json_bytes"
        if num_bytes > most:
            raise too_large("body", num_bytes, int(most), option=option)


class Door:
    """A gate on an event loop. If no other request waits, a request goes on at once.

    Args:
        per_turn: number of requests that go on per turn of the loop.

    Attributes:
        turn_s: mean length of the loop's turns in the last tenth of a second, in seconds.
    """

    def __init__(self, gate: Gate | None = None, per_turn: int = 1) -> None:
        self.gate = gate or Gate()
        self._clock = time.monotonic
        self._per_turn = per_turn
        self._left = per_turn  # number of requests that may still go on in this turn of the loop
        self._turns = False
        self._turns_since = 0.0
        self.turn_s = 0.0

    async def enter(
        self,
        deadline: float,
        known: Known = NOTHING,
        rank: Rank = Rank.KNOWN,
        place: Any = None,
        leaving: list[Callable[[], object]] | None = None,
    ) -> Ticket:
        """Wait until the request may go on; see `Gate.arrive`. Call `leave` when it is done.

        Args:
            deadline: `time.monotonic()` seconds.
            leaving: functions to call when the client leaves. A request that waits adds one, and
                gives up its place when it is called.

        Raises:
            RefusedEarly: it would be late.
            ClientLeft: the client left.
            NowKnown: `Gate.call_again` called it.
        """
        ticket = await self._entered(deadline, known, rank, place, leaving)
        if rank is Rank.STRANGE:
            asyncio.get_running_loop().call_later(STRANGER_S, self._discount, ticket)
        return ticket

    async def _entered(
        self,
        deadline: float,
        known: Known,
        rank: Rank,
        place: Any,
        leaving: list[Callable[[], object]] | None,
    ) -> Ticket:
        if self._left:
            ticket = self.gate.walk_in(self._clock(), deadline, known, rank, place)
            if ticket is not None:
                self._left -= 1
                self._turn_soon()
                return ticket
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[Verdict] = loop.create_future()

        def told(said: Verdict) -> None:
            if not verdict.done():
                verdict.set_result(said)

        ticket = self.gate.arrive(self._clock(), deadline, told, known, rank, place)
        if ticket is not None and self._left and self.gate.can_turn:
            self._left -= 1
            self.gate.turn(self._clock())
            self._turn_soon()
        if not verdict.done():
            assert ticket is not None
            if leaving is not None:
                leaving.append(verdict.cancel)
            try:
                await asyncio.wait([verdict], timeout=deadline - self._clock())
            except asyncio.CancelledError:
                self.gate.leave(ticket)
                raise
            if verdict.cancelled():
                self.gate.leave(ticket)
                raise ClientLeft
            if not verdict.done():
                self.gate.leave(ticket)
                told(self.gate.too_late())
        if (said := verdict.result()) is not None:
            raise said
        assert ticket is not None
        return ticket

    def check(self, deadline: float, known: Known = NOTHING) -> None:
        """Check whether a request that arrived now could go on.

        Raises:
            RefusedEarly: it could not.
        """
        if (refused := self.gate.hopeless(self._clock(), deadline, known)) is not None:
            raise refused

    def leave(self, ticket: Ticket, was_refused: bool | None = None) -> None:
        """Note that a request is done. Another one may go on in its place.

        Args:
            was_refused: whether a frontend refused it, if one answered.
        """
        self.gate.leave(ticket)
        if was_refused is False:
            self.gate.answered(ticket)
        elif was_refused and (left_s := self.gate.refused(ticket, self._clock())):
            asyncio.get_running_loop().call_later(left_s, self.gate.forget, ticket)
        if self.gate.waiting:
            self._turn_soon()

    def _discount(self, ticket: Ticket) -> None:
        self.gate.discount(ticket)
        if self.gate.waiting:
            self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._turns:
            self._turns = True
            self._turns_since = self._clock()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turns, self._left = False, self._per_turn
        now = self._clock()
        took_s = now - self._turns_since
        self.turn_s += min(took_s / _LATELY_S, 1.0) * (took_s - self.turn_s)
        while self._left and self.gate.can_turn:
            self._left -= 1
            self.gate.turn(now)
            self._turn_soon()  # after a turn without a request, the next request need not wait


class ProxyDoor:
    """Lets requests on one by one, the earliest deadline first. Those to places that no frontend
    has confirmed come last, are few at a time, and are refused first."""

    def __init__(self) -> None:
        self._door = Door(Gate(pace=_PACE))
        self._door.gate.window = _FIRST
        self._cut_at = 0.0
        self._places: Recent[Place, Facts] = Recent(PLACES_KEPT)  # confirmed ones
        # Those of functions with `@ray_slo.batch`. There may be one for each path with an id.
        self._batches: Recent[Place, Facts] = Recent(PLACES_KEPT)
        self._ours: Recent[str, float] = Recent(PLACES_KEPT)  # last answers, by route
        # Rates of the replicas with batch functions, and when each last answered, by place.
        self._rates: Recent[Place, dict[str, tuple[float, float]]] = Recent(PLACES_KEPT)
        # When the way to a frontend and back took how long, and the 95th percentile, by place.
        self._ways: Recent[Place, tuple[deque[tuple[float, float]], float]] = Recent(PLACES_KEPT)
        # Refusals since a request last went on to the place.
        self._refused: Counter[Place] = Counter()

    @property
    def gate(self) -> Gate:
        return self._door.gate

    def slo_s(self, place: Place) -> float | None:
        """Return the SLO of the place, in seconds. None if it is not known."""
        seen = self._facts(place)
        return None if seen is None else seen.slo_s

    def _facts(self, place: Place) -> Facts | None:
        return self._places.get(place) or self._batches.get(place)

    def check(self, place: Place, arrival: float, budget_s: float | None) -> None:
        """Check whether a request could be in time, before its body is read.

        Raises:
            RefusedEarly: it could not.
        """
        seen = self._facts(place)
        if seen is None or budget_s is None:
            return
        try:
            self._door.check(arrival + budget_s, seen.known)
        except RefusedEarly:
            self._refused[place] += 1
            raise

    async def enter(
        self,
        place: Place,
        arrival: float,
        budget_s: float | None,
        *,
        num_bytes: int = 0,
        is_json: bool = False,
        is_ours: bool = False,
        leaving: list[Callable[[], object]] | None = None,
    ) -> Ticket:
        """Wait to go on. Call `leave` when the request is answered.

        Args:
            arrival: `time.monotonic()` seconds.
            budget_s: time from its arrival to the deadline, in seconds. None: unknown.
            num_bytes: size of the body, if known.
            is_json: whether the body is declared as JSON.
            is_ours: whether the request is for an application of ray-slo, even if that has not
                answered yet. Then only a few requests go on until one is answered.
            leaving: functions to call when the client leaves; see `Door.enter`.

        Raises:
            RefusedEarly: the request would be late, or waited too long.
            ClientLeft: its client left.
            Expired: its deadline passed before anything was known of its place.
            BodyTooLarge: its body is too large.
        """
        while True:
            seen, began = self._facts(place), time.monotonic()
            if seen is not None:
                seen.check_size(num_bytes, is_json)
            if seen is not None and budget_s is None:
                budget_s = seen.slo_s
            deadline = began + _WAIT_S if budget_s is None else arrival + budget_s
            try:
                return await self._door.enter(
                    deadline,
                    NOTHING if seen is None else seen.known,
                    self._rank(place, is_ours),
                    place,
                    leaving,
                )
            except NowKnown:
                continue
            except RefusedEarly:
                if seen is not None:
                    self._refused[place] += 1
                elif budget_s is not None and time.monotonic() >= deadline:
                    raise Expired("its deadline passed while it waited for admission") from None
                raise

    def _rank(self, place: Place, is_ours: bool) -> Rank:
        if self._facts(place) is not None:
            return Rank.KNOWN
        is_strange = is_ours or place.route is None or self._is_ours(place.route)
        return Rank.STRANGE if is_strange else Rank.ELSEWHERE

    def is_batch(self, place: Place) -> bool:
        """Return whether functions with `@ray_slo.batch` answer there."""
        return place not in self._places and place in self._batches

    def _is_ours(self, route: str) -> bool:
        return time.monotonic() - self._ours.get(route, -math.inf) < OURS_S

    def leave(self, ticket: Ticket, was_refused: bool | None = None) -> None:
        self._door.leave(ticket, was_refused)

    def note_refused(self, place: Place) -> None:
        """Count a refusal of a request that did not come to the door."""
        self._refused[place] += 1

    def way_s(self, place: Place) -> float:
        """Return the time that the way to a frontend of the place and back takes, in seconds (95th
        percentile). The longer there was no answer, the less is left of it. Otherwise all requests
        could be refused for it, and a shorter time would never be measured."""
        if (way := self._ways.get(place)) is None:
            return 0.0
        seen, way_s = way
        return way_s * 0.5 ** max(time.monotonic() - seen[-1][0] - _ANSWERED_S, 0.0)

    def refused_before(self, place: Place) -> int:
        """Return the number of refusals since the last call."""
        return self._refused.pop(place, 0)

    def heard(self, place: Place, said: str, took_s: float | None, inside_s: float | None) -> None:
        """Learn from an answer of a frontend of ray-slo.

        Args:
            said: the capacity of its frontends, separated by semicolons: requests/s, SLO in ms,
                requests that they keep, largest body in bytes, largest JSON body in bytes. Or
                `NO_PLACE`: the frontend does not serve this place.
            took_s: time from the admission to the answer, in seconds. None for an error.
            inside_s: part of this time in the frontend and its workers, in seconds. None: unknown.
        """
        route = place.route
        is_news = bool(route) and not self._is_ours(route or "")
        if route:
            self._ours[route] = time.monotonic()
        if said != NO_PLACE:
            is_news |= self._learn(place, said, took_s, inside_s)
        if is_news:
            self.gate.call_again(lambda t: t.place == place or t.place.route == route)

    def heard_of_batch(self, place: Place, said: str) -> None:
        """Learn from an answer for which a replica called functions with `@ray_slo.batch`.

        Args:
            said: an id of the replica, the requests/s that it can answer, and the ms that one may
                take, separated by semicolons.
        """
        replica, *numbers = said.split(";")
        rate, slo_ms = map(float, numbers)
        now = time.monotonic()
        lately = {
            name: (its, at)
            for name, (its, at) in self._rates.get(place, {}).items()
            if now - at < _REPLICA_S
        }
        lately[replica] = rate, now
        self._rates[place] = lately
        # Of other paths of the deployment, nothing is known.
        known = Known(sum(its for its, _ in lately.values()), who=str(place))
        self._batches[place] = Facts(known, slo_ms / 1e3)

    def _learn(self, place: Place, said: str, took_s: float | None, inside_s: float | None) -> bool:
        """Keep the facts of a place. Return whether it was unknown."""
        rate, slo_ms, most, *sizes = map(float, said.split(";"))
        max_body_bytes, max_json_bytes = map(int, sizes)
        seen = self._places.get(place)
        least_s = 0.0 if seen is None else seen.known.least_s
        if took_s is not None:
            least_s = took_s if not least_s else min(_FORGET * least_s, took_s)
        least_s = min(least_s, _LEAST_OF_SLO * slo_ms / 1e3)
        answers = Known(rate, int(most), least_s, place.route)
        self._places[place] = Facts(answers, slo_ms / 1e3, max_body_bytes, max_json_bytes)
        if took_s is not None and inside_s is not None:
            self._adapt(slo_ms / 1e3, took_s, inside_s)
            self._took(place, max(took_s - inside_s, 0.0))
        return seen is None

    def _took(self, place: Place, way_s: float) -> None:
        now = time.monotonic()
        seen, _ = self._ways.get(place) or (deque(maxlen=_WAYS), 0.0)
        seen.append((now, way_s))
        while seen[0][0] < now - _WAY_KEPT_S:
            seen.popleft()
        missing = [0.0] * (FEW_SAMPLES - len(seen))
        self._ways[place] = seen, quantile([*missing, *(way for _, way in seen)], 0.95)

    def _adapt(self, slo_s: float, took_s: float, inside_s: float) -> None:
        """Allow fewer requests at a time if the way to the frontend and back is slow, otherwise
        more."""
        gate, now = self._door.gate, time.monotonic()
        if took_s - inside_s <= max(_WAY_S, _WAY_OF_SLO * slo_s):
            gate.window = min(gate.window + _MORE, _MOST)
        elif now - self._cut_at > took_s:  # requests from before the last decrease say nothing new
            gate.window, self._cut_at = max(_FEWER * gate.window, _LEAST), now


def mode_in_words() -> str:
    """Return the mode of this process, and what is missing before its frontends."""
    if has_door_before():
        return mode()
    return f"{mode()}, no admission control before the frontend (`ray-slo run` starts it)"


_shared: ProxyDoor | None = None


def shared() -> ProxyDoor:
    """Return the door of this process."""
    global _shared
    _shared = _shared or ProxyDoor()
    return _shared
