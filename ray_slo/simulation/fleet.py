"""Workers in virtual time that follow the orders of a planner's brain."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ray_slo.core.cluster import Assigned, Worker
from ray_slo.core.requests import WorkerId
from ray_slo.planning.brains.brain import Seen, Wanted, WorkerSays
from ray_slo.simulation.engine import Event, Run, Slot, non_negative

_IDLE = Wanted((), ())


@dataclass(frozen=True)
class Timing:
    """Times of planning and of workers. All are in seconds.

    Attributes:
        interval_s: time between plans.
        check_s: time between looks at the demand.
        solve_s: time from the start of planning until the plan takes effect.
        load_s: time in which a worker loads a variant.
        start_s: time in which a worker starts, before it can load.
        make_before_break: whether a worker serves its old variant while it loads the new one.
    """

    interval_s: float = 10.0
    check_s: float = 1.0
    solve_s: float = 0.0
    load_s: float = 0.0
    start_s: float = 0.0
    make_before_break: bool = True

    def check(self) -> None:
        """Check that all times are valid.

        Raises:
            ValueError: a time is negative or not finite.
        """
        for name in ("interval_s", "check_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("solve_s", "load_s", "start_s"):
            non_negative(name, getattr(self, name))


@dataclass(slots=True)
class _Member:
    """A worker, running or not."""

    id: WorkerId
    kind: str
    wanted: Wanted = _IDLE
    loaded: frozenset[str] = frozenset()
    assigned: tuple[Assigned, ...] = ()
    loading: str | None = None
    up_at: float = math.inf  # time when its process is ready; inf: it does not run
    token: int = 0  # number of the present load; ends of earlier loads are ignored
    empties: bool = False  # it will load its variant when its last batch has ended
    leaves: bool = False  # it will stop when its last batch has ended

    @property
    def on(self) -> bool:
        return self.up_at < math.inf and not self.leaves


class Fleet:
    """All workers, running or not.

    Args:
        kinds: the largest number of workers, by kind.

    Attributes:
        used: number of running workers over time, by kind: pairs of a time and the number from then
            on.
    """

    def __init__(self, kinds: Mapping[str, int], timing: Timing) -> None:
        members = [
            _Member(f"w{i}" if len(kinds) == 1 else f"{kind}-{i}", kind)
            for kind, most in kinds.items()
            for i in range(most)
        ]
        self._members = {m.id: m for m in members}
        self._timing = timing
        # Without delays, a stopped worker could serve at once.
        self._at_once = not timing.start_s + timing.load_s
        self.used: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}

    def all_on(self, fits: Mapping[str, Collection[str]]) -> list[Worker]:
        """Run every worker from time 0, with all variants that fit on its kind."""
        for member in self._members.values():
            keep = tuple(fits.get(member.kind, ()))
            member.wanted, member.up_at = Wanted((), keep), 0.0
            member.loaded = frozenset(keep)
        self._count(0.0)
        return self._workers()

    def begin(self, wanted: Mapping[WorkerId, Wanted]) -> list[Worker]:
        """Set the workers at time 0: they have their wanted variants without a delay."""
        for worker, w in wanted.items():
            if w.keep:
                member = self._members[worker]
                member.wanted, member.assigned, member.up_at = w, w.assigned, 0.0
                member.loaded = frozenset(w.keep)
        self._count(0.0)
        return self._workers()

    def _workers(self) -> list[Worker]:
        return [Worker(m.id, m.kind, m.loaded, m.assigned) for m in self._members.values()]

    def attach(self, run: Run, changed: Callable[[], None]) -> None:
        """Attach to a run.

        Args:
            changed: called when a worker has loaded a variant.
        """
        self._run, self._changed = run, changed
        self._told = True  # the policy knows the present workers

    def at_first(self, numbers: Mapping[str, int] | None = None) -> Seen:
        """Return the workers' reports at the start: the first workers of each kind, by default
        all."""
        members = [
            member
            for kind in self.used
            for member in self._of(kind)[: None if numbers is None else numbers[kind]]
        ]
        return Seen({m.id: WorkerSays(m.id, m.kind) for m in members})

    def seen(self, to_plan: bool = False) -> Seen:
        """Return the workers' reports.

        Args:
            to_plan: whether to include stopped workers that could serve at once.
        """
        ready = self._at_once
        return Seen(
            {
                m.id: WorkerSays(
                    m.id,
                    m.kind,
                    m.loaded,
                    m.assigned,
                    ready=ready or m.id in self._run.slots,
                    group=m.wanted.group,
                )
                for m in self._members.values()
                if m.on or (to_plan and self._at_once)
            }
        )

    @property
    def variants(self) -> dict[WorkerId, str | None]:
        """Return the wanted variant of each worker, as text."""
        return {
            m.id: ", ".join(a.variant for a in m.wanted.assigned)
            for m in self._members.values()
            if m.wanted.assigned
        }

    @property
    def off(self) -> list[WorkerId]:
        return [m.id for m in self._members.values() if m.up_at == math.inf]

    # -- orders ----------------------------------------------------------------------

    def grow(self, kind: str, target: int) -> None:
        """Start workers, or keep those that are stopping, until `target` run."""
        missing = target - sum(m.on for m in self._of(kind))
        rest = [m for m in self._of(kind) if not m.on]
        for member in sorted(rest, key=lambda m: not m.leaves)[: max(missing, 0)]:
            self._start(member)

    def _of(self, kind: str) -> list[_Member]:
        return [m for m in self._members.values() if m.kind == kind]

    def shrink(self, kind: str, target: int) -> None:
        """Stop workers without an assignment, the last ones first, until `target` run."""
        on = [m for m in self._of(kind) if m.on]
        idle = [m for m in reversed(on) if not m.wanted.assigned]
        for member in idle[: max(len(on) - target, 0)]:
            self._retire(member)

    def follow(self, wanted: Mapping[WorkerId, Wanted]) -> bool:
        """Follow the orders. Return whether they are new."""
        news = False
        for worker, w in wanted.items():
            member = self._members[worker]
            if member.on or w.keep:
                news |= member.wanted != w
                self._start(member)
                member.wanted = w
                self._step(member)
        self._count(self._run.now)
        return news

    def _start(self, member: _Member) -> None:
        member.leaves = False
        if member.up_at == math.inf:
            member.up_at = self._run.now + self._timing.start_s

    def _step(self, member: _Member) -> None:
        """Serve the wanted variants that are loaded, and load the next one that is not."""
        w, timing = member.wanted, self._timing
        slot = self._run.slots.get(member.id)
        missing = [v for v in w.keep if v not in member.loaded]
        served = tuple(a for a in w.assigned if a.variant in member.loaded)
        if served == w.assigned:
            member.assigned, member.loaded = w.assigned, member.loaded.intersection(w.keep)
            member.empties = False
        elif member.loaded and not timing.make_before_break:
            member.assigned, member.loaded = served, member.loaded.intersection(w.keep)
            member.empties = slot is not None and slot.current is not None
        elif not member.assigned:  # a new worker loads one variant after the other
            member.assigned = served
        self._show(member)
        if not missing:
            member.loading = None
            member.token += 1
        elif missing[0] != member.loading and not member.empties:
            member.loading = missing[0]
            member.token += 1
            ready_at = max(self._run.now, member.up_at) + timing.load_s
            self._run.at(ready_at, Event.READY, self._ready, member, member.token)

    def _ready(self, member: _Member, token: int) -> None:
        if member.token != token or member.loading is None:
            return
        member.loaded |= {member.loading}
        member.loading = None
        if member.id not in self._run.slots:
            worker = Worker(member.id, member.kind, frozenset())
            self._run.slots[member.id] = Slot(worker, self._run.index_of[member.id])
        self._step(member)
        self._changed()

    def _retire(self, member: _Member) -> None:
        member.wanted, member.assigned = _IDLE, ()
        member.loading, member.leaves, member.empties = None, True, False
        member.token += 1
        slot = self._run.slots.get(member.id)
        if slot is None or slot.current is None:
            self._end(member)
        else:
            self._show(member)

    def emptied(self, worker: WorkerId) -> None:
        """Note that a worker has finished its last batch."""
        member = self._members[worker]
        if member.leaves:
            self._end(member)
        elif member.empties:
            member.empties = False
            self._step(member)

    def _end(self, member: _Member) -> None:
        member.loaded, member.up_at, member.leaves = frozenset(), math.inf, False
        if self._run.slots.pop(member.id, None) is not None:
            self._tell()
        self._count(self._run.now)

    # -- the policy ------------------------------------------------------------------------

    def _show(self, member: _Member) -> None:
        slot = self._run.slots.get(member.id)
        loaded = frozenset[str]() if member.leaves else member.loaded
        shown = Worker(member.id, member.kind, loaded, member.assigned)
        if slot is not None and shown != slot.worker:
            slot.worker = shown
            self._tell()

    def _tell(self) -> None:
        """Tell the policy once, after all events of this instant."""
        if self._told:
            self._told = False
            self._run.at(self._run.now, Event.CLUSTER, self._tell_now)

    def _tell_now(self) -> None:
        self._told = True
        self._run.become(self._run.present())

    def _count(self, now: float) -> None:
        for kind, used in self.used.items():
            on = sum(m.up_at < math.inf for m in self._of(kind))
            if not used or on != used[-1][1]:
                used.append((now, on))
