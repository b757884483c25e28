"""The interface of a planner's brain: its input, its decisions and its answers. It is pure: no Ray,
no clock.

The host is the planner actor or the simulator. It collects the reports of workers and frontends,
gives them to the brain as `Seen`, and solves the brain's problem in another process. It sends each
worker its orders (`Wanted`), and each frontend the groups of its models (`Routing`). The host may
die at any time. Its successor continues from the state that workers and frontends report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.policy import Expected

FIRST = "first plan"
RESTARTED = "planner restarted"
# The planner waits this long for the reports of all workers.
_SETTLE_S = 1.0
# After a restart, the planner waits this long to measure the demand.
_LISTEN_S = 3.0
# After a restart, the planner waits at most this long for workers that ran before. A worker's last
# call of the dead planner may take 10 s to fail.
_RETURN_S = 12.0

Key = tuple[str, str]  # (variant, kind of worker)


class WorkerSays(NamedTuple):
    """A worker's report to the planner.

    Attributes:
        worker: ID of the worker.
        kind: kind of the worker.
        loaded: variants that the worker offers to its scheduler. In a group, the variants that the
            scheduler knows.
        assigned: variants that the worker serves. Empty if it serves all requests.
        profiles: profiles of every variant that the worker ever measured or received. A new planner
            learns them from here.
        errors: variants that the worker could not load, with the reason and the number of the
            failure.
        version: fingerprint of the worker's specification.
        ready: whether Serve may send requests to the worker. It loads its first variants before.
        age_s: time since the worker started, in seconds.
        group: the worker's group. None before it has one, and in an application without groups.
        memory_mb: measured memory of each loaded variant at its largest batch so far, in MB.
        room_mb: memory of the worker for all its variants, in MB. None if it is unknown.
        ready_s: time from the worker's start until it could serve, in seconds. None until it can.
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
    """The planner's orders for one worker.

    Attributes:
        assigned: variants that the worker serves. Empty means that it serves all requests.
        keep: variants that the worker has loaded or loads; it unloads all others.
        profiles: initial profiles of the variants in `keep`, if they are known.
        group: group that the worker serves in. None without groups.
        memory_mb: memory of the variants in `keep`, in MB, if it is known.
    """

    assigned: tuple[Assigned, ...]
    keep: tuple[str, ...]
    profiles: Mapping[str, LatencyProfile] = {}
    group: str | None = None
    memory_mb: Mapping[str, float] = {}


class Counts(NamedTuple):
    """A frontend's counts since it started.

    Attributes:
        requests: requests of clients, by stream (`root`, or `root@class`). Refused requests count.
        finished: answered requests, by variant.
        made: requests of child tasks that the answers led to, by variant and child task.
        sizes: requests by model and size. In a pipeline, the requests of every task are counted.
        bad: requests of clients that were refused, expired or late, by stream.
        waiting: requests of clients that have no answer now, by stream.
    """

    requests: Mapping[str, int] = {}
    finished: Mapping[str, int] = {}
    made: Mapping[str, Mapping[str, int]] = {}
    sizes: Mapping[str, Mapping[int, int]] = {}
    bad: Mapping[str, int] = {}
    waiting: Mapping[str, int] = {}

    def since(self, before: Counts) -> Counts:
        """Return how much the counts have grown since the earlier counts `before`; `waiting` is
        that of now."""
        return Counts(
            _more(self.requests, before.requests),
            _more(self.finished, before.finished),
            {v: _more(made, before.made.get(v, {})) for v, made in self.made.items()},
            {m: _more(sizes, before.sizes.get(m, {})) for m, sizes in self.sizes.items()},
            _more(self.bad, before.bad),
            self.waiting,
        )


def _more(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    return {k: n - before.get(k, 0) for k, n in now.items() if n > before.get(k, 0)}


class Plans(NamedTuple):
    """The planner's counts of its plans, for frontends, which export them as metrics.

    Attributes:
        epoch: name of the planner process. The counts begin at 0 with each one.
        planned: number of plans made. Plans that changed nothing count.
        failed: number of attempts that ended without a plan, or with an error.
        took_s: time that the last plan took, in seconds.
    """

    epoch: str = ""
    planned: int = 0
    failed: int = 0
    took_s: float | None = None


class FrontendSays(NamedTuple):
    """A frontend's report to the planner.

    Attributes:
        client: ID of the frontend.
        counts: its counts since it started.
        version: fingerprint of its specification.
        tuned: arguments of the planner that were changed while it runs.
        profiles: the profiles that the frontend received last. They are for a new planner, when no
            worker of a measured kind is left.
        clocks: readings of the clocks of its schedulers' decision logs, by clock.
        applied: the answer whose routes the frontend uses: the planner's epoch, and the number of
            the answer.
        routes: the group to which the frontend sends the requests of each model.
        queued: number of the frontend's requests that wait in a group, by (model, group).
        running: number of running workers, by kind, as a planner that had a plan last told it.
        at: time of the counts on the frontend's own clock, in seconds. A report to a planner that
            is starting arrives seconds later.
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
    running: Mapping[str, int] = {}
    at: float = 0.0


class Routing(NamedTuple):
    """The group to which frontends send the requests of each model.

    Attributes:
        number: number of this routing. It grows with every change.
        routes: group of each model.
        groups: groups whose schedulers the frontends connect to.
        complete: whether every model has a group that serves it.
    """

    number: int
    routes: Mapping[str, str]
    groups: tuple[str, ...]
    complete: bool


class FrontendHears(NamedTuple):
    """The planner's message to a frontend.

    Attributes:
        plan_age_s: age of the plan, in seconds. None before there is a plan.
        replicas: wanted and running number of workers, by kind. A wanted number of None means no
            change.
        profiles: all profiles. The planner sends them from time to time; a later planner gets them
            back from frontends.
        plans: counts of the planner's plans.
        shortfall: what the plan cannot serve, and why. None if it serves everything.
        epoch: name of the planner process. The numbers of `routing` begin anew with each one.
        routing: groups of the models. None without groups, and before their first layout.
        start_s: time from a worker's start until it can serve, in seconds. None while unknown.
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
    """The reports on which a brain decides.

    Attributes:
        workers: the last report of each present worker. Ready workers come first, and older ones
            before younger ones.
        profiles: profile of each (variant, kind). It is the median over the workers that have the
            variant loaded, otherwise the last known profile.
        avoided: (variant, kind) pairs that are not used now. Either loading failed lately, or the
            variant needs more memory than a worker of the kind has.
        frontends: the last report of each present frontend.
        successor: whether workers were ready before this planner started. Then an earlier planner
            ran.
        memory_mb: memory of each (variant, kind) at its largest batch, in MB: the median of the
            workers' measurements.
        room_mb: memory of a worker for all its variants, in MB, by kind. It is the smallest that a
            worker of the kind reported.
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
        """Reports of the ready workers, or of all workers if none is ready."""
        return {w: says for w, says in self.workers.items() if says.ready} or self.workers

    @property
    def planned_before(self) -> bool:
        """Whether workers or frontends follow the plan of an earlier planner."""
        workers = any(bool(w.assigned) or w.group is not None for w in self.workers.values())
        return workers or any(says.routes for says in self.frontends.values())

    def has_returned(self, waited_s: float) -> bool:
        """Whether no more reports are expected of workers that an earlier planner had.

        Args:
            waited_s: time since the planner started, in seconds.
        """
        there = Counter(says.kind for says in self.workers.values())
        ran = (item for says in self.frontends.values() for item in says.running.items())
        return waited_s >= _RETURN_S or all(there[kind] >= number for kind, number in ran)


class Verdict(NamedTuple):
    """A brain's account of a plan that it adopted.

    Attributes:
        why: reason of the plan, as a sentence for people.
        shortfall: what the plan does not serve. None if it serves everything.
        holds: whether the last plan stays in force because the problem has no solution.
    """

    why: str
    shortfall: str | None = None
    holds: bool = False


class NotYet(Exception):
    """Too little is known to make a plan. The message says what is missing."""


class Brain(ABC):
    """Decides for one application. Methods that only some planners need have a default here.

    In all methods, `now` is a time in seconds on the host's clock.
    """

    @property
    @abstractmethod
    def solve(self) -> Callable[[Any], Any]:
        """The function that solves a problem and returns its answer. It is a function at the top of
        a module, because the host may run it in another process."""

    @abstractmethod
    def configure(self, setting: Any) -> None:
        """Use a new setting of the same application from now on."""

    def tune(self, kwargs: Mapping[str, Any]) -> bool:
        """Override the planner's arguments in the setting. Return whether this changed them.

        Raises:
            ValueError: the planner has no such arguments.
        """
        if kwargs:
            raise ValueError("the arguments of this planner cannot be changed while it runs")
        return False

    # -- reports ---------------------------------------------------------------------

    @abstractmethod
    def counted(self, now: float, over_s: float, counts: Counts) -> None:
        """Take the counts of one frontend since its last report.

        Args:
            over_s: the time that the counts stand for, in seconds. The times of all frontends add
                up to the time that has passed.
        """

    def limit(self, kind: str, most: int) -> None:
        """Note that Serve can run at most `most` workers of a kind."""
        return None

    # -- when it plans ---------------------------------------------------------------------

    def may_begin(self, seen: Seen, waited_s: float, listened_s: float) -> bool:
        """Return whether the reports so far are enough for a first decision.

        Args:
            waited_s: time since the planner started, in seconds.
            listened_s: time since the first report of a frontend, in seconds. Without a report, the
                time since the planner started.
        """
        if seen.successor and not (listened_s >= _LISTEN_S and seen.has_returned(waited_s)):
            return False
        return waited_s >= _SETTLE_S

    def begin(self, now: float, seen: Seen) -> str:
        """Start without solving a problem, if possible: from an earlier planner's work, or from the
        configuration. Return the reason, or "" if a plan is needed."""
        return ""

    @abstractmethod
    def problem(self, now: float, seen: Seen) -> Any:
        """Return the problem to solve. The brain does not change.

        Raises:
            NotYet: too little is known.
            ValueError: no plan is possible. The message says why.
        """

    def due(self, now: float, seen: Seen) -> str:
        """Return the change that makes a new plan necessary, or "" if there was none."""
        return ""

    @abstractmethod
    def adopt(self, problem: Any, answer: Any) -> Verdict:
        """Follow `answer`, which `solve` returned for `problem`, from now on."""

    def move(self, model: str, group: str) -> str:
        """Serve a model in another group from now on. Return the reason for logs.

        Raises:
            LookupError: the application has no such model.
            ValueError: the application has no such group, or the planner does not move models by
                hand.
            NotYet: the groups have no models yet.
        """
        raise ValueError("the application has no serving groups; name some under `groups`")

    # -- answers ----------------------------------------------------------------------

    @abstractmethod
    def wanted(self, now: float, seen: Seen, hopeless: bool) -> Mapping[str, Wanted]:
        """Return the orders by worker. A worker without an entry continues as before.

        Args:
            hopeless: whether there is no plan, and the last attempt to make one failed.
        """

    @property
    def routing(self) -> Routing | None:
        """The group of each model, as of the last call of `wanted`. None without groups."""
        return None

    def target(self, kind: str) -> int | None:
        """Return the wanted number of workers of a kind, or None for no change."""
        return None

    @property
    def start_s(self) -> float | None:
        """Time from a worker's start until it can serve, in seconds. None while it is unknown."""
        return None

    @abstractmethod
    def inputs(self, now: float, seen: Seen) -> dict[str, Any]:
        """Return the present input of a plan, for people and logs. `demand` is in requests per
        second."""

    @abstractmethod
    def outcome(self) -> dict[str, Any]:
        """Return the plan in force, for people and logs. It is empty before the first plan."""

    @property
    def expected(self) -> Mapping[str, Expected]:
        """The plan's predictions for the requests of clients, by root. The key "" stands for the
        only root. Roots without a prediction are left out."""
        return {}

    def status(self, seen: Seen) -> dict[str, Any]:
        """Return further facts that `ray-slo status` prints."""
        return {}
