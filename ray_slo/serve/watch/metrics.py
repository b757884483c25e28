"""`serve_slo_*` metrics. Ray exports them to Prometheus with the prefix `ray_`.

Metrics about requests have the tag `model`; those about batches also have `variant`. In a pipeline,
each task counts as a model, and so does the pipeline. Serve adds its own tags: deployment, replica
and application.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.serve import metrics

from ray_slo.core.policy import Expected
from ray_slo.core.trees import root_and_class
from ray_slo.planning.brains.brain import Plans
from ray_slo.serve.scheduler.watch import Watch
from ray_slo.serve.watch.lately import Lately, Seen

if TYPE_CHECKING:
    from ray_slo.serve.config.spec import VariantRef
    from ray_slo.serve.frontend.answer import Answer

_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_GOODPUT_WINDOW_S = 10.0
_UNKNOWN = Expected(None, math.nan)
_Good = tuple[float, int, float | None]  # a time, answers in time, and their accuracy
_KEPT = 32  # largest number of answers that are counted together, in about a millisecond


def _counter(name: str, description: str, *tags: str) -> Any:
    return metrics.Counter(f"serve_slo_{name}", description, tag_keys=tags)


def _gauge(name: str, description: str, *tags: str) -> Any:
    return metrics.Gauge(f"serve_slo_{name}", description, tag_keys=tags)


def _histogram(name: str, boundaries: Sequence[int], description: str, *tags: str) -> Any:
    return metrics.Histogram(f"serve_slo_{name}", description, list(boundaries), tag_keys=tags)


class _Sums:
    """A counter for events of every request. It reports sums, because each report to Ray costs more
    than a count."""

    def __init__(self, name: str, description: str, *tags: str) -> None:
        self._counter = _counter(name, description, *tags)
        self._tags = tags
        self._sums: Counter[tuple[str, ...]] = Counter()

    def inc(self, number: int, *values: str) -> None:
        self._sums[values] += number

    def tell(self) -> None:
        sums, self._sums = self._sums, Counter()
        for values, number in sums.items():
            self._counter.inc(number, dict(zip(self._tags, values, strict=True)))


class FrontendMetrics:
    """What happened to requests."""

    def __init__(self) -> None:
        last = f"last {_GOODPUT_WINDOW_S:.0f} s"
        self._requests = _Sums(
            "requests_total",
            "Requests by outcome: ok, late, refused, expired, cancelled, failed, invalid; reason "
            "says more.",
            *("model", "slo_class", "outcome", "reason"),
        )
        self._variants = _Sums(
            "variant_total", "Answers by variant (the variant mix).", "model", "variant"
        )
        self._latency = _histogram(
            "latency_ms", _MS, "From arrival at the frontend to the answer.", "model", "variant"
        )
        self._slack = _histogram(
            "slack_ms",
            _MS,
            "Time left to the deadline when the answer was ready (0 when late).",
            "model",
        )
        self._queue = _histogram(
            "queueing_delay_ms",
            _MS,
            "From arrival at the frontend to the start of execution.",
            "model",
        )
        self._error = _histogram(
            "prediction_error_ms",
            _MS,
            "Absolute difference between predicted and actual finish of a batch.",
            *("model", "variant"),
        )
        self._goodput = _gauge("goodput", f"Requests answered in time per second, {last}.", "model")
        self._accuracy = _gauge(
            "accuracy",
            f"Mean accuracy (percent) of the variants that answered in time, {last}.",
            "model",
        )
        self._bad_rate = _gauge(
            "bad_rate",
            "Share of requests not answered in time, last 60 s.",
            "model",
        )
        self._expected_accuracy = _gauge(
            "expected_accuracy",
            "Accuracy (percent) that the plan in force, or the policy, expects.",
            "model",
        )
        self._expected_bad_rate = _gauge(
            "expected_bad_rate",
            "Share of requests not in time that the plan in force, or the policy, expects.",
            "model",
        )
        self._pending = _gauge(
            "pending_requests", "Requests that this frontend owns and has not answered."
        )
        self._answers: list[tuple[float, Answer]] = []  # not counted yet, with their times
        self._good: dict[str, deque[_Good]] = {}
        self._was_expected: set[str] = set()
        self._lately = Lately()

    def answered(self, answer: Answer) -> None:
        """One request was answered. Many answers are counted at a time, because this costs less
        than counting one now and then."""
        self._answers.append((time.monotonic(), answer))
        if len(self._answers) >= _KEPT:
            self._count_answers()

    def _count_answers(self) -> None:
        answers, self._answers = self._answers, []
        alike: dict[tuple[Any, ...], list[tuple[float, Answer]]] = {}
        for now, a in answers:
            group = (a.model, a.variant, a.slo_class, a.deadline_met, a.accuracy, int(now))
            alike.setdefault(group, []).append((now, a))
        for (model, variant, slo_class, met, accuracy, _), told in alike.items():
            now, number = told[-1][0], len(told)
            self._requests.inc(number, model, slo_class, "ok" if met else "late", "")
            self._variants.inc(number, model, variant)
            if met:
                self._good.setdefault(model, deque()).append((now, number, accuracy))
            self._lately.answered(now, [a for _, a in told])
            tags, more_tags = {"model": model}, {"model": model, "variant": variant}
            for _, a in told:
                self._latency.observe(a.latency_ms, more_tags)
                self._slack.observe(max(a.latency_slo_ms - a.latency_ms, 0.0), tags)
                self._queue.observe(a.queue_ms, tags)

    def unanswered(self, stream: str, outcome: str, reason: str, count: int = 1) -> None:
        """Requests ended without an answer.

        Args:
            stream: a model or pipeline, with the SLO class; or a task.
        """
        self._count_answers()
        now, (model, slo_class) = time.monotonic(), root_and_class(stream)
        self._requests.inc(count, model, slo_class, outcome, reason)
        self._lately.unanswered(now, stream, outcome, reason, count)

    def bad_rate(self) -> dict[str, float]:
        """Share of requests not answered in time by model, over the last minute."""
        self._count_answers()
        shares = self._lately.shares(time.monotonic())
        return {model: bad / number for model, (number, bad) in shares.items() if number}

    def predicted(self, variant: VariantRef, expected_ms: float, took_ms: float) -> None:
        """Note the predicted and the measured time of a batch, from its grant to its result."""
        self._count_answers()
        tags = {"model": variant.model, "variant": variant.name}
        self._error.observe(abs(took_ms - expected_ms), tags)
        self._lately.predicted(time.monotonic(), variant.model, variant.name, expected_ms, took_ms)

    def goodput(self) -> dict[str, float]:
        """Requests answered in time per second by model, over the last seconds."""
        self._count_answers()
        since = time.monotonic() - _GOODPUT_WINDOW_S
        rates = {}
        for model, good in self._good.items():
            while good and good[0][0] < since:
                good.popleft()
            rates[model] = sum(number for _, number, _ in good) / _GOODPUT_WINDOW_S
        return rates

    def accuracy(self) -> dict[str, float]:
        """Mean accuracy (percent) of the answers that `goodput` counted last, if known."""
        found = {}
        for model, good in self._good.items():
            known = [(number, accuracy) for _, number, accuracy in good if accuracy is not None]
            if total := sum(number for number, _ in known):
                found[model] = sum(number * accuracy for number, accuracy in known) / total
        return found

    def seen_lately(self, pending: int) -> Seen:
        """The counts of this frontend, for `ray-slo status`.

        Args:
            pending: requests that it has not answered.
        """
        now = time.monotonic()
        return Seen(
            pending,
            self.goodput(),
            self.accuracy(),
            self._lately.shares(now),
            self._lately.counts(now),
            self._lately.refused(now),
        )

    def refresh(self, pending: int, expected: Mapping[str, Expected] | None = None) -> None:
        """Set the gauges, and report the counters and the histograms; called about once a second.

        Args:
            expected: predictions for clients' requests, by model.
        """
        self._count_answers()
        self._requests.tell()
        self._variants.tell()
        expected = expected or {}
        for model, bad_rate in self.bad_rate().items():
            self._bad_rate.set(bad_rate, {"model": model})
        for model in self._was_expected | expected.keys():  # NaN if unknown
            accuracy, bad_rate = expected.get(model, _UNKNOWN)
            self._expected_bad_rate.set(bad_rate, {"model": model})
            known = math.nan if accuracy is None else accuracy
            self._expected_accuracy.set(known, {"model": model})
        self._was_expected = {*expected}
        self._pending.set(pending)
        for model, rate in self.goodput().items():
            self._goodput.set(rate, {"model": model})
        for model, accuracy in self.accuracy().items():
            self._accuracy.set(accuracy, {"model": model})


class PlanMetrics:
    """What a frontend knows about the plan."""

    def __init__(self) -> None:
        self._age = _gauge(
            "plan_age_s", "Seconds since the planner last decided; grows while it is gone."
        )
        self._replicas = _gauge(
            "replicas", "Workers, as the plan wants (wanted) and there are (running).", "kind", "is"
        )
        self._planned = _counter(
            "plans_total", "Plans that were made (planned), and that failed (failed).", "outcome"
        )
        self._took = _gauge("planning_s", "Seconds that the last plan took.")
        self._known = Plans()

    def age(self, seconds: float) -> None:
        """Set the plan's age, in seconds."""
        self._age.set(seconds)

    def planned(self, plans: Plans) -> None:
        """Count plans made since the last call."""
        before = self._known if plans.epoch == self._known.epoch else Plans()
        for outcome in ("planned", "failed"):
            if more := getattr(plans, outcome) - getattr(before, outcome):
                self._planned.inc(more, {"outcome": outcome})
        if plans.took_s is not None:
            self._took.set(plans.took_s)
        self._known = plans

    def replicas(self, kind: str, wanted: int | None, running: int) -> None:
        """Set the workers of a kind; `wanted` is None if the plan does not change their number."""
        self._replicas.set(running, {"kind": kind, "is": "running"})
        self._replicas.set(running if wanted is None else wanted, {"kind": kind, "is": "wanted"})


class GroupMetrics:
    """Requests that a frontend sent to serving groups."""

    def __init__(self) -> None:
        self._requests = _counter(
            "group_requests_total",
            "Requests of a serving group: submitted to its scheduler, granted or refused by it.",
            *("group", "model", "event"),
        )
        self._serves = _gauge(
            "group_serves", "1 where the model's requests go to the group.", "group", "model"
        )

    def count(self, group: str, model: str, event: str, number: int) -> None:
        """Count requests that were "submitted", "granted" or "refused"."""
        if number:
            self._requests.inc(number, {"group": group, "model": model, "event": event})

    def routed(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Set the groups to which requests for models go now."""
        for model, group in before.items():
            self._serves.set(0, {"group": group, "model": model})
        for model, group in now.items():
            self._serves.set(1, {"group": group, "model": model})


class SchedulerMetrics(Watch):
    """Repairs by a scheduler, and rehearsals of its policy.

    Args:
        app_key: key of a scheduler actor; Serve adds tags only in a replica.
    """

    def __init__(self, app_key: str | None = None) -> None:
        names = () if app_key is None else app_key.split("#")
        self._tags = dict(zip(("application", "deployment"), names, strict=False))
        self._group = {"group": names[2] if len(names) > 2 else ""}
        self._rehearsals = _counter(
            "rehearsals_total",
            "Rehearsals of the policy `auto`: held, or failed (they change nothing).",
            *(*self._tags, "group", "outcome"),
        )
        self._took = _gauge(
            "rehearsal_s", "Seconds that the last rehearsal took.", *self._tags, "group"
        )
        self._setting = _gauge(
            "auto_setting",
            "1 for the setting that the policy `auto` runs.",
            *(*self._tags, "group", "setting"),
        )
        self._unclaimed = _counter(
            "unclaimed_batches_total",
            "Granted batches that no process had any more; their workers were freed.",
            *self._tags,
        )

    def unclaimed(self) -> None:
        """A worker was freed from an unclaimed batch."""
        self._unclaimed.inc(1, self._tags)

    def rehearsed(self, held: bool, took_s: float) -> None:
        tags = {**self._tags, **self._group}
        self._rehearsals.inc(1, {**tags, "outcome": "held" if held else "failed"})
        self._took.set(took_s, tags)

    def setting(self, before: str, now: str) -> None:
        tags = {**self._tags, **self._group}
        if before:
            self._setting.set(0, {**tags, "setting": before})
        self._setting.set(1, {**tags, "setting": now})


class WorkerMetrics:
    """What a worker ran."""

    def __init__(self) -> None:
        self._size = _histogram("batch_size", _SIZES, "Requests per batch.", "model", "variant")
        self._exec = _histogram(
            "execution_ms", _MS, "Time of a batch on the worker.", "model", "variant"
        )
        self._preemptions = _counter(
            "preemptions",
            "Batches that were to be stopped: preempted, or finished if it was too late for that.",
            *("model", "variant", "outcome"),
        )
        self._out_of_memory = _counter(
            "out_of_memory_total",
            "Batches that the worker had not enough memory for; they ran in parts.",
            *("model", "variant"),
        )
        self._preempt_delay = _histogram(
            "preemption_delay_ms",
            _MS,
            "From the request to stop, at the worker, to the end of the batch.",
            *("model", "variant"),
        )

    def batch(self, variant: VariantRef, size: int, seconds: float) -> None:
        """One batch ran."""
        tags = {"model": variant.model, "variant": variant.name}
        self._size.observe(size, tags)
        self._exec.observe(seconds * 1e3, tags)

    def out_of_memory(self, variant: VariantRef) -> None:
        """There was not enough memory for a batch."""
        self._out_of_memory.inc(1, {"model": variant.model, "variant": variant.name})

    def preemption(self, variant: VariantRef, outcome: str, delay_s: float) -> None:
        """A batch ended `delay_s` after it was asked to stop."""
        tags = {"model": variant.model, "variant": variant.name}
        self._preemptions.inc(1, {**tags, "outcome": outcome})
        if outcome == "preempted":
            self._preempt_delay.observe(delay_s * 1e3, tags)
