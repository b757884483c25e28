"""What a planner's brain hears, decides and says. Pure: no ray, no clock.

The host (the planner actor, or the simulator) hears workers and frontends, hands the brain what it
has `Seen`, solves the brain's problem elsewhere, and tells workers what is `Wanted` of them and
frontends where to send requests (`Routing`). Whoever hosts a brain may die at any time: a successor
goes on from what workers and frontends say they do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.policy import Expected

FIRST = "first plan"
RESTARTED = "planner restarted"
_SETTLE_S = 1.0  # for all workers to say what they do
_LISTEN_S = 3.0  # after a restart: until the demand was seen

Key = tuple[str, str]  # (variant, kind of worker)


class WorkerSays(NamedTuple):
    """Worker → planner.

    Attributes:
        loaded: variants that it offers to its scheduler; in a group, that the scheduler knows of.
        assigned: what it serves; empty where it serves whatever comes.
        profiles: of every variant that it ever measured or was told of, so that nothing is lost
            with the planner.
        errors: variants that it could not load, why, and the number of the failure.
        version: fingerprint of its specification.
        ready: Serve may send it requests; before, it loads what it begins with.
        age_s: since it started.
        group: where it serves; None before it was told, and where there are no groups.
        memory_mb: of loaded variants, each at its largest batch so far, as far as measured.
        room_mb: what variants may take on it together; None where nobody knows.
        ready_s: from its start until it could serve; None before.
    """

    worker: str
    kind: str
    loaded: frozenset[str] = frozenset()
    assigned: tuple[Assigned, ...] = ()
    profiles: Mapping[str, LatencyProfile] = {}
    errors: Mapping[str, tuple[str, float]] = {}
    version: str = ""
    ready: bool = True
    age_s: float = 0.0
    group: str | None = None
    memory_mb: Mapping[str, float] = {}
    room_mb: float | None = None
    ready_s: float | None = None


class Wanted(NamedTuple):
    """What a worker should do: have exactly the variants in `keep` loaded, serve `assigned` (empty:
    whatever comes), and serve in `group`, where there are groups.

    Attributes:
        profiles: of those in `keep`, where known, to start from.
        memory_mb: the same.
    """

    assigned: tuple[Assigned, ...]
    keep: tuple[str, ...]
    profiles: Mapping[str, LatencyProfile] = {}
    group: str | None = None
    memory_mb: Mapping[str, float] = {}


class Counts(NamedTuple):
    """What a frontend counted since it started.

    Attributes:
        requests: by clients, by stream (`root`, or `root@class`); refused ones included.
        finished: requests answered, by variant.
        made: requests made of them, by variant and child task.
        sizes: requests by model and size; of a pipeline, those for each of its tasks.
        bad: requests by clients that were refused, expired or late, by stream.
    """

    requests: Mapping[str, int] = {}
    finished: Mapping[str, int] = {}
    made: Mapping[str, Mapping[str, int]] = {}
    sizes: Mapping[str, Mapping[int, int]] = {}
    bad: Mapping[str, int] = {}

    @property
    def total(self) -> int:
        """Requests by clients."""
        return sum(self.requests.values())

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        return Counts(
            _more(self.requests, before.requests),
            _more(self.finished, before.finished),
            {v: _more(made, before.made.get(v, {})) for v, made in self.made.items()},
            {m: _more(sizes, before.sizes.get(m, {})) for m, sizes in self.sizes.items()},
            _more(self.bad, before.bad),
        )


def _more(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    return {k: n - before.get(k, 0) for k, n in now.items() if n > before.get(k, 0)}


class Plans(NamedTuple):
    """Planner → frontend: how often it has planned since it started as `epoch`.

    Attributes:
        planned: a plan was made, were it only to leave all as it is.
        failed: none was found, or finding it failed.
        took_s: for the last plan.
    """

    epoch: str = ""
    planned: int = 0
    failed: int = 0
    took_s: float | None = None


class FrontendSays(NamedTuple):
    """Frontend → planner.

    Attributes:
        tuned: arguments of the planner that were changed while it runs.
        profiles: what it last heard, for a planner that is new: there may be no worker any more of
            a kind that was measured.
        clocks: what the clocks of its schedulers' decision logs show, by clock.
        applied: the last answer whose routes it goes by: who gave it, and its number.
        routes: the group that it sends each model's requests to.
        queued: its requests that wait in a group, by (model, group).
    """

    client: str
    counts: Counts
    version: str
    tuned: Mapping[str, Any] = {}
    profiles: Mapping[Key, LatencyProfile] = {}
    clocks: Mapping[str, float] = {}
    applied: tuple[str, int] = ("", -1)
    routes: Mapping[str, str] = {}
    queued: Mapping[tuple[str, str], int] = {}


class Routing(NamedTuple):
    """Where requests go.

    Attributes:
        number: of this answer; it grows with every change.
        routes: group of each model.
        groups: schedulers to be ready for.
        complete: every model has a group that serves it.
    """

    number: int
    routes: Mapping[str, str]
    groups: tuple[str, ...]
    complete: bool


class FrontendHears(NamedTuple):
    """Planner → frontend.

    Attributes:
        plan_age_s: None before there is a plan.
        replicas: workers wanted (None: as many as there are) and running, by kind.
        profiles: for a successor, once in a while.
        shortfall: what the plan cannot do, and why; None where it does all.
        epoch: names the planner; a new one begins anew with the numbers of `routing`.
        routing: None where there are no groups, or no layout of them yet.
        start_s: that a worker takes from its start until it can serve; None before one did.
        expected: see `Brain.expected`.
    """

    plan_age_s: float | None
    replicas: Mapping[str, tuple[int | None, int]] = {}
    profiles: Mapping[Key, LatencyProfile] | None = None
    plans: Plans = Plans()
    shortfall: str | None = None
    epoch: str = ""
    routing: Routing | None = None
    start_s: float | None = None
    expected: Mapping[str, Expected] = {}


@dataclass(frozen=True)
class Seen:
    """What a brain decides by.

    Attributes:
        workers: those that are there, as they last said: those that are ready first, and of each
            the oldest first.
        profiles: by variant and kind: the median of what workers that have it loaded measured, else
            what was last known.
        avoided: could not be loaded lately, or take more than a worker of the kind has room for.
        frontends: those that are there, as they last said.
        successor: workers were ready before this planner started.
        memory_mb: by variant and kind: the median of what workers measured at its largest batch.
        room_mb: by kind: the least that variants may take together on a worker.
    """

    workers: Mapping[str, WorkerSays]
    profiles: Mapping[Key, LatencyProfile] = field(default_factory=dict)
    avoided: frozenset[Key] = frozenset()
    frontends: Mapping[str, FrontendSays] = field(default_factory=dict)
    successor: bool = False
    memory_mb: Mapping[Key, float] = field(default_factory=dict)
    room_mb: Mapping[str, float] = field(default_factory=dict)

    @property
    def serving(self) -> Mapping[str, WorkerSays]:
        """Workers that are ready; before there is one, all."""
        return {w: says for w, says in self.workers.items() if says.ready} or self.workers

    @property
    def planned_before(self) -> bool:
        """Whether workers or frontends go by a plan of a planner that is no more."""
        workers = any(bool(w.assigned) or w.group is not None for w in self.workers.values())
        return workers or any(says.routes for says in self.frontends.values())


class Verdict(NamedTuple):
    """What became of a problem.

    Attributes:
        shortfall: what the plan leaves out; None if nothing.
        holds: the last plan stays in force, as the problem has no plan.
    """

    why: str
    shortfall: str | None = None
    holds: bool = False


class NotYet(Exception):
    """There is nothing to plan with yet."""


class Brain(ABC):
    """Decides for one application. What only some planners do has a default here."""

    @property
    @abstractmethod
    def solve(self) -> Callable[[Any], Any]:
        """The planner: problem to answer. A function of a module, as it may run elsewhere."""

    @abstractmethod
    def configure(self, setting: Any) -> None:
        """Take over another setting of the same application."""

    def tune(self, kwargs: Mapping[str, Any]) -> bool:
        """Go by these arguments on top of the setting's; whether that is news.

        Raises:
            ValueError: the planner has no such arguments.
        """
        if kwargs:
            raise ValueError("the arguments of this planner cannot be changed while it runs")
        return False

    # -- what it hears ---------------------------------------------------------------------

    @abstractmethod
    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        """Hear what one frontend counted since it last said, in its share `over_s` of the time."""

    def limit(self, kind: str, most: int) -> None:
        """Hear that Serve starts no more of a kind."""
        return None

    # -- when it plans ---------------------------------------------------------------------

    def may_begin(self, seen: Seen, waited_s: float, listened_s: float) -> bool:
        """Whether enough was heard for a first decision.

        Args:
            waited_s: since the planner started.
            listened_s: since the first frontend was heard; before, since the planner started.
        """
        return waited_s >= _SETTLE_S and (not seen.successor or listened_s >= _LISTEN_S)

    def begin(self, now: float, seen: Seen) -> str:
        """Go by what needs no plan at first (a predecessor's work, or the configuration); returns
        why. "" where a plan is needed."""
        return ""

    @abstractmethod
    def problem(self, now: float, seen: Seen) -> Any:
        """What is to be solved. Changes nothing.

        Raises:
            NotYet: too little is known.
            ValueError: there is no such plan, and why.
        """

    def due(self, now: float, seen: Seen) -> str:
        """What changed so that the plan does not fit any more; "" where nothing did."""
        return ""

    @abstractmethod
    def adopt(self, problem: Any, answer: Any) -> Verdict:
        """Go by this answer of `solve` from now on."""

    def move(self, model: str, group: str) -> str:
        """Serve a model in another group from now on; returns why.

        Raises:
            LookupError: no such model.
            ValueError: no such group.
            NotYet: there is no layout of groups yet.
        """
        raise ValueError("the application has no serving groups; name some under `groups`")

    # -- what it says ----------------------------------------------------------------------

    @abstractmethod
    def wanted(self, now: float, seen: Seen, hopeless: bool) -> Mapping[str, Wanted]:
        """What workers should do; those left out go on.

        Args:
            hopeless: there is no plan, and the last attempt to make one failed.
        """

    @property
    def routing(self) -> Routing | None:
        """Where requests go, as of the last `wanted`; None without groups."""
        return None

    def target(self, kind: str) -> int | None:
        """Workers of a kind; None: as many as there are."""
        return None

    @property
    def start_s(self) -> float | None:
        """How long a worker takes from its start until it can serve; None before one did."""
        return None

    @abstractmethod
    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        """What it would plan for, for people: `demand` in requests per second, and the rest."""

    @abstractmethod
    def outcome(self) -> dict[str, Any]:
        """The plan that it goes by, for people; nothing before there is one."""

    @property
    def expected(self) -> Mapping[str, Expected]:
        """What the plan in force expects of clients' requests, by root; "" stands for the only one.
        Nothing of roots that it says nothing of."""
        return {}

    def status(self, seen: Seen) -> dict[str, Any]:
        """What else `ray-slo status` shows of it."""
        return {}
