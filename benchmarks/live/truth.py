"""Live against simulated: eight applications, each live, simulated beforehand, and replayed.

The applications are: one model; three models; variants; a pipeline; two groups; unlike workers;
preemption; overload with refusals. Networks sleep α·b + β seconds for a batch of b, as the host of
an accelerator does while it computes. Each application is deployed with a decision log, and warms
up under half of its load.

The simulator then predicts the figures, before the requests that count are sent. It gets the same
arrivals, and workers that take as long as the networks sleep. Its policy uses the profiles that the
scheduler has learned by then, and the dispatch delay that it has measured. Then the frontend itself
makes the requests. Latencies count in the frontend, from when a request is due until its answer.

*Replayed*: the same policy in the simulator on the log's requests, with the delays and execution
times of this run (`what_if`). It is missing for the pipeline, because logs have its tasks one by
one. *Decided otherwise*: number of logs whose decisions the policy does not make again when it gets
the log's events.

*Busy workers*: mean number of workers that run a batch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.grid import Answered, driven
from ray_slo.core import Cluster, DispatchDelay, LatencyProfile, Model, Variant, Worker
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.brains.brain import Brain
from ray_slo.policies.registry import live_arguments, policy_for
from ray_slo.simulation import Times, Workload, simulate
from ray_slo.simulation.application import simulate_application
from ray_slo.simulation.arrivals import Poisson
from ray_slo.simulation.report import Report

NAME = "truth"
SOURCE = "ray-slo"
ASKED = [
    ("*", "goodput, live off simulated", "≤", 3),
    (
        "*",
        "p99, live off simulated",
        "≤",
        10,
        "only with preemption; a replay with the run's own times and delays is within 3 %",
    ),
    ("*", "decided otherwise", "≤", 0),
]
MAX_BATCH = 32
MARGIN_S = 0.005  # `response_margin_ms`, by default
_PAUSE_S = 0.05  # shorter than the pause between the warm-up and the requests that count
FACTORS = 2  # requests of each later task that one request of a pipeline's first task makes


@dataclass(frozen=True)
class Net:
    """A variant: a batch of b takes alpha_s · b + beta_s."""

    alpha_s: float
    beta_s: float
    accuracy: float = 100.0

    def profile(self, slowness: float = 1.0) -> LatencyProfile:
        return LatencyProfile.linear(slowness * self.alpha_s, slowness * self.beta_s, MAX_BATCH)


@dataclass(frozen=True)
class Application:
    """An application and its load.

    Attributes:
        slos_s: SLO by model; a pipeline has only one.
        nets: networks by model and variant; those of a pipeline by task, the root first.
        rates: requests per second by model; those of a pipeline under its name.
        workers: (number, factor on batch times) by kind.
        policy, kwargs: as in a config.
        groups: (models, kinds of workers) of each group, if there are groups.
        pipeline: name of the pipeline, if there is one.
        steps: number of checkpoints in a batch, at which it can be preempted.
        bursts: number of requests that arrive at once, by model; default 1.
    """

    slos_s: Mapping[str, float]
    nets: Mapping[str, Mapping[str, Net]]
    rates: Mapping[str, float]
    workers: Mapping[str, tuple[int, float]]
    policy: str = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, tuple[Sequence[str], Sequence[str]]] = field(default_factory=dict)
    pipeline: str | None = None
    steps: int = 1
    bursts: Mapping[str, int] = field(default_factory=dict)

    def arrivals(self, seconds: float, seed: int, share: float = 1.0) -> dict[str, list[float]]:
        rngs = np.random.default_rng(seed).spawn(len(self.rates))
        found = {}
        for (name, rate), rng in zip(self.rates.items(), rngs, strict=True):
            size = self.bursts.get(name, 1)
            times = Poisson(rate=share * rate / size).times(seconds, rng)
            found[name] = np.repeat(times, size).tolist()
        return found

    # -- live ----------------------------------------------------------------------------------

    def config(self, folder: Path) -> dict[str, Any]:
        """Return the arguments of `build_app`."""
        kinds = {
            kind: {
                "num_replicas": count,
                "ray_actor_options": {
                    "num_cpus": 0.25,
                    "runtime_env": {"env_vars": {"SLEEPER_SLOWNESS": str(slowness)}},
                },
            }
            for kind, (count, slowness) in self.workers.items()
        }
        served = {name: self._served(name, variants) for name, variants in self.nets.items()}
        config: dict[str, Any] = {
            "policy": {"name": self.policy, "kwargs": dict(self.kwargs)},
            "profile_seconds": 2.0,
            "decision_log": {"dir": str(folder), "flush_s": 0.5},
        }
        if self.pipeline is not None:
            root, *others = served
            tasks = {root: served[root]} | {
                task: served[task] | {"parent": root} for task in others
            }
            (slo_s,) = self.slos_s.values()
            pipeline = {"latency_slo_ms": 1e3 * slo_s, "tasks": tasks}
            return config | {"pipelines": {self.pipeline: pipeline}, "workers": kinds}
        for name, slo_s in self.slos_s.items():
            served[name]["latency_slo_ms"] = 1e3 * slo_s
        if not self.groups:
            return config | {"models": served, "workers": kinds}
        groups = {
            group: {"models": list(models), "workers": {kind: kinds[kind] for kind in of_group}}
            for group, (models, of_group) in self.groups.items()
        }
        return config | {"models": served, "groups": groups}

    def _served(self, name: str, variants: Mapping[str, Net]) -> dict[str, Any]:
        made = dict.fromkeys(list(self.nets)[1:], FACTORS) if self._is_root(name) else {}
        return {
            "callable": "benchmarks.live.sleeper:Several",
            "kwargs": {"makes": made},
            "max_batch_size": MAX_BATCH,
            "variants": {
                variant: {
                    "load": "benchmarks.live.sleeper:slowed",
                    "args": (net.alpha_s, net.beta_s, self.steps),
                    "accuracy": net.accuracy,
                    **({"factors": made} if made else {}),
                }
                for variant, net in variants.items()
            },
        }

    def _is_root(self, name: str) -> bool:
        return self.pipeline is not None and name == next(iter(self.nets))

    # -- simulated -----------------------------------------------------------------------------

    def simulated(
        self,
        arrivals: Mapping[str, list[float]],
        duration_s: float,
        told: Mapping[str, LatencyProfile],
        delay_s: float,
        preempt_delay_s: float,
    ) -> Figures:
        """Return the figures that the simulator predicts.

        Args:
            told: the policy's profiles by "variant@kind"; the networks' own stand in for others.
        """
        workloads = {name: Workload(arrivals=Times(times_s=at)) for name, at in arrivals.items()}
        if self.pipeline is not None or self.groups:
            report = simulate_application(
                self._problem(told),
                workloads,
                policy=self.policy,
                policy_kwargs={**self._live_arguments(), **self.kwargs},
                planner=None if self.pipeline is None else self._brain,
                duration_s=duration_s,
                items="fixed",
                # This simulator has no dispatch delay, so the batches take that much longer.
                truth=self._problem({}, delay_s).models,
                preempt_delay_s=preempt_delay_s,
            )
            requests = report.requests
            answered = requests["outcome"].isin(("ok", "late"))
            latencies = (requests["end_s"] - requests["arrival_s"])[answered]
            return Figures(
                report.count("ok") / duration_s,
                report.count() / duration_s,
                report.accuracy(),
                latencies.to_numpy(),
                report.busy(0.0, duration_s),
            )
        flat = simulate(
            policy_for(self.policy, {**self._live_arguments(), **self.kwargs}),
            self._cluster(told, delay_s, preempt_delay_s),
            Workload(arrivals={n: Times(times_s=at) for n, at in arrivals.items()}),
            truth=self._cluster({}, delay_s, preempt_delay_s),
            duration_s=duration_s,
            preempt_delay_s=preempt_delay_s,
        )
        return Figures.of([flat], duration_s)

    def _brain(self, problem: auto.Problem) -> Brain:
        """Return the brain that plans the application live."""
        from ray_slo.serve.config.resolve import parse_spec
        from ray_slo.serve.planner.plugin import planner_class

        spec = parse_spec(self.config(Path()))
        assert spec.planner is not None
        return planner_class(spec.planner.name).brain(spec)

    def _live_arguments(self) -> dict[str, Any]:
        return live_arguments(self.policy, 1e3 * min(self.slos_s.values()))

    def _profiles(
        self, variant: str, net: Net, told: Mapping[str, LatencyProfile], more_s: float = 0.0
    ) -> dict[str, LatencyProfile]:
        later = Net(net.alpha_s, net.beta_s + more_s)
        return {
            kind: told.get(f"{variant}@{kind}") or later.profile(slowness)
            for kind, (_, slowness) in self.workers.items()
        }

    def _cluster(
        self, told: Mapping[str, LatencyProfile], delay_s: float, preempt_delay_s: float
    ) -> Cluster:
        models = [
            Model(
                name,
                self.slos_s[name] - MARGIN_S,
                tuple(
                    Variant(v, self._profiles(v, net, told), net.accuracy)
                    for v, net in variants.items()
                ),
            )
            for name, variants in self.nets.items()
        ]
        loaded = frozenset(v for variants in self.nets.values() for v in variants)
        workers = [
            Worker(f"{kind}-{i}", kind, loaded)
            for kind, (count, _) in self.workers.items()
            for i in range(count)
        ]
        return Cluster.of(models, workers, DispatchDelay(delay_s), preempt_delay_s)

    def _problem(self, told: Mapping[str, LatencyProfile], more_s: float = 0.0) -> auto.Problem:
        models = tuple(
            auto.Model(
                name,
                tuple(
                    auto.Variant(v, net.accuracy, self._profiles(v, net, told, more_s))
                    for v, net in variants.items()
                ),
            )
            for name, variants in self.nets.items()
        )
        slos = {name: {"": slo_s - MARGIN_S} for name, slo_s in self.slos_s.items()}
        trees = tuple(Tree.of_model(name, slo_s) for name, slo_s in slos.items())
        if self.pipeline is not None:
            root, *others = self.nets
            made = {v: dict.fromkeys(others, float(FACTORS)) for v in self.nets[root]}
            tasks = [TreeTask(root, root, factors=made)]
            tasks += [TreeTask(task, task, root) for task in others]
            trees = (Tree(self.pipeline, tuple(tasks), slos[self.pipeline]),)
        group_of = {kind: g for g, (_, kinds) in self.groups.items() for kind in kinds}
        kinds = tuple(
            auto.Kind(kind, count, count, group=group_of.get(kind))
            for kind, (count, _) in self.workers.items()
        )
        of_model = {model: g for g, (served, _) in self.groups.items() for model in served}
        return auto.Problem(models, trees, {}, kinds, group_of=of_model)


def _several() -> dict[str, dict[str, Net]]:
    return {
        "small": {"small-net": Net(0.008, 0.08)},
        "middle": {"middle-net": Net(0.015, 0.12)},
        "large": {"large-net": Net(0.03, 0.2)},
    }


APPLICATIONS: dict[str, Application] = {
    "one model": Application(
        {"one": 0.9}, {"one": {"net": Net(0.024, 0.2)}}, {"one": 30.0}, {"cpu": (2, 1.0)}
    ),
    "three models": Application(
        {"small": 0.5, "middle": 0.8, "large": 1.2},
        _several(),
        {"small": 15.0, "middle": 10.0, "large": 6.0},
        {"cpu": (3, 1.0)},
    ),
    "variants": Application(
        {"one": 1.0},
        {"one": {"best": Net(0.04, 0.2, 90.0), "fair": Net(0.015, 0.1, 80.0)}},
        {"one": 40.0},
        {"cpu": (2, 1.0)},
    ),
    "pipeline": Application(
        {"photo": 1.5},
        {"find": {"finder": Net(0.02, 0.1)}, "name": {"namer": Net(0.01, 0.08)}},
        {"photo": 12.0},
        {"cpu": (3, 1.0)},
        pipeline="photo",
    ),
    "groups": Application(
        {"small": 0.5, "large": 1.2},
        {name: _several()[name] for name in ("small", "large")},
        {"small": 18.0, "large": 8.0},
        {"left": (1, 1.0), "right": (2, 1.0)},
        groups={"a": (("small",), ("left",)), "b": (("large",), ("right",))},
    ),
    "unlike workers": Application(
        {"one": 1.2},
        {"one": {"net": Net(0.02, 0.15)}},
        {"one": 40.0},
        {"fast": (1, 1.0), "slow": (2, 2.0)},
    ),
    "preemption": Application(
        {"quick": 0.9, "slow": 0.9},
        {"quick": {"quick-net": Net(0.0022, 0.0374)}, "slow": {"slow-net": Net(0.0437, 0.6)}},
        {"quick": 80.0, "slow": 1.0},
        {"cpu": (1, 1.0)},
        policy="flex",
        steps=50,
        bursts={"quick": 80},
    ),
    "overload": Application(
        {"one": 0.9}, {"one": {"net": Net(0.024, 0.2)}}, {"one": 90.0}, {"cpu": (2, 1.0)}
    ),
}


@dataclass(frozen=True)
class Figures:
    """Figures of one run of an application.

    Attributes:
        goodput, offered: answers in time, and requests, per second.
        accuracy: mean over the answers in time, percent.
        latencies_s: latencies of all answers.
        busy: mean number of workers that run a batch.
    """

    goodput: float
    offered: float
    accuracy: float | None
    latencies_s: np.ndarray[Any, Any]
    busy: float

    @classmethod
    def of(cls, reports: Sequence[Report], seconds: float) -> Figures:
        """Combine the reports of schedulers that ran together while requests arrived."""
        good = [report.count("good") for report in reports]
        known = [report.accuracy or 0.0 for report in reports]
        return cls(
            sum(good) / seconds,
            sum(report.count() for report in reports) / seconds,
            sum(n * a for n, a in zip(good, known, strict=True)) / max(sum(good), 1),
            np.concatenate([report.latencies_s() for report in reports]),
            sum(busy_s(report) for report in reports) / seconds,
        )

    @classmethod
    def seen(cls, answers: Iterable[Answered], duration_s: float, busy: float) -> Figures:
        answers = list(answers)
        good = [a for a in answers if a.in_time]
        accuracies = [a.accuracy for a in good if a.accuracy is not None]
        return cls(
            len(good) / duration_s,
            len(answers) / duration_s,
            float(np.mean(accuracies)) if accuracies else None,
            np.array([a.latency_s for a in answers if a.is_answered]),
            busy,
        )

    def ms(self, percentile: float) -> float:
        if not len(self.latencies_s):
            return float("nan")
        return 1e3 * float(np.percentile(self.latencies_s, percentile))

    def rows(self, case: str) -> list[Row]:
        return [
            Row(case, "goodput", "req/s", self.goodput),
            Row(case, "bad", "%", 100 * (1 - self.goodput / self.offered)),
            Row(case, "accuracy", "%", self.accuracy),
            Row(case, "p50", "ms", self.ms(50)),
            Row(case, "p99", "ms", self.ms(99)),
            Row(case, "busy workers", "", self.busy),
        ]


def run(quick: bool, seed: int) -> list[Row]:
    from ray_slo.demo.systems import local_serve

    seconds, warmup_s = (6.0, 3.0) if quick else (60.0, 15.0)
    rows: list[Row] = []
    with local_serve(), tempfile.TemporaryDirectory() as folder:
        for name, application in APPLICATIONS.items():
            logs = Path(folder) / name.replace(" ", "-")
            rows += tried(name, application, seconds, warmup_s, seed, logs)
    return rows


def tried(
    name: str, application: Application, seconds: float, warmup_s: float, seed: int, logs: Path
) -> list[Row]:
    """Run one application live and simulated, and return its rows."""
    from ray import serve

    from ray_slo.demo.systems import APP, running

    arrivals = application.arrivals(seconds, seed)
    with running(driven(application.config(logs))):
        handle = serve.get_app_handle(APP)
        handle.drive.remote(application.arrivals(warmup_s, seed + 1, share=0.5)).result()
        status = handle.slo_status.remote().result()
        said = application.simulated(
            arrivals,
            seconds,
            known(status),
            1e-3 * float(status.get("dispatch_delay_ms") or 0.0),
            1e-3 * float(status.get("preempt_delay_ms") or 0.0),
        )
        answers = handle.drive.remote(arrivals).result()
        time.sleep(1.5)  # until the log's last rows are written
    last_s = max(at for times in arrivals.values() for at in times)
    replayed, otherwise, decisions, busy = recorded_of(logs, last_s, seconds, application)
    live = Figures.seen(answers, seconds, busy)
    return compared(name, live, said, replayed, decisions, otherwise)


def known(status: Mapping[str, Any]) -> dict[str, LatencyProfile]:
    """Return the profiles that the schedulers use, by "variant@kind"."""
    return {
        name: LatencyProfile.from_json(profile)
        for part in (status, *status.get("groups", {}).values())
        for name, profile in part.get("profiles", {}).items()
    }


def recorded_of(
    logs: Path, last_s: float, seconds: float, application: Application
) -> tuple[Figures | None, int, int, float]:
    """Evaluate the logs of all schedulers.

    Returns:
        Figures of the same policy simulated on the logs (None for a pipeline). Numbers of logs
        decided otherwise and of decisions. Mean number of busy workers.

    Args:
        last_s: time from the first to the last request that counts, of all schedulers.
        seconds: duration of the arrivals.
    """
    from ray_slo.record.decode import read
    from ray_slo.simulation.replay import policy_arguments, recorded, replay, tape, what_if

    reports: list[Report] = []
    otherwise = decisions = 0
    busy = 0.0
    for life in read(logs):
        try:
            found = tape(life)
        except ValueError:  # this scheduler got no requests
            continue
        same = replay(life)
        decisions, otherwise = decisions + same.rounds, otherwise + (not same.identical)
        # The simulator ran before the requests that count, so there were none at that time.
        since_s = max(duration_of(found) - last_s - _PAUSE_S, 0.0)
        busy += busy_s(recorded(found, since_s)) / seconds
        if application.pipeline is None:
            reports.append(what_if(found, *policy_arguments(life), warmup_s=since_s))
    return (Figures.of(reports, seconds) if reports else None), otherwise, decisions, busy


def busy_s(report: Report) -> float:
    """Return the seconds that all workers spent on batches in the measured window."""
    return sum(report.utilisation().values()) * report.window_s


def duration_of(found: Any) -> float:
    """Return the seconds from the first request of a log to its last."""
    return max(float(r.arrival) for r in found.requests.values()) - float(found.zero)


def compared(
    name: str,
    live: Figures,
    said: Figures,
    replayed: Figures | None,
    decisions: int,
    otherwise: int,
) -> list[Row]:
    """Return the figures side by side, and their differences."""
    rows = live.rows(f"{name} · live") + said.rows(f"{name} · simulated")
    if replayed is not None:
        rows += replayed.rows(f"{name} · replayed")
    goodput = 100 * abs(live.goodput - said.goodput) / live.offered
    p99 = 100 * abs(live.ms(99) - said.ms(99)) / said.ms(99)
    case = f"live against simulated · {name}"
    return [
        *rows,
        Row(case, "goodput, live off simulated", "% of offered", goodput),
        Row(case, "p99, live off simulated", "%", p99),
        Row(case, "decisions", "", decisions),
        Row(case, "decided otherwise", "", otherwise),
    ]
