"""Requests of `live-chaos`: sends them, and counts what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.load import Clients
from benchmarks.live.modes import ORDINARY

SLO_S = 1.0
GRACE_S = 1.0  # a caller must have an answer or an error within this time after the deadline
RATE = 40.0
WINDOW_S, BACK = 1.0, 0.95
UNHEARD_S = 10.0  # a client hangs up this long after the deadline


@dataclass
class Asked:
    """One request; times are in seconds on the client's clock.

    Attributes:
        reason: "answered", or the reason of the typed error; empty if it got neither.
        said: the response, or the client's error.
    """

    at_s: float
    done_s: float = math.nan
    reason: str = ""
    said: str = ""
    echo: int | None = None
    release: int = 0
    slo_s: float = SLO_S

    @property
    def latency_s(self) -> float:
        return self.done_s - self.at_s

    @property
    def answered(self) -> bool:
        return self.reason == "answered"

    @property
    def lost(self) -> bool:
        """Whether it got neither an answer nor a typed error until the client hung up."""
        return not self.reason

    @property
    def bare(self) -> bool:
        """Whether it got an error of the server without a reason."""
        return self.lost and self.said.startswith("5")

    @property
    def overdue(self) -> bool:
        return not self.latency_s <= self.slo_s + GRACE_S

    @property
    def in_time(self) -> bool:
        return self.reason == "answered" and self.latency_s <= self.slo_s


class Load(Clients):
    """HTTP clients whose requests each have a unique number."""

    def __init__(
        self,
        url: str,
        seed: int,
        first: int,
        rate: float = RATE,
        kb: int = 0,
        path: str = "",
        slo_s: float = SLO_S,
    ) -> None:
        self.asked: dict[int, Asked] = {}
        self._numbers = iter(range(first, first + 10**9))
        self._kb = kb
        self._slo_s = slo_s
        self._extra: list[dict[str, Any]] = []
        super().__init__(f"{url}/{path}", rate, seed, heard_s=slo_s + UNHEARD_S)

    @property
    def in_flight(self) -> int:
        return sum(math.isnan(a.done_s) for a in list(self.asked.values()))

    def over(self) -> list[Asked]:
        """Return the requests whose SLO has ended by now."""
        now = time.monotonic()
        return [a for a in list(self.asked.values()) if a.at_s < now - self._slo_s]

    def also(self, **order: Any) -> None:
        """Send one more request, with orders in its item."""
        self._extra.append(order)

    def _due(self) -> Iterator[tuple[float, dict[str, Any]]]:
        for at in self._times:
            yield at, {"kb": self._kb} if self._kb else {}
            while self._extra:
                yield at, self._extra.pop()

    async def _one(self, session: Any, at: float, order: dict[str, Any]) -> None:
        import aiohttp

        number = next(self._numbers)
        one = self.asked[number] = Asked(time.monotonic(), slo_s=self._slo_s)
        headers = {"x-slo-latency-ms": f"{1e3 * self._slo_s:g}"}
        try:
            async with session.post(
                self._url, json={"id": number, **order}, headers=headers
            ) as response:
                text = await response.text()
                with contextlib.suppress(ValueError):
                    body = json.loads(text)
                    if response.status == 200:
                        one.echo, one.release = body["id"], body["release"]
                        one.reason = "answered"
                    else:
                        one.reason = body.get("reason", "")
                one.said = f"{response.status} {text[:300]}"
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
            one.said = f"{type(error).__name__}: {error}"
        one.done_s = time.monotonic()


@dataclass
class Seen:
    """What became of the requests before, during and after one fault."""

    fault: str
    struck_s: float
    in_flight: int
    sent: int = 0
    answered: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    overdue: int = 0
    duplicated: int = 0
    run_twice: int = 0
    late: int = 0
    bare: int = 0
    in_time: int = 0
    gap_s: float = math.nan
    recovery_s: float | None = math.nan
    releases: Counter[int] = field(default_factory=Counter)
    unheard: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, fault: str, struck_s: float, in_flight: int, asked: dict[int, Asked], runs: Path
    ) -> Seen:
        all_ = list(asked.values())
        ran = Counter(n for n in numbers_run(runs) if n in asked)
        echoes = Counter(a.echo for a in all_ if a.echo is not None)
        wrong = sum(a.echo is not None and a.echo != n for n, a in asked.items())
        return cls(
            fault,
            struck_s,
            in_flight,
            sent=len(all_),
            answered=sum(a.answered for a in all_),
            reasons=Counter(a.reason for a in all_ if a.reason not in ("", "answered")),
            lost=sum(a.lost for a in all_),
            overdue=sum(a.overdue for a in all_),
            duplicated=sum(count - 1 for count in echoes.values()) + wrong,
            run_twice=sum(count > 1 for count in ran.values()),
            late=sum(a.answered and not a.in_time for a in all_),
            bare=sum(a.bare for a in all_),
            in_time=sum(a.in_time for a in all_),
            gap_s=longest_gap(all_),
            recovery_s=recovery(all_, struck_s),
            releases=Counter(a.release for a in all_ if a.answered),
            unheard=[
                f"{a.at_s - struck_s:+.2f} s, {a.latency_s:.2f} s: {a.said}"
                for a in all_
                if a.lost or a.overdue
            ],
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Seen:
        counters = {name: Counter(data[name]) for name in ("reasons", "releases")}
        return cls(**{**data, **counters})

    @property
    def share(self) -> float:
        """Percent of all requests that were answered in time."""
        return 100.0 * self.in_time / max(self.sent, 1)

    @property
    def said(self) -> str:
        """One line for the log, which is printed when the fault is over."""
        recovery = "never" if self.recovery_s is None else f"{self.recovery_s:.1f} s"
        return (
            f"{self.in_flight} in flight, {self.sent} sent, {self.answered} answered, "
            f"{dict(self.reasons)} refused, {self.lost} lost ({self.bare} bare errors), "
            f"{self.overdue} overdue, {self.duplicated} duplicated, {self.run_twice} run twice, "
            f"{self.late} late, {self.share:.1f} % in time, longest gap {self.gap_s:.1f} s, "
            f"recovery {recovery}"
        )

    def rows(self, reasons: list[str]) -> list[Row]:
        figures = {
            "in flight": self.in_flight,
            "sent": self.sent,
            "answered": self.answered,
            "refused": sum(self.reasons.values()),
            "lost": self.lost,
            "bare errors": self.bare,
            "overdue": self.overdue,
            "duplicated": self.duplicated,
            "run twice": self.run_twice,
            "late": self.late,
        }
        return [
            *(Row(self.fault, metric, "", value) for metric, value in figures.items()),
            Row(self.fault, "in time", "%", self.share),
            Row(self.fault, "longest gap", "s", self.gap_s),
            Row(self.fault, "recovery", "s", self.recovery_s),
            *(Row(f"refused, by reason · {self.fault}", r, "", self.reasons[r]) for r in reasons),
        ]


def numbers_run(runs: Path) -> Iterator[int]:
    """Yield the number of every request that a worker completed, once per run."""
    for file in runs.iterdir():
        yield from (int(line) for line in file.read_text().splitlines())


def longest_gap(asked: Iterable[Asked]) -> float:
    """Return the longest time in which no request came that was answered in time, in seconds.

    It counts from one such request to the next, and from the first request and to the last.
    """
    by_arrival = sorted(asked, key=attrgetter("at_s"))
    times = [a.at_s for a in by_arrival[:1] + [a for a in by_arrival if a.in_time]]
    times += [a.at_s for a in by_arrival[-1:]]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def recovery(asked: list[Asked], struck_s: float) -> float | None:
    """Return the recovery time in seconds; None if the requests never recover."""
    before = [a.in_time for a in asked if a.at_s + a.slo_s < struck_s]
    wanted = BACK * sum(before) / max(len(before), 1)
    last = max(a.at_s for a in asked) - WINDOW_S
    fell = False
    for start in np.arange(struck_s, last, 0.1):
        window = [a.in_time for a in asked if start <= a.at_s < start + WINDOW_S]
        good = bool(window) and sum(window) >= wanted * len(window)
        if fell and good:
            return float(start - struck_s)
        fell |= not good
    return None if fell else 0.0


def rows(all_seen: list[Seen]) -> list[Row]:
    reasons = sorted({reason for seen in all_seen for reason in seen.reasons})
    return [row for seen in all_seen for row in seen.rows(reasons)]


def told(seen: Seen, asked: dict[int, Asked], mode: str, name: str, folder: str) -> None:
    """Name the mode in the figures, print them, and write all requests to the folder, if any."""
    if mode != ORDINARY:
        seen.fault = f"{seen.fault}, {mode}"
    print(f"{mode}, {name}: {seen.said}", file=sys.stderr, flush=True)
    for line in seen.unheard[:3]:
        print(f"  {line}", file=sys.stderr)
    if folder:
        write(Path(folder), name, seen, asked)


def write(out: Path, name: str, seen: Seen, asked: dict[int, Asked]) -> None:
    """Write `FAULT.csv`: every request, with times in seconds since the fault."""
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame({"number": number, **asdict(one)} for number, one in asked.items())
    frame["at_s"] -= seen.struck_s
    frame["done_s"] -= seen.struck_s
    frame.to_csv(out / f"{name}.csv", index=False)
