"""A run of one policy as text that a person can check line by line.

    0.000 > a b arrive, due 0.100
    0.000 dispatch a on w0, ends 0.020
    0.031 drop b: would_miss

Times are seconds. A line with ">" is an event, which is given to the policy at its time. All other
lines are what the policy decided. What follows a "#" is for the reader. A batch ends when it was
predicted to end, before events at the same time.

Events are:

    a b arrive[ for MODEL][, size N][, made by VARIANT on WORKER in SECONDS], due TIME
    a is cancelled
    WORKER leaves           the requests of its batch arrive again
    WORKER joins            it is in the cluster of the test, and was not there before
    WORKER fails            its batch ends now, and its requests do not arrive again
    SETTING is best in a rehearsal      all of its requests are in time, and half of the others'
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ray_slo.core import (
    Assigned,
    BatchStatus,
    Cluster,
    Dispatch,
    DispatchDelay,
    Drop,
    LatencyProfile,
    Model,
    Request,
    Upstream,
    Variant,
    Worker,
)
from ray_slo.core.rehearsal import Rehearsed, Score
from ray_slo.policies import make_policy
from tests.goldens.texts import compare, lines_of
from tests.policies.harness import Host

ARRIVE = re.compile(
    r"(?P<names>[\w ]+) arrives?(?: for (?P<model>\w+))?(?:, size (?P<size>\d+))?"
    r"(?:, made by (?P<variant>\w+) on (?P<worker>\w+) in (?P<spent>[\d.]+))?, due (?P<due>[\d.]+)"
)
BEST = re.compile(r"(?P<setting>.+) is best in a rehearsal")
ONE = re.compile(r"(?P<name>\w+) (?P<what>is cancelled|leaves|joins|fails)")


def cluster(
    variants: Mapping[str, Mapping[str, tuple[float, float]]],
    workers: Mapping[str, str] | int,
    *,
    max_batch: int = 16,
    slo_s: float = 0.1,
    accuracy: Mapping[str, float] | None = None,
    delay_s: float = 0.0,
    assigned: Mapping[str, tuple[Any, ...]] | None = None,
) -> Cluster:
    """Models whose batches of b take alpha·b + beta seconds, on workers that load every variant.

    Args:
        variants: (alpha, beta) of each variant, by model and variant; on "slow" hardware, twice as
            long.
        workers: hardware by worker ("fast" or "slow"); or a number of fast ones, w0, w1, …
        assigned: what a planner assigns to a worker: variant, largest batch, requests per second.
    """
    if isinstance(workers, int):
        workers = {f"w{i}": "fast" for i in range(workers)}
    models = []
    for model, of in variants.items():
        made = []
        for name, (alpha_s, beta_s) in of.items():
            line = LatencyProfile.linear(alpha_s, beta_s, max_batch)
            made.append(
                Variant(name, {"fast": line, "slow": line.scaled(2)}, (accuracy or {}).get(name))
            )
        models.append(Model(model, slo_s, tuple(made)))
    loaded = frozenset(name for of in variants.values() for name in of)
    there = [
        Worker(name, hardware, loaded, (Assigned(*assigned[name]),) if assigned else ())
        for name, hardware in workers.items()
    ]
    return Cluster.of(models, there, DispatchDelay(delay_s))


class _Telling(Host):
    """A host that writes down what the policy decides. It also checks the contract of policies."""

    def __init__(self, policy: str, kwargs: Mapping[str, Any], all_there: Cluster) -> None:
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.by_name: dict[str, Request] = {}
        self.all_there = all_there
        self.says_variant = len(all_there.variants) > 1
        super().__init__(lambda: make_policy(policy, kwargs), all_there, strict=False)

    def say(self, what: str) -> None:
        self.lines.append(f"{self.now:.3f} {what}")

    def named(self, requests: Any) -> str:
        return " ".join(self.names[r.id] for r in requests)

    def _dispatch(self, d: Dispatch) -> None:
        super()._dispatch(d)
        by = f" by {d.variant}" if self.says_variant else ""
        self.say(f"dispatch {self.named(d.requests)} on {d.worker}{by}, ends {d.finish_at:.3f}")

    def _drop(self, drop: Drop) -> None:
        super()._drop(drop)
        self.say(f"drop {self.named(drop.requests)}: {drop.reason.value}")

    def finish(self, worker: str, status: BatchStatus = BatchStatus.FINISHED, **how: Any) -> None:
        if status is BatchStatus.PREEMPTED:
            self.say(f"preempt {worker}")
        super().finish(worker, status, **how)

    def until(self, at: float) -> None:
        """Go on to a time. Batches that end then have ended, and nothing is decided yet."""
        self.advance(math.nextafter(at, -math.inf))
        self.now = at
        self._end_batches()

    def happens(self, event: str, more: bool) -> None:
        """Feed an event. `more`: others come at the same time, and are decided on with it."""
        self.lines.append(f"{self.now:.3f} > {event}")
        if found := ARRIVE.fullmatch(event):
            new = [self.request(name, found) for name in found["names"].split()]
            self.arrive(new, decide=not more)
            return
        if found := BEST.fullmatch(event):
            self.policy.solved(self.now, [self.rehearsed(found["setting"])])
            self.decide()
            return
        found = ONE.fullmatch(event)
        assert found, f"no such event: {event!r}"
        name, what = found["name"], found["what"]
        if what == "is cancelled":
            self.cancel([self.by_name[name]])
        elif what == "fails":
            self.finish(name, BatchStatus.FAILED)
        elif what == "joins":
            there = {*self.cluster.workers, name}
            self.there({w: s for w, s in self.all_there.workers.items() if w in there})
        else:
            lost = [r for f in self.flights[name] for r in f.dispatch.requests]
            self.there({w: s for w, s in self.cluster.workers.items() if w != name})
            if lost:
                self.arrive(lost)

    def rehearsed(self, best: str) -> Rehearsed:
        """A rehearsal of 100 requests, with the current setting and the best one."""
        scores = {
            self.policy.in_force()["setting"]: Score((25.0, 25.0), (50,), (None,), 0.02),
            best: Score((50.0, 50.0), (100,), (None,), 0.02, fall=0.0),
        }
        return Rehearsed(1, self.now, 100.0, ("m",), (100,), (50, 50), scores)

    def there(self, workers: Mapping[str, Worker]) -> None:
        self.change(replace(self.cluster, workers=workers))

    def request(self, name: str, of: re.Match[str]) -> Request:
        number = len(self.names) + 1
        model = of["model"] or next(iter(self.cluster.models))
        by = of["variant"] and Upstream(of["worker"], of["variant"], float(of["spent"]))
        self.names[number] = name
        r = Request(number, model, self.now, float(of["due"]), int(of["size"] or 1), upstream=by)
        self.by_name[name] = r
        return r


def events(lines: list[str]) -> Iterator[tuple[float, str]]:
    for line in lines:
        at, _, what = line.partition(" ")
        if what.startswith("> "):
            yield float(at), what[2:]


def told(policy: str, of: Cluster, text: str, kwargs: Mapping[str, Any]) -> list[str]:
    """The timeline that the policy makes of the events in a text."""
    happen = list(events(lines_of(text)))
    first = {what.split()[0]: what for _, what in reversed(happen)}
    late = {w for w in of.workers if first.get(w, "").endswith(" joins")}
    host = _Telling(policy, kwargs, of)
    if late:
        host.there({w: s for w, s in of.workers.items() if w not in late})
    for (at, what), then in zip(happen, [*happen[1:], None], strict=True):
        host.until(at)
        host.happens(what, more=then is not None and then[0] == at)
    host.advance(host.now + 1000.0, until_idle=True)
    left = [f"never answered: {host.named(host.waiting.values())}"] if host.waiting else []
    return host.lines + left


def check(policy: str, of: Cluster, text: str, **kwargs: Any) -> None:
    """Compare a timeline with what the policy decides.

    Raises:
        AssertionError: it decides otherwise; the message shows the lines that differ.
    """
    compare(f"{policy} decides otherwise", text, told(policy, of, text, kwargs))
