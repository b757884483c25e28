"""What parts of the simulator give is what they gave when this was recorded."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.core.rehearsal import Rehearsal, Setting, Traffic
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning.loki import Plan
from ray_slo.planning.loki.plans import Assignment
from ray_slo.simulation import Gamma, LogNormal, Poisson, Workload, simulate, simulate_pipeline
from ray_slo.simulation import report_plots as plots
from ray_slo.simulation.arrivals import (
    Burst,
    Constant,
    Mmpp,
    Population,
    Times,
    Trace,
    at_rate,
    scaled,
)
from ray_slo.simulation.rehearsal import rehearse
from ray_slo.simulation.sizing import Figures, PlanSpec, search
from ray_slo.simulation.sizing.search import Search, size
from ray_slo.simulation.workloads import Gaussian, Measured, SloShare, Zipf, changing_rates
from tests.kept import condensed, kept
from tests.planning.examples import loki as loki_examples

FILE = "simulation/parts"
LINE = LatencyProfile.linear(0.002, 0.01, 16)
BURST = Burst(peak=2.5, burst_s=0.25, calm_s=0.75)
PROCESSES = {
    "constant": Constant(rate=80, start_s=0.125),
    "poisson": Poisson(rate=100),
    "gamma": Gamma(rate=100, shape=0.2),
    "mmpp": Mmpp(rate=100, burst=BURST),
    "steep": Mmpp(rate=100, burst=Burst(peak=4, burst_s=0.25, calm_s=0.75)),
    "trace": Trace(rates=[50, 0, 200, 100], interval_s=0.5, shape=0.5),
    "bursty trace": Trace(rates=[50, 0, 200, 100], interval_s=0.5, burst=BURST),
    "times": Times(times_s=[0.5, 0.125, 2.0, 1.0]),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_arrivals(name):
    process = PROCESSES[name]
    found = [process.rate]
    for duration_s in (0.0, 1.0, 2.0, 3.5):
        if name.endswith("trace"):
            duration_s = min(duration_s, process.length_s)
        found.append(process.times(duration_s, np.random.default_rng(3)))
    if name != "times":
        found += [at_rate(process, 30.0).model_dump(), scaled(process, 50.0).rate]
    kept(FILE, f"arrivals {name}", condensed(found))


@pytest.mark.parametrize("burst", [None, BURST], ids=["stable", "bursty"])
def test_a_population(burst):
    drawn = Population(rate=60, streams=40, interval_s=1.5, burst=burst, population_seed=4)
    found = [drawn.stream_rates(), drawn.interval_rates(2), drawn.model_of(3)]
    found += list(drawn.draw(4.0, np.random.default_rng(5)))
    found += list(scaled(drawn, 30.0).draw(1.0, np.random.default_rng(5)))
    kept(FILE, f"population {burst is not None}", condensed(found))


SIZES = [
    LogNormal(median=3, sigma=0.8, max_size=40),
    Gaussian(mean=12, std=5, max_size=20),
    Measured(values=[1, 3, 3, 9, 27]),
]


def models(*slos_s, accuracies=(None,)):
    return [
        Model(
            f"m{i}",
            slo_s,
            tuple(
                Variant(
                    f"m{i}-{k}",
                    {"default": LatencyProfile([(1 + i / 4) * t / (1 + k) for t in LINE.table])},
                    accuracy,
                )
                for k, accuracy in enumerate(accuracies)
            ),
        )
        for i, slo_s in enumerate(slos_s)
    ]


@pytest.mark.parametrize("sizes", [None, *SIZES], ids=lambda s: "one" if s is None else s.kind)
def test_workloads(sizes):
    cluster = Cluster.uniform(models(0.1, 0.2), 2)
    found = []
    if sizes is not None:
        found += [sizes.quantiles(np.linspace(0.01, 0.99, 33))]
        found += [sizes.draw(50, np.random.default_rng(1))]
    workloads = [
        Workload(arrivals=Poisson(rate=90), sizes=sizes),
        Workload(arrivals=Gamma(rate=90, shape=0.5), popularity=Zipf(zipf=0.9), sizes=sizes),
        Workload(
            arrivals=Trace(rates=[50, 150]),
            popularity={"m0": 3, "m1": 1},
            slo_mix=[SloShare(share=0.25, slo_ms=50), SloShare(share=0.75, slo_ms=150)],
            sizes=sizes,
        ),
    ]
    for workload in workloads:
        found += [workload.rate, workload.length_s, workload.shares(["m0", "m1"])]
        found += [workload.generate(cluster, 2.0, np.random.default_rng(2)).__dict__]
        found += [workload.at_rate(20.0).rate]
    found.append(changing_rates(["m0", "m1"], 12, 100.0, np.random.default_rng(8)))
    kept(FILE, f"workloads {sizes and sizes.kind}", condensed(found))


def report_of(accuracies=(None,), **kwargs):
    given = {"duration_s": 2.0, "warmup_s": 0.25, "seed": 6, "latency_noise": 0.1}
    cluster = Cluster.uniform(models(0.06, 0.12, accuracies=accuracies), 2)
    return simulate(
        "eager", cluster, Workload(arrivals=Gamma(rate=260, shape=0.5)), **{**given, **kwargs}
    )


def drawn(axes):
    """What is on a plot, in numbers and words."""
    return [
        [axes.get_xlabel(), axes.get_ylabel(), axes.get_xlim(), axes.get_ylim()],
        [[line.get_xydata(), line.get_label(), line.get_color()] for line in axes.lines],
        [
            [p.get_xy(), p.get_width(), p.get_height()]
            for p in axes.patches
            if hasattr(p, "get_height")
        ],
        [[text.get_text(), text.get_position()] for text in axes.texts],
        [[text.get_text() for text in axes.get_yticklabels()]],
        [] if axes.get_legend() is None else [t.get_text() for t in axes.get_legend().get_texts()],
    ]


def test_reports_and_their_plots():
    report = report_of((90.0, 70.0))
    figures = [report.window_s, report.offered, report.goodput, report.worst_bad_rate]
    figures += [report.accuracy, report.idle_fraction, report.median_batch_per_request]
    figures += [report.batch_sizes, report.utilisation(), report.latency_s(90, "m1")]
    figures += [report.queueing_s("m0"), report.latencies_s(), list(report.arrivals())]
    frames = [f.select_dtypes("number").to_numpy() for f in (report.requests, report.batches)]
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as said:
        console.print(report.table())
    found = {
        "figures": figures,
        "frames": frames,
        "table": said.get().split(),
        "repr": repr(report),
    }
    for draw in (
        plots.draw_latency,
        plots.draw_queueing,
        plots.draw_batch_sizes,
        plots.draw_goodput,
    ):
        axes = Figure().subplots()
        draw(report, axes)
        found[draw.__name__] = drawn(axes)
    axes = Figure().subplots()
    report_of(duration_s=0.5).draw_gantt(axes, 1e-3, "ms")
    found["gantt"] = drawn(axes)
    kept(FILE, "report", {key: condensed(one) for key, one in found.items()})


def traffic_of(rate, duration_s, sizes=None, before=0):
    cluster = Cluster.uniform(models(0.08, 0.16), 2)
    workload = Workload(arrivals=Gamma(rate=rate, shape=0.4), sizes=sizes)
    r = workload.generate(cluster, duration_s, np.random.default_rng(7))
    roots = tuple((m, m) for m in r.models)
    return Traffic(roots, r.model, r.arrival + 32, r.deadline + 32, r.size, before)


SETTINGS = [Setting("deferred", {}), Setting("eager", {}), Setting("flex", {"preemption": False})]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"calm": True, "rate": 60},
        {"noise": 0.2, "pace": {("m0-0", "default"): 1.25}, "seed": 5},
        {"rate": 700},
        {
            "rate": 350,
            "accuracies": (90.0, 70.0),
            "settings": [Setting("price", {}), *SETTINGS[:2]],
        },
        {"before": 60},
        {"sizes": SIZES[0], "rate": 50},
        {"duration_s": 0.4},
        {"tree": True, "factors": {("m0-0", "m1"): 1.5}},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_rehearsals(changes):
    rest = dict(changes)
    rate, accuracies = rest.pop("rate", 240), rest.pop("accuracies", (None,))
    sizes, before = rest.pop("sizes", None), rest.pop("before", 0)
    traffic = traffic_of(rate, rest.pop("duration_s", 3.0), sizes, before)
    cluster = Cluster.uniform(models(0.08, 0.16, accuracies=accuracies), 2)
    if rest.pop("tree", False):
        tasks = (TreeTask("m0", "m0", None, {"m0-0": {"m1": 2.0}}), TreeTask("m1", "m1", "m0"))
        rest["trees"] = [Tree("m0", tasks, {"": 0.3}).to_json()]
        only = np.zeros(len(traffic), dtype=np.int64)
        traffic = replace(traffic, roots=(("m0", "m0"),), root=only)
    asked = Rehearsal(3, cluster, traffic, rest.pop("settings", SETTINGS), **rest)
    found = rehearse(asked)
    assert not any(score.error for score in found.scores.values())
    kept(FILE, f"rehearsal {' '.join(changes)}", condensed(found))


def figures_of(bad, accuracy=None):
    return Figures(bad, 0.01 + bad, 0.5, accuracy, {"m": (bad, 0.02)})


@pytest.mark.parametrize("seed", range(6))
def test_searches_for_the_smallest(seed):
    rng, found = random.Random(seed), []
    question = PlanSpec.model_validate(PLAIN).build()
    for _ in range(40):
        need, most = rng.randint(1, 60), rng.randint(1, 50)
        asked = replace(question, seeds=(0, 1), accuracy_floor=rng.choice([0.0, 75.0]))
        unlucky = rng.randint(0, 2)

        def run(n, which, need=need, unlucky=unlucky):
            bad = max(need + unlucky * which - n, 0) / 100
            return figures_of(bad + 0.01, 80.0 if n % 7 else 70.0) if n > 1 else None

        one = Search(asked, run)
        smallest = one.smallest(rng.randint(0, 60), most)
        found += [smallest, one.probes]
        if smallest is not None:
            found.append(one.worst(smallest))
    kept(FILE, f"smallest {seed}", condensed(found))


PLAIN = {
    "cluster": {"models": {"m": {"latency_slo_ms": 40, "profile": {"alpha_ms": 1, "beta_ms": 5}}}},
    "workload": {"arrivals": {"kind": "poisson", "rate": 400}},
    "duration_s": 1,
}
TYPES = {
    "g4dn.xlarge": {"alpha_ms": 0.2, "beta_ms": 8, "max_batch_size": 100},
    "t3.xlarge": {"alpha_ms": 1.4, "beta_ms": 2, "max_batch_size": 100},
}


def pool(**changes):
    variants = {"large": {"accuracy": 90, "profiles": TYPES}}
    if "sizes" not in changes.get("workload", {}):
        small = {k: {**p, "beta_ms": p["beta_ms"] / 2} for k, p in TYPES.items()}
        variants["small"] = {"accuracy": 80, "profiles": small}
    document = {
        "cluster": {"models": {"m": {"latency_slo_ms": 40, "variants": variants}}},
        "workload": {"arrivals": {"kind": "poisson", "rate": 3000}},
        "pool": {"types": list(TYPES), "budget_per_hour": 2.0},
        "policies": ["deferred"],
        "duration_s": 1,
        **changes,
    }
    return PlanSpec.model_validate(document).build()


SIZED = {
    "arrivals": {"kind": "poisson", "rate": 900},
    "sizes": {"kind": "measured", "values": [4, 6, 8, 10, 12, 90]},
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"bad_rate": 0.05, "most": 12}, {"workload": SIZED, "policies": ["kairos"]}],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_pools_by_a_made_up_simulator(changes, monkeypatch):
    """So that only the search counts: a pool serves a fixed rate per worker of each type."""
    speed = {"g4dn.xlarge": 310.0, "t3.xlarge": 170.0}

    def predicted(question, policy, counts, seed):
        capacity = sum(speed[kind] * n for kind, n in counts.items()) * (1 - 0.01 * seed)
        return figures_of(max(1 - capacity / question.workload.rate, 0.0), 85.0)

    class Found:
        """A result of `goodput_search`."""

        def __init__(self, rate):
            self.rate = rate

    def goodput(make, cluster, workload, **kwargs):
        make()
        kinds = [worker.hardware for worker in cluster.workers.values()]
        return Found(sum(speed[kind] for kind in kinds) * 0.9)

    monkeypatch.setattr(search, "predicted", predicted)
    monkeypatch.setattr(search, "goodput_search", goodput)
    rest = dict(changes)
    most = rest.pop("most", 1000)
    answers = [answer.to_json() for answer in size(replace(pool(**rest), most=most))]
    kept(FILE, f"pools {' '.join(changes)}", answers)


@pytest.mark.parametrize("drop", ["per_task", "none"])
def test_pipelines(drop):
    problem = replace(loki_examples.tree(), workers=5, slo_s=0.25)
    made = tuple(
        Assignment(task, v, 2, n, load, 30.0, 0.03)
        for task, v, n, load in (
            ("detect", "d-small", 2, 40.0),
            ("classify", "c-middle", 2, 60.0),
            ("face", "f-small", 1, 20.0),
        )
    )
    plan = Plan("accuracy", made, (), 80.0, 40.0, 0.0, 1, 0.0, "so")
    report = simulate_pipeline(
        problem,
        Workload(arrivals=Trace(rates=[20, 60, 120], interval_s=1.0)),
        planner=lambda problem, last: plan,
        policy="pipeline",
        policy_kwargs={"drop": drop},
        initial_demand=20.0,
        latency_noise=0.1,
        seed=4,
    )
    figures = [
        report.violation_ratio(0.5),
        report.accuracy(0.5),
        report.workers_used(),
        report.busy(),
    ]
    figures += [report.violation_ratio(0.5, 2.0), report.busy(0.5, 2.0), report.count("ok")]
    found = {
        "figures": figures,
        "windows": report.windows(0.5).to_dict(orient="list"),
        "summary": {k: v for k, v in report.summary().items() if isinstance(v, float | int)},
        "plans": report.plans.select_dtypes("number").to_numpy(),
        "workers": report.workers.select_dtypes("number").to_numpy(),
        "requests": report.requests.select_dtypes("number").to_numpy(),
        "task requests": report.task_requests.select_dtypes("number").to_numpy(),
        "repr": repr(report),
    }
    assert math.isfinite(report.accuracy())
    kept(FILE, f"pipelines {drop}", {key: condensed(one) for key, one in found.items()})
