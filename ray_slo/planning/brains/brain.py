"""The interface of a planner's brain: its input, its decisions and its answers. It is pure: no Ray,
no clock.

The host is the planner actor or the simulator. It collects the reports of workers and frontends,
gives them to the brain as `Seen`, and solves the brain's problem in another process. It sends each
worker its orders (`Wanted`), and each frontend the groups of its models (`Routing`). The host may
die at any time. Its successor continues from the state that workers and frontends report.
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
_SETTLE_S = 1.0  # until every worker has reported
_LISTEN_S = 3.0  # after a restart: until the demand was measured

Key = tuple[str, str]  # (variant, kind of worker)


class WorkerSays(NamedTuple):
    """Worker → planner.

    Attributes:
        loaded: variants that it offers to its scheduler; in a group, those that the scheduler
            knows.
        assigned: the variants that it serves; empty if it serves all requests.
        profiles: profiles of every variant that it ever measured or received. So a new planner gets
            them back.
        errors: variants that it could not load, with the reason and the number of the failure.
        version: fingerprint of its specification.
        ready: whether Serve may send it requests. Before that, it loads its first variants.
        age_s: since it started.
        group: its group; None before it has one, and in an application without groups.
        memory_mb: memory of its loaded variants in MB, each at its largest batch so far, if
            measured.
        room_mb: memory for all variants on it, MB; None if unknown.
        ready_s: time from its start until it could serve, seconds; None before that.
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
    """A worker's orders: load exactly the variants in `keep`, serve `assigned` (empty: all
    requests), and serve in `group`, if there are groups.

    Attributes:
        profiles: initial profiles of the variants in `keep`, if known.
        memory_mb: their memory, MB, if known.
    """

    assigned: tuple[Assigned, ...]
    keep: tuple[str, ...]
    profiles: Mapping[str, LatencyProfile] = {}
    group: str | None = None
    memory_mb: Mapping[str, float] = {}


class Counts(NamedTuple):
    """A frontend's counts since it started.

    Attributes:
        requests: requests of clients by stream (`root`, or `root@class`), with the refused ones.
        finished: requests answered, by variant.
        made: requests made of them, by variant and child task.
        sizes: requests by model and size; for a pipeline, those of each of its tasks.
        bad: requests of clients that were refused, expired or late, by stream.
    """

    requests: Mapping[str, int] = {}
    finished: Mapping[str, int] = {}
    made: Mapping[str, Mapping[str, int]] = {}
    sizes: Mapping[str, Mapping[int, int]] = {}
    bad: Mapping[str, int] = {}

    @property
    def total(self) -> int:
        """Number of requests of clients."""
        return sum(self.requests.values())

    def since(self, before: Counts) -> Counts:
        """The counts since `before`."""
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
    """Planner → frontend: counts of plans since the planner `epoch` started.

    Attributes:
        planned: plans made, with those that changed nothing.
        failed: attempts without a plan, or with an error.
        took_s: time that the last plan took, seconds.
    """

    epoch: str = ""
    planned: int = 0
    failed: int = 0
    took_s: float | None = None


class FrontendSays(NamedTuple):
    """Frontend → planner.

    Attributes:
        tuned: arguments of the planner that were changed while it runs.
        profiles: the profiles that it received last, for a new planner: there may be no worker left
            of a kind that was measured.
        clocks: readings of the clocks of its schedulers' decision logs, by clock.
        applied: the answer whose routes it uses: the planner's epoch, and the answer's number.
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
        groups: groups whose schedulers frontends connect to.
        complete: whether every model has a group that serves it.
    """

    number: int
    routes: Mapping[str, str]
    groups: tuple[str, ...]
    complete: bool


class FrontendHears(NamedTuple):
    """Planner → frontend.

    Attributes:
        plan_age_s: None before there is a plan.
        replicas: wanted number (None: no change) and running number of workers, by kind.
        profiles: profiles, from time to time, for a later planner.
        shortfall: what the plan cannot serve, and why; None if it serves everything.
        epoch: the planner's name. The numbers of `routing` begin anew with each planner.
        routing: routes of models; None without groups, and before their first layout.
        start_s: time that a worker takes from its start until it can serve, seconds; None while
            unknown.
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
    """The reports that a brain decides on.

    Attributes:
        workers: the last report of each present worker. Ready workers come first, and older ones
            before younger ones.
        profiles: by variant and kind: the median over the workers that have it loaded, otherwise
            the last known profile.
        avoided: variants that could not be loaded lately, or need more memory than a worker of the
            kind has.
        frontends: those that are there, as they last said.
        successor: whether workers were ready before this planner started.
        memory_mb: by variant and kind: the median of the workers' measurements at its largest
            batch, MB.
        room_mb: by kind: the smallest memory for all variants on a worker, MB.
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
        """Ready workers; all workers while none is ready."""
        return {w: says for w, says in self.workers.items() if says.ready} or self.workers

    @property
    def planned_before(self) -> bool:
        """Whether workers or frontends follow the plan of an earlier planner."""
        workers = any(bool(w.assigned) or w.group is not None for w in self.workers.values())
        return workers or any(says.routes for says in self.frontends.values())


class Verdict(NamedTuple):
    """The result of a problem.

    Attributes:
        shortfall: what the plan does not serve; None if it serves everything.
        holds: whether the last plan stays in force because the problem has no solution.
    """

    why: str
    shortfall: str | None = None
    holds: bool = False


class NotYet(Exception):
    """Too little is known to plan."""


class Brain(ABC):
    """Decides for one application. Methods that only some planners need have a default here."""

    @property
    @abstractmethod
    def solve(self) -> Callable[[Any], Any]:
        """The planner: from a problem to its answer. It is a function of a module, because it may
        run in another process."""

    @abstractmethod
    def configure(self, setting: Any) -> None:
        """Take over another setting of the same application."""

    def tune(self, kwargs: Mapping[str, Any]) -> bool:
        """Override the setting's arguments by these. Return whether they are new.

        Raises:
            ValueError: the planner has no such arguments.
        """
        if kwargs:
            raise ValueError("the arguments of this planner cannot be changed while it runs")
        return False

    # -- reports ---------------------------------------------------------------------

    @abstractmethod
    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        """Take a frontend's counts since its last report. `over_s` is its share of the time,
        seconds."""

    def limit(self, kind: str, most: int) -> None:
        """Note that Serve starts no more workers of a kind."""
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
        """Start without a plan, from an earlier planner's work or from the configuration. Return
        the reason; "" if a plan is needed."""
        return ""

    @abstractmethod
    def problem(self, now: float, seen: Seen) -> Any:
        """The problem to solve. Changes nothing.

        Raises:
            NotYet: too little is known.
            ValueError: there is no plan; the message says why.
        """

    def due(self, now: float, seen: Seen) -> str:
        """The change after which the plan does not fit any more; "" if there is none."""
        return ""

    @abstractmethod
    def adopt(self, problem: Any, answer: Any) -> Verdict:
        """Follow this answer of `solve` from now on."""

    def move(self, model: str, group: str) -> str:
        """Serve a model in another group from now on. Return the reason.

        Raises:
            LookupError: no such model.
            ValueError: no such group.
            NotYet: there is no layout of groups yet.
        """
        raise ValueError("the application has no serving groups; name some under `groups`")

    # -- answers ----------------------------------------------------------------------

    @abstractmethod
    def wanted(self, now: float, seen: Seen, hopeless: bool) -> Mapping[str, Wanted]:
        """Orders for workers. A worker that is left out continues.

        Args:
            hopeless: whether there is no plan, and the last attempt to make one failed.
        """

    @property
    def routing(self) -> Routing | None:
        """The groups of models at the last `wanted`; None without groups."""
        return None

    def target(self, kind: str) -> int | None:
        """Wanted number of workers of a kind; None: no change."""
        return None

    @property
    def start_s(self) -> float | None:
        """Time that a worker takes from its start until it can serve, seconds; None while
        unknown."""
        return None

    @abstractmethod
    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        """The input of a plan, for people: `demand` in requests per second, and the rest."""

    @abstractmethod
    def outcome(self) -> dict[str, Any]:
        """The plan in force, for people; empty before the first one."""

    @property
    def expected(self) -> Mapping[str, Expected]:
        """The predictions of the plan in force for clients' requests, by root; "" is the only root.
        Roots without a prediction are left out."""
        return {}

    def status(self, seen: Seen) -> dict[str, Any]:
        """Further facts for `ray-slo status`."""
        return {}
