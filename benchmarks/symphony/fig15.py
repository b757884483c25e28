"""A changing workload: busy GPUs, advice to scale, bad requests.

24 models of the 1080Ti zoo with their own SLOs run on 512 GPUs (48 with `--quick`). Arrivals are
Poisson, with rates that rise and fall. (Those of the paper come from 150 hours of unpublished
videos.) The peak is what the GPUs could serve if all batches were the largest possible; that is
just too much. Every half second, the bad rate and the idle time become an advice (`Advice`).

*Fixed*: all GPUs run all the time, as in the paper, and the advice is only recorded. *Followed*:
the cluster follows the advice, up to 1.5 times the size. GPUs come and go at once, and no model has
to be loaded. *Over least*: GPU time over that of the fewest GPUs that suffice with the largest
possible batches. *Bad in the calm*: bad requests when these are fewer than `CALM` of the fixed
cluster. *Advice*: the largest advice in a period.

Up to 1 % of bad requests leads to no advice, so a cluster that follows stays near that. The paper's
policy is `consolidate`. Eager and the default `deferred` are shown, too. They use idle GPUs, for
small batches or for latency, so their idle time says little about the GPUs that are not needed.

The paper prints no figures. It says that busy GPUs and advice follow the load, and that few
requests are bad unless the cluster is overloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.symphony.fig9 import largest
from benchmarks.zoos import ZooModel, load
from ray_slo.core import BatchOutcome, Cluster, Decision, Dispatch, Drop, Policy, Request, WorkerId
from ray_slo.policies import make_policy
from ray_slo.simulation import Trace, Workload, simulate

SOURCE = "Symphony §3.5, §5.7, Figure 15"
ASKED = [
    ("*, advice fixed · deferred*", "bad in the calm", "≤", 1, "the paper prints no figure"),
    (
        "*, advice followed · deferred, consolidate",
        "bad",
        "≤",
        1,
        "a rise is noticed only by its bad requests, and up to 1 % of these lead to no advice",
    ),
]
GPUS, QUICK_GPUS, MODELS, CALM = 512, 48, 24, 0.6
PERIOD_S, ADVICE_S = 2.0, 0.5
TOLERANCE_S = 1e-6
BAD_ABOVE, IDLE_ABOVE, KEEP_IDLE, PERIODS_DOWN = 0.01, 0.15, 0.1, 2  # of the advice

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deferred, consolidate": ("deferred", {"objective": "consolidate"}),
    "deferred": ("deferred", {}),
    "eager": ("eager", {}),
}


@dataclass(frozen=True)
class Sample:
    """The period before an advice, and the advice.

    Attributes:
        gpus, busy: GPUs that were there, and that were busy on average.
        arrived, good, bad: requests that arrived, that were answered in time, and that were not.
        advice: the advised number of GPUs.
    """

    at_s: float
    gpus: int
    busy: float
    arrived: int
    good: int
    bad: int
    advice: int


class Advice:
    """The advised number of GPUs, by the bad rate and the idle time of a period (Symphony §3.5).

    Let the goodput stay at its peak p at any load above p (a "flat top"). At a load o > p the bad
    rate is r = (o − p)/o, and N·r/(1 − r) more GPUs would serve everything. At o < p the idle
    fraction is f = (p − o)/p, and N·f GPUs could be removed. Here `KEEP_IDLE` of the time stays
    idle, and `PERIODS_DOWN` periods in a row must have had too many GPUs. The least number of them
    that any of these periods could spare is removed.

    Worked example: 8 GPUs with 20 % bad requests have the load of 10. Of 8 GPUs that are idle for
    30 % of the time, 5.6 are busy on average. 7 of them leave 10 % idle.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._enough: list[int] = []  # GPUs that these periods needed

    def after(self, gpus: int, bad_rate: float, idle: float) -> int:
        """Return the advised number of GPUs, given the bad rate and the idle fraction of these."""
        enough = math.ceil(gpus * (1 - idle) / (1 - KEEP_IDLE) - 1e-9)
        if bad_rate <= BAD_ABOVE and idle > IDLE_ABOVE and enough < gpus:
            self._enough.append(enough)
            if len(self._enough) == PERIODS_DOWN:
                gpus = max(self._enough)
                self._enough.clear()
        else:
            self._enough.clear()
            if bad_rate > BAD_ABOVE:
                more = gpus * bad_rate / (1 - bad_rate) if bad_rate < 1 else self._most
                gpus += math.ceil(more - 1e-9)
        return min(max(gpus, 1), self._most)


class Autoscaled:
    """A policy that sees only the first workers of the cluster, as many as advised.

    A worker that is removed completes its batch, but the policy is not told.

    Args:
        policy: a new policy.
        most: largest number of workers.
        workers: initial number of workers.
        every_s: time between two advices; longer than any batch.
        until_s: time of the last advice.
        follow: whether the number of workers follows the advice.
    """

    serves_late: ClassVar[bool] = False

    def __init__(
        self,
        policy: Policy,
        most: int,
        workers: int,
        *,
        every_s: float,
        until_s: float,
        follow: bool,
    ) -> None:
        self.samples: list[Sample] = []
        self._policy = policy
        self._advice = Advice(most)
        self._size = workers
        self._every_s = every_s
        self._until_s = until_s
        self._follow = follow
        self._at = self._every_s  # time of the next advice
        self._cluster = Cluster.of([], [])
        self._running: dict[int, tuple[float, float]] = {}  # by batch: predicted (start, finish)
        self._busy_s = 0.0
        self._arrived = self._good = self._bad = 0

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._arrived += len(requests)
        self._policy.requests_arrived(now, requests)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self._policy.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        del self._running[outcome.batch_id]
        self._busy_s += outcome.finished_at - max(outcome.started_at, self._at - self._every_s)
        late = sum(r.deadline < outcome.finished_at - TOLERANCE_S for r in outcome.requests)
        self._bad += late
        self._good += len(outcome.requests) - late
        self._policy.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._cluster = cluster
        self._show(now)

    def decide(self, now: float) -> Decision:
        if now >= self._at:
            self._advise(now)
        decision = self._policy.decide(now)
        for action in decision.actions:
            if isinstance(action, Dispatch):
                self._running[action.batch_id] = (action.start_at, action.finish_at)
            elif isinstance(action, Drop):
                self._bad += len(action.requests)
        return Decision(decision.actions, min(decision.wake_at, self._at))

    def _advise(self, now: float) -> None:
        since, every = self._at - self._every_s, self._every_s
        running = sum(min(f, self._at) - max(s, since) for s, f in self._running.values())
        busy = (self._busy_s + running) / every
        answered = self._good + self._bad
        # Workers that were removed may still be busy, so more may be busy than there are.
        idle = max(0.0, 1 - busy / self._size)
        advised = self._advice.after(self._size, self._bad / answered if answered else 0.0, idle)
        self.samples.append(
            Sample(self._at, self._size, busy, self._arrived, self._good, self._bad, advised)
        )
        self._busy_s, self._arrived, self._good, self._bad = 0.0, 0, 0, 0
        self._at = self._at + every if self._at + every <= self._until_s else math.inf
        if self._follow and advised != self._size:
            self._size = advised
            self._show(now)

    def _show(self, now: float) -> None:
        workers = dict(list(self._cluster.workers.items())[: self._size])
        shown = Cluster(self._cluster.models, workers, self._cluster.delay)
        self._policy.cluster_changed(now, shown)


def least_gpus(models: Sequence[ZooModel], rates: dict[str, list[float]]) -> np.ndarray:
    """Return the busy GPUs in each period if every batch is the largest with ℓ(b) ≤ SLO."""
    total = np.zeros(len(next(iter(rates.values()))))
    for m in models:
        seconds, batch = largest(m)
        total += np.array(rates[m.name]) * seconds / batch
    return total


def changing_rates(
    models: Sequence[str],
    periods: int,
    mean_rate: float,
    rng: np.random.Generator,
    swing: float = 0.8,
) -> dict[str, list[float]]:
    """Return rates per period that rise and fall slowly, by model.

    The logarithm of a model's rate is a sum of waves of 1, 2 and 4 cycles with random phases and
    falling amplitudes. It replaces the unpublished video workload of Symphony §5.7.

    Args:
        mean_rate: of all models together, requests per second, over all periods.
        swing: amplitude of the slowest wave; 0 for constant rates.
    """
    cycles = np.array([1, 2, 4])
    phase = rng.random((len(models), 1, 3))
    at = (np.arange(periods) / periods)[None, :, None]
    waves = np.sin(2 * np.pi * (cycles * at + phase)) / cycles
    weights = np.exp(swing * waves.sum(axis=2)) * rng.exponential(size=(len(models), 1))
    rates = mean_rate * weights / weights.sum(axis=0).mean()
    return {m: row.tolist() for m, row in zip(models, rates, strict=True)}


def run(quick: bool, seed: int) -> list[Row]:
    gpus, periods = (QUICK_GPUS, 8) if quick else (GPUS, 30)
    zoo = list(load("symphony_1080ti").values())
    models = [zoo[i] for i in np.linspace(0, len(zoo) - 1, MODELS).round().astype(int)]
    names = [m.name for m in models]
    rates = changing_rates(names, periods, 1.0, np.random.default_rng(seed))
    factor = gpus / least_gpus(models, rates).max()
    rates = {m: [factor * r for r in of] for m, of in rates.items()}
    least = least_gpus(models, rates)
    workload = Workload(arrivals={m: Trace(rates=r, interval_s=PERIOD_S) for m, r in rates.items()})
    most = gpus + gpus // 2

    rows: list[Row] = []
    summary: list[Row] = []
    for mode, follow in (("fixed", False), ("followed", True)):
        for name, (policy, kwargs) in POLICIES.items():
            host = Autoscaled(
                make_policy(policy, kwargs),
                most,
                gpus,
                every_s=ADVICE_S,
                until_s=periods * PERIOD_S,
                follow=follow,
            )
            cluster = Cluster.uniform([m.model() for m in models], most)
            report = simulate(host, cluster, workload, seed=seed)
            samples = host.samples
            if name == next(iter(POLICIES)):
                rows += _over_time(f"{name}, advice {mode}", samples, least)
            calm = [s for s in samples if least[math.ceil(s.at_s / PERIOD_S) - 1] < CALM * gpus]
            used = float(np.mean([s.gpus for s in samples]))
            label = f"{MODELS} models, {gpus} GPUs, advice {mode} · {name}"
            summary += [
                Row(label, "bad", "%", 100 * report.bad_rate()),
                Row(label, "bad in the calm", "%", _bad_percent(calm)),
                Row(label, "GPUs", "mean", used),
                Row(label, "busy GPUs", "mean", float(np.mean([s.busy for s in samples]))),
                Row(label, "over least", "×", used / float(least.mean())),
            ]
    return rows + summary


def _bad_percent(samples: Sequence[Sample]) -> float:
    bad, good = sum(s.bad for s in samples), sum(s.good for s in samples)
    return 100 * bad / (bad + good) if bad + good else 0.0


def _over_time(title: str, samples: Sequence[Sample], least: np.ndarray) -> list[Row]:
    """Return the rows over time, with one case per period."""
    rows = []
    per = round(PERIOD_S / ADVICE_S)
    for i, fewest in enumerate(least):
        of = samples[i * per : (i + 1) * per]
        label = f"{title} · {of[-1].at_s:g} s"
        rows += [
            Row(label, "offered", "req/s", sum(s.arrived for s in of) / PERIOD_S),
            Row(label, "in time", "req/s", sum(s.good for s in of) / PERIOD_S),
            Row(label, "bad", "%", _bad_percent(of)),
            Row(label, "GPUs", "", float(np.mean([s.gpus for s in of]))),
            Row(label, "busy", "GPUs", float(np.mean([s.busy for s in of]))),
            Row(label, "advice", "GPUs", max((s.advice - s.gpus for s in of), key=abs)),
            Row(label, "least", "GPUs", float(fewest)),
        ]
    return rows


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot requests, GPUs, advice and bad rate over time, as the paper does; a PNG per mode."""
    from matplotlib.figure import Figure

    titles: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        title, _, at = row.case.partition(" · ")
        if at.endswith(" s") and row.ours is not None:
            lines = titles.setdefault(title, {})
            lines.setdefault(row.metric, []).append((float(at[:-2]), row.ours))
    paths = []
    for title, lines in titles.items():
        figure = Figure(figsize=(8, 8), layout="constrained")
        panels = {
            "requests per second": ("offered", "in time"),
            "GPUs": ("GPUs", "busy", "least"),
            "advice (GPUs)": ("advice",),
            "bad (%)": ("bad",),
        }
        for axes, (label, metrics) in zip(
            figure.subplots(len(panels), sharex=True), panels.items(), strict=True
        ):
            for metric in metrics:
                axes.plot(*zip(*lines[metric], strict=True), label=metric)
            axes.set_ylabel(label)
            if len(metrics) > 1:
                axes.set_ylim(bottom=0)
                axes.legend(fontsize="small")
        axes.set_xlabel("time (s)")
        figure.suptitle(title, fontsize="medium")
        paths.append(saved(figure, directory, title))
    return paths
