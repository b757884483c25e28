"""The door: the admission control in Serve's proxy. It decides which requests go on to the
frontends, and when.

HTTP (`admission`) and gRPC (`grpc`) share the way to the frontends, so they share the door. Its
rules are those of `gate`. Frontends report their capacity with their answers (`CAPACITY_HEADER`).
The next request that goes on tells them how many were refused here (`REFUSED_HEADER`), for their
metrics and for the planner.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.errors import RefusedEarly
from ray_slo.serve.frontend.http import too_large
from ray_slo.serve.proxy.gate import NOTHING, Door, Gate, Known, Ticket
from ray_slo.serve.proxy.modes import HAPROXY_ENV, has_haproxy_of_ours

_ORDERED_BY_S = 1.0  # a request with an unknown deadline is ordered as if it had this time left
_PLACES_KEPT = 1024  # largest number of known places
# If the way to a frontend and back takes longer than the larger of these (seconds, share of the
# SLO), the proxy is too busy.
_WAY_S, _WAY_OF_SLO = 0.05, 0.15
# Requests on their way at a time: at first, least, most; increase per answer, and factor of a
# decrease.
_FIRST, _LEAST, _MOST, _MORE, _FEWER = 64.0, 16.0, 2000.0, 0.5, 0.8
_PIONEERS = 16  # largest number of requests on their way to an unknown place
_LEAST_OF_SLO = 0.25  # upper bound of `least_s`, in SLOs, because a slow place may become fast
_FORGET = 1.01  # factor of `least_s` per answer, so that it covers about the last 100 answers


class Place(NamedTuple):
    """Information from the answers of a place.

    Attributes:
        known: capacity of its frontends.
        slo_s: SLO of its model, in seconds.
        max_body_bytes: largest body that the frontends accept, in bytes.
        max_json_bytes: largest JSON body that they accept, in bytes.
    """

    known: Known
    slo_s: float
    max_body_bytes: int
    max_json_bytes: int

    def check_size(self, num_bytes: int, is_json: bool) -> None:
        """Check that the frontends accept a body of this size.

        Raises:
            BodyTooLarge: they do not.
        """
        most, option = self.max_body_bytes, "max_body_bytes"
        if is_json and self.max_json_bytes < most:
            most, option = self.max_json_bytes, "max_json_bytes"
        if num_bytes > most:
            raise too_large("body", num_bytes, most, option=option)


class ProxyDoor:
    """Lets requests on one by one, the earliest deadline first. A place is an address of an
    application, such as a path."""

    def __init__(self) -> None:
        self._door = Door()
        self._door.gate.window = _FIRST
        self._cut_at = 0.0
        self._places: dict[Hashable, Place] = {}  # places of applications of ray-slo
        self._pioneers: dict[Ticket, Hashable] = {}
        self._first: Counter[Hashable] = Counter()  # requests on their way to unknown places
        self._news = asyncio.Event()  # set when such a place becomes known
        self._refused: Counter[Hashable] = (
            Counter()
        )  # refusals since a request last went on to the place

    @property
    def gate(self) -> Gate:
        return self._door.gate

    def slo_s(self, place: Hashable) -> float | None:
        """Return the SLO of the place's model, in seconds. None if no application of ray-slo is
        known there."""
        seen = self._places.get(place)
        return None if seen is None else seen.slo_s

    def check(self, place: Hashable, arrival: float, budget_s: float | None) -> None:
        """Check whether a request could be in time, before its body is read.

        Raises:
            RefusedEarly: it could not.
        """
        seen = self._places.get(place)
        if seen is None or budget_s is None:
            return
        try:
            self._door.check(arrival + budget_s, seen.known)
        except RefusedEarly:
            self._refused[place] += 1
            raise

    async def enter(
        self,
        place: Hashable,
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
            RefusedEarly: the request would be late.
            ClientLeft: its client left.
            BodyTooLarge: its body is too large.
        """
        deadline = arrival + (_ORDERED_BY_S if budget_s is None else budget_s)
        is_pioneer = is_ours and await self._is_pioneer(place, deadline)
        seen = self._places.get(place)
        if seen is not None:
            seen.check_size(num_bytes, is_json)
        if seen is not None and budget_s is None:
            budget_s = seen.slo_s
        try:
            ticket = await self._door.enter(
                arrival + (_ORDERED_BY_S if budget_s is None else budget_s),
                NOTHING if seen is None else seen.known,
                may_refuse=seen is not None,
                leaving=leaving,
            )
        except BaseException as error:
            if isinstance(
                error, RefusedEarly
            ):  # not for clients that left: a client chooses its path
                self._refused[place] += 1
            if is_pioneer:
                self._returned(place)
            raise
        if is_pioneer:
            self._pioneers[ticket] = place
        return ticket

    async def _is_pioneer(self, place: Hashable, deadline: float) -> bool:
        """Return whether this request is one of the few that go to an unknown place. While others
        are on their way there, it waits until its deadline (`time.monotonic()` seconds)."""
        while place not in self._places and self._first[place] >= _PIONEERS:
            try:
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                break
        if place in self._places:
            return False
        self._first[place] += 1
        return True

    def leave(self, ticket: Ticket) -> None:
        self._door.leave(ticket)
        if (place := self._pioneers.pop(ticket, None)) is not None:
            self._returned(place)

    def _returned(self, place: Hashable) -> None:
        self._first[place] -= 1
        if not self._first[place]:
            del self._first[place]
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def note_refused(self, place: Hashable) -> None:
        """Count a refusal of a request that did not come to the door."""
        self._refused[place] += 1

    def refused_before(self, place: Hashable) -> int:
        """Return the number of refusals since the last call."""
        return self._refused.pop(place, 0)

    def heard(
        self, place: Hashable, said: str, took_s: float | None, inside_s: float | None
    ) -> None:
        """Learn from an answer of a frontend of ray-slo.

        Args:
            said: the capacity of its frontends, separated by semicolons: requests/s, SLO in ms,
                requests that they keep, largest body in bytes, largest JSON body in bytes.
            took_s: time from the admission to the answer, in seconds. None for an error.
            inside_s: part of this time in the frontend and its workers, in seconds. None: unknown.
        """
        rate, slo_ms, most, *sizes = map(float, said.split(";"))
        max_body_bytes, max_json_bytes = map(int, sizes)
        seen = self._places.pop(place, None)
        if seen is None:
            self._tell()
        least_s = 0.0 if seen is None else seen.known.least_s
        if took_s is not None:
            least_s = took_s if not least_s else min(_FORGET * least_s, took_s)
        least_s = min(least_s, _LEAST_OF_SLO * slo_ms / 1e3)
        answers = Known(rate, int(most), least_s)
        self._places[place] = Place(answers, slo_ms / 1e3, max_body_bytes, max_json_bytes)
        if len(self._places) > _PLACES_KEPT:
            gone = next(iter(self._places))
            del self._places[gone]
            self._refused.pop(gone, None)
        if took_s is not None and inside_s is not None:
            self._adapt(slo_ms / 1e3, took_s, inside_s)

    def _adapt(self, slo_s: float, took_s: float, inside_s: float) -> None:
        """Allow fewer requests at a time if the way to the frontend and back is slow, otherwise
        more."""
        gate, now = self._door.gate, time.monotonic()
        if took_s - inside_s <= max(_WAY_S, _WAY_OF_SLO * slo_s):
            gate.window = min(gate.window + _MORE, _MOST)
        elif now - self._cut_at > took_s:  # requests from before the last decrease say nothing new
            gate.window, self._cut_at = max(_FEWER * gate.window, _LEAST), now


def has_door_before() -> bool:
    """Return whether requests pass a door before they reach the frontends of this machine. Without
    a door, a client may have written the headers that a door writes."""
    if os.environ.get(HAPROXY_ENV) == "1":
        return has_haproxy_of_ours()
    return os.environ.get(PROXY_CALLBACK_ENV) == PROXY_CALLBACK


_shared: ProxyDoor | None = None


def shared() -> ProxyDoor:
    """Return the door of this process."""
    global _shared
    _shared = _shared or ProxyDoor()
    return _shared
