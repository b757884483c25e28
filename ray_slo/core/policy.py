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
* a policy says what it can do by attributes of its class, or of an object where arguments decide:
  - `preempts` (False where it has none): it may return `Preempt`. It may have a method
    `preempt_failed(now, worker, batch_id)`: that batch does not stop, its worker is still busy;
  - `counts_requests` (False): its batches are by the number of requests, whatever their sizes;
  - `chooses_variants` (True): False, where it serves each model by its first variant alone;
  - `follows_assignments` (where it does not choose variants): a planner is to say what each worker
    serves;
  - `serves_tasks` (True): False, where it takes the deadline of a whole pipeline for a task's own;
    what a policy cannot do of these two, `policies.composed` does for it;
  - `for_pipelines` (False): it serves the tasks of a pipeline, and nothing else;
  - `composes` (False): it is told of the application (arguments `trees`, `planned` and those of
    `policies.composed.Composed`), and composes what it is made of by itself;
* a policy's class may have a method `live_arguments(shortest_slo_ms)`: arguments that a live host,
  whose clock and batches are not exact, gives it where its user did not;
* a policy that has an attribute `explain` fills in, when a host sets it, what only a reader of the
  decision log needs; no decision depends on it;
* a policy may have a method `expected()`: what is to be expected at the present load, by model
  (`Expected`); models that it says nothing of are left out. It changes nothing;
* a policy may want things *solved aside*, such as tables or rehearsals: `wanted()` says which
  problems (it changes nothing), and the event `solved(now, answers)` brings their answers;
* a policy may have a method `adopt(now, flights, batch_id, former)`, called before its first event:
  it takes over from `former`, a policy of any kind, with the batches in flight. Its own batches are
  numbered from `batch_id` + 1 on. Requests that wait arrive after the first `cluster_changed`.
  Between the two, `expect_load(now, rates)` is called where it has that method: items per second
  by model, as measured lately;
* when `decide` has returned, calling it again at the same `now` returns no actions;
* the same events give the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision, Dispatch
from ray_slo.core.requests import BatchOutcome, Request, WorkerId

OPTIONAL_EVENTS = ("preempt_failed", "solved")
"""Methods that not all policies have."""


class Expected(NamedTuple):
    """What a policy or a plan expects of requests.

    Attributes:
        accuracy: percent, mean of those that are answered in time; None where it is not known.
        bad_rate: share that is not answered in time.
    """

    accuracy: float | None
    bad_rate: float


class InFlight(NamedTuple):
    """A batch that was sent and is not yet reported, for a policy that takes over.

    Attributes:
        here_at: when its payload is at the worker, seconds.
        end_at: predicted, as things are now.
        stops: it is being preempted.
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
    for_pipelines: bool = False
    composes: bool = False


@runtime_checkable
class Policy(Protocol):
    """Decides per event. Knows neither clock nor host."""

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
    """A policy, and something beside it. What a subclass does not define is the inner one's."""

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
        """An event that not all policies take."""
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


def unwrapped(policy: Policy) -> Policy:
    """The innermost policy."""
    while isinstance(policy, PolicyWrapper):
        policy = policy.policy
    return policy
