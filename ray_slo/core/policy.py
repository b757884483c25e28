"""The `Policy` protocol: a pure state machine with two hosts (simulator and scheduler actor).

A host feeds events, calls `decide`, carries the actions out, and sleeps until `wake_at` or the
next event. `now` is the host's clock in seconds and never goes back between calls.

The contract, checked by `tests/policies/test_contract.py` for every registered policy:

* every arrived request leaves exactly once: dispatched or dropped, unless it was cancelled first.
  A request of a batch that was preempted, failed or lost may arrive again;
* `Dispatch` names a known worker and a variant that it has loaded; `start_at >= now`;
* a worker has at most one batch running and one sent ahead. A batch is sent ahead of the running
  one's end only within `cluster.delay(b)` of its predicted finish;
* a dispatched batch is predicted to meet the earliest deadline in it, unless the policy's
  `serves_late` is true;
* attributes of a policy's class say what it can do (or of the object, if arguments decide):
  - `preempts` (False where it has none): it may return `Preempt`. It may have a method
    `preempt_failed(now, worker, batch_id)`: that batch does not stop, its worker is still busy;
  - `counts_requests` (False): it forms batches by the number of requests, and ignores their sizes;
  - `chooses_variants` (True): False if it serves each model only with its first variant;
  - `follows_assignments` (if it does not choose variants): a planner must say what each worker
    serves;
  - `serves_tasks` (True): False if it treats the deadline of a whole pipeline as a task's own. What
    a policy lacks of these two, `policies.composed` adds;
  - `plans_per_slo` (False): it prepares for every SLO of a model. `policies.composed` tells it the
    SLOs of the classes (`Model.slos_s`);
  - `for_pipelines` (False): it serves only the tasks of a pipeline;
  - `composes` (False): it gets the application's shape (arguments `trees`, `planned` and those of
    `policies.composed.Composed`), and composes its inner policies itself;
* a policy's class may have a method `live_arguments(shortest_slo_ms)`: default arguments for a live
  host, whose clock and batch times are not exact;
* a policy may have an attribute `explain`. If a host sets it, the policy also fills in what only a
  reader of the decision log needs. No decision depends on it;
* a policy may have a method `expected()`: its predictions for the present load, by model
  (`Expected`). Models without a prediction are missing. It changes nothing;
* a policy may ask for problems to be solved outside, such as tables or rehearsals: `wanted()` lists
  them (it changes nothing), and the event `solved(now, answers)` brings the answers;
* a policy may have a method `adopt(now, flights, batch_id, former)`, called before its first event:
  it takes over from `former`, a policy of any kind, together with the batches in flight. Its own
  batches are numbered from `batch_id` + 1 on. Requests that wait arrive after the first
  `cluster_changed`. Between the two, `expect_load(now, rates)` is called if it has that method,
  with the measured items per second by model;
* when `decide` has returned, calling it again at the same `now` returns no actions;
* the same events give the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision, Dispatch
from ray_slo.core.requests import BatchOutcome, Request, WorkerId

OPTIONAL_EVENTS = ("preempt_failed", "solved")
"""Methods that not all policies have."""


class Expected(NamedTuple):
    """What a policy or a plan predicts for requests.

    Attributes:
        accuracy: percent, mean of those that are answered in time; None if unknown.
        bad_rate: share that is not answered in time.
    """

    accuracy: float | None
    bad_rate: float


class InFlight(NamedTuple):
    """A batch that was sent and is not reported yet, for a policy that takes over.

    Attributes:
        here_at: time when its payload is at the worker, seconds.
        end_at: currently predicted end, seconds.
        stops: whether it is being preempted.
    """

    dispatch: Dispatch
    here_at: float
    end_at: float
    stops: bool = False

    @property
    def latency_s(self) -> float:
        """Predicted execution time."""
        return self.dispatch.finish_at - self.dispatch.start_at


class Abilities:
    """What a policy can do, unless its class says otherwise; see the module's docstring."""

    preempts: bool = False
    counts_requests: bool = False
    chooses_variants: bool = True
    serves_tasks: bool = True
    plans_per_slo: bool = False
    for_pipelines: bool = False
    composes: bool = False


@runtime_checkable
class Policy(Protocol):
    """Decides per event. It reads no clock and does not know its host."""

    serves_late: ClassVar[bool]

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        """New (or returned) requests, in order of arrival, all for models in the cluster."""

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        """Their clients left. Requests that the policy no longer holds are ignored."""

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        """A dispatched batch is over, in whatever way."""

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        """First event of a policy's life; later: workers, variants, profiles or delays changed.

        A worker that is gone takes its batches along (no `batch_finished` follows).
        """

    def decide(self, now: float) -> Decision:
        """Actions to carry out now and when to be asked again."""


class PolicyWrapper:
    """Wraps a policy. Attributes that a subclass does not define are the inner policy's."""

    serves_late: ClassVar[bool] = False  # shadowed by the inner policy's

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.serves_late = policy.serves_late  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # of a copy that is not filled in yet
            raise AttributeError(name)
        inner = getattr(self.policy, name)
        if name in OPTIONAL_EVENTS:
            return partial(self.optional_event, name)
        return inner

    def optional_event(self, name: str, *args: Any) -> None:
        """Pass on an event that not all policies have."""
        getattr(self.policy, name)(*args)

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self.policy.requests_arrived(now, requests)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self.policy.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self.policy.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self.policy.cluster_changed(now, cluster)

    def decide(self, now: float) -> Decision:
        return self.policy.decide(now)


Wrapper = TypeVar("Wrapper", bound=PolicyWrapper)


def wrapper(policy: Policy | None, of: type[Wrapper]) -> Wrapper | None:
    """The wrapper of this class around a policy; None if there is none."""
    while isinstance(policy, PolicyWrapper):
        if isinstance(policy, of):
            return policy
        policy = policy.policy
    return None


def unwrapped(policy: Policy) -> Policy:
    """The innermost policy."""
    while isinstance(policy, PolicyWrapper):
        policy = policy.policy
    return policy
