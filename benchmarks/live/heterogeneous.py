"""Live on Ray Serve: Kairos and FCFS with unlike query sizes and workers, and with new budgets.

Queries are lists of 1 to 1000 items to rank, as JSON over HTTP, with Poisson arrivals. Their sizes
are log-normal, as in `kairos/systems.py`. Both policies get the same stream: `kairos`, and *FCFS*.
FCFS is Ribbon's policy (§7 of the paper): base instances first, regardless of sizes and latencies.
*In time*: answered within the client's SLO. The server is told nine tenths of it.

The workers have EC2 types of Kairos' Table 4, **simulated** on one machine. They are CPU actors
that really score the items with Wide & Deep (with random weights, which cost the same). Then they
sleep until a base time plus a time per item has passed. Those times are the synthetic ones of
`zoos/kairos_ec2.csv`, multiplied by `STRETCH`. So the control path and the noise of this machine
are small in comparison. The SLO is multiplied, too. The loads are shares of the pool's fluid bound.

*Large* queries are those that the weak type cannot rank within the SLO, even when it is idle.
*Simulated* is the simulator's figure for the same policy, rate, size distribution and duration. It
uses the latencies that the workers measured and the measured dispatch delay; it is the mean of 20
runs. At most of these loads FCFS has more than it can sustain. So its figures depend on when the
large queries arrive. Also, a live frontend gives up a query one second after its deadline, so FCFS
has one less to serve.

Then the planner `kairos` decides how many workers of each type there are. While queries arrive, its
budget is raised and lowered again, by a changed config. *No answer*: refused, expired or failed.
*Settled*: time from the change of the budget until as many workers run as are planned.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from benchmarks.kairos import systems as kairos
from benchmarks.live.load import Calls, by_http, learned
from deployments.recommender import Answer, Query, Recommender
from deployments.recommender.app import BASE_VARIABLE, ITEM_VARIABLE, MAX_ITEMS
from deployments.recommender.data import ITEMS, USERS
from ray_slo.core import Cluster, DispatchDelay, LatencyProfile, Model, Variant, Worker
from ray_slo.simulation import simulate
from ray_slo.simulation.arrivals import Poisson
from ray_slo.simulation.workloads import Workload

SOURCE = "Kairos §8, live"
ASKED = [
    ("*, kairos", "large queries on the weak type", "≤", 0),
    ("planner kairos*", "no answer", "≤", 0),
]
MODEL = "recommender"
STRETCH = 16.0
CASE = kairos.Case("WND")
SERVER_SLO_S = STRETCH * CASE.slo_s
SERVER_SHARE = 0.9  # share of the client's SLO; the rest is the way from and to the client
SLO_S = SERVER_SLO_S / SERVER_SHARE
MARGIN_S = 0.005  # `response_margin_ms`
STRONG, WEAK = "g4dn.xlarge", "r5n.large"
POOL = {STRONG: 1, WEAK: 2}
POLICIES: dict[str, kairos.Policy] = {"kairos": kairos.KAIROS, "FCFS": kairos.RIBBON}
LOADS = (0.3, 0.5, 0.7)  # shares of the pool's fluid bound
WARMUP_S = 5.0
SIMULATIONS = 20
BUDGETS = (0.7, 1.6, 0.7)  # price per hour
BUDGET_RATE = 5.0  # queries per second; the smallest budget can serve them
INTERVAL_S = 4.0  # seconds between plans
PAUSE_S = 10.0  # seconds from settled workers to the next change
SETTLE_S = 90.0  # the program fails if workers settle later


class Ranking(Recommender):
    """The recommender; each answer also names the kind of worker that made it."""

    def __call__(self, queries: list[Query]) -> list[Answer]:
        hardware = os.environ["HARDWARE"]
        return [{**answer, "hardware": hardware} for answer in super().__call__(queries)]


@dataclass
class Measured:
    """The outcome of one policy under one load."""

    requests: pd.DataFrame  # after the warm-up; `answer` is the kind of worker that answered
    window_s: float
    told: dict[str, LatencyProfile]  # the policy's profiles at the end, by kind of worker
    delay_s: float

    @property
    def in_time(self) -> pd.Series[bool]:
        return self.requests["status"] == "ok"

    @property
    def large_on_weak(self) -> float:
        """Percent of the answered large queries (in time or late) that the weak type answered."""
        large = self.requests["size"] > weak_limit()
        answered = self.requests[large & self.requests["status"].isin(("ok", "late"))]
        return 100 * float((answered["answer"] == WEAK).mean()) if len(answered) else 0.0


def run(quick: bool, seed: int) -> list[Row]:
    from ray import serve

    from ray_slo.demo.systems import APP, local_serve, running

    warmup_s, window_s = (2.0, 4.0) if quick else (WARMUP_S, 40.0)
    loads = LOADS[1:2] if quick else LOADS
    bound = kairos.bound(CASE, POOL) / STRETCH
    payloads = queries(60 if quick else 400, seed)
    seen: dict[tuple[float, str], Measured] = {}
    with local_serve() as url:
        for name, policy in POLICIES.items():
            with running(application(policy, POOL, 1.0 if quick else 4.0)):
                for load in loads:
                    rate = load * bound
                    seen[load, name] = measure(url, payloads, rate, warmup_s, window_s, seed)
        budgets = BUDGETS[:2] if quick else BUDGETS
        with running(planned_application(budgets[0])):
            handle = serve.get_app_handle(APP)
            changes = asyncio.run(change_budgets(handle, payloads, budgets, seed))
    rows: list[Row] = []
    for load in loads:
        for name, policy in POLICIES.items():
            found, rate = seen[load, name], load * bound
            simulated = np.mean(
                [
                    predict(policy, POOL, found, rate, warmup_s, window_s, seed + i)
                    for i in range(2 if quick else SIMULATIONS)
                ]
            )
            case = (
                f"1 {STRONG} and 2 {WEAK}, simulated hardware, SLO {1e3 * SLO_S:.0f} ms · "
                f"{100 * load:.0f} % of the bound, {rate:.1f} queries/s, {name}"
            )
            rows += [
                Row(case, "came", "queries/s", len(found.requests) / found.window_s),
                Row(case, "goodput", "queries/s", float(found.in_time.sum()) / found.window_s),
                Row(case, "not in time", "%", 100 * float(1 - found.in_time.mean())),
                Row(case, "simulated not in time", "%", float(simulated)),
                Row(case, "large queries on the weak type", "%", found.large_on_weak),
            ]
    return rows + budget_rows(changes)


def queries(count: int, seed: int) -> Any:
    """Return JSON queries; their sizes are evenly spaced quantiles of the distribution."""
    from ray_slo.load.workload import Payloads

    rng = np.random.default_rng(seed)
    sizes = CASE.sizes.quantiles((np.arange(count) + 0.5) / count)
    return Payloads(
        [
            {"user": int(rng.integers(USERS)), "items": rng.integers(0, ITEMS, size).tolist()}
            for size in sizes.tolist()
        ]
    )


def weak_limit() -> int:
    """Return the size of the largest query that the weak type can rank within the server's SLO."""
    return CASE.profiles()[WEAK].max_batch_within(CASE.slo_s)


def application(
    policy: kairos.Policy, pool: Mapping[str, int], profile_seconds: float, **options: Any
) -> Any:
    """Return the recommender on a pool of workers."""
    from ray_slo.serve import build_app

    return build_app(
        {
            "models": {
                MODEL: {
                    "callable": "benchmarks.live.heterogeneous:Ranking",
                    "kwargs": {"weights": "none", "threads": 1},
                    "latency_slo_ms": 1e3 * SERVER_SLO_S,
                    "max_batch_size": MAX_ITEMS,
                }
            },
            "workers": {kind: worker(kind, count) for kind, count in pool.items()},
            "policy": {"name": policy[0], "kwargs": policy[1]},
            "response_margin_ms": 1e3 * MARGIN_S,
            "profile_seconds": profile_seconds,
            **options,
        }
    )


def worker(kind: str, count: int, **options: Any) -> dict[str, Any]:
    """Return a kind of worker whose batches take as long as on this instance type."""
    per_item_s, base_s = CASE.profiles()[kind].fit_linear()
    variables = {
        "HARDWARE": kind,
        BASE_VARIABLE: f"{1e3 * STRETCH * base_s:.4f}",
        ITEM_VARIABLE: f"{1e3 * STRETCH * per_item_s:.4f}",
    }
    actor = {"num_cpus": 0.25, "runtime_env": {"env_vars": variables}}
    return {"num_replicas": count, "ray_actor_options": actor, **options}


@dataclass
class Change:
    """The effect of one budget.

    Attributes:
        settled_s: seconds from the change until the planned workers ran.
        running: number of workers by kind then.
        requests: requests sent from this change until the next.
    """

    budget: float
    settled_s: float
    running: dict[str, int]
    requests: pd.DataFrame


def planned_application(budget: float) -> Any:
    """Return the recommender with a planner that decides the number of workers of each type."""
    sizes = Counter(CASE.sizes.quantiles((np.arange(100) + 0.5) / 100).tolist())
    return application(
        kairos.KAIROS,
        POOL,
        2.0,
        workers={kind: worker(kind, 1, instance_type=kind, max_replicas=4) for kind in POOL},
        planner={
            "name": "kairos",
            "interval_s": INTERVAL_S,
            "kwargs": {"budget_per_hour": budget, "follow_load": False, "sizes": dict(sizes)},
        },
    )


async def change_budgets(
    handle: Any, payloads: Any, budgets: Sequence[float], seed: int
) -> list[Change]:
    """Deploy again with each further budget, while queries arrive.

    Raises:
        TimeoutError: the workers did not settle within `SETTLE_S`.
    """
    from ray import serve

    from ray_slo.demo.systems import APP

    rng = np.random.default_rng(seed)
    calls = Calls()

    async def one(at: float, item: Any) -> dict[str, Any]:
        reply = await calls.call(at, handle.remote, item)
        status, hardware = reply.status, ""
        if status == "answered":
            status = "ok" if reply.latency_s <= SLO_S else "late"
            hardware = reply.answer["hardware"]
        return {"at": at, "status": status, "answer": hardware, "size": len(item["items"])}

    async def settled(budget: float) -> dict[str, int]:
        """Wait until as many workers run as are planned, and return their numbers."""
        until = calls.now_s + SETTLE_S
        while calls.now_s < until:
            plan = (await handle.slo_status.remote())["plan"]
            wanted = {kind: plan.get("counts", {}).get(kind, 0) for kind in POOL}
            if plan.get("planned_budget_per_hour") == budget and plan.get("running") == wanted:
                return wanted
            await asyncio.sleep(0.2)
        raise TimeoutError(f"no workers for a budget of {budget:g} within {SETTLE_S:g} s: {plan}")

    async def change() -> list[tuple[float, float, float, dict[str, int]]]:
        changes = []
        for i, budget in enumerate(budgets):
            began = calls.now_s
            if i:
                await asyncio.to_thread(
                    serve.run, planned_application(budget), name=APP, route_prefix="/"
                )
            running = await settled(budget)
            changes.append((budget, began, calls.now_s - began, running))
            await asyncio.sleep(PAUSE_S)
        return changes

    longest_s = (SETTLE_S + PAUSE_S) * (len(budgets) + 1)
    times = Poisson(rate=BUDGET_RATE).times(longest_s, rng).tolist()
    due = ((at, payloads.items[int(rng.integers(len(payloads)))]) for at in times)
    changes, seen = await calls.beside(change(), due, one)
    frame = pd.DataFrame(seen)
    ends = [began for _, began, _, _ in changes[1:]] + [np.inf]
    return [
        Change(budget, settled_s, running, frame[(frame["at"] >= began) & (frame["at"] < end)])
        for (budget, began, settled_s, running), end in zip(changes, ends, strict=True)
    ]


def budget_rows(changes: Sequence[Change]) -> list[Row]:
    rows: list[Row] = []
    for i, change in enumerate(changes):
        status = change.requests["status"]
        large = change.requests["size"] > weak_limit()
        case = (
            f"planner kairos, {BUDGET_RATE:g} queries/s · {i + 1}. "
            f"budget {change.budget:.2f} per hour"
        )
        rows += [
            *(Row(case, f"workers {kind}", "", change.running[kind]) for kind in POOL),
            Row(case, "settled", "s", change.settled_s),
            Row(case, "queries", "", len(status)),
            Row(case, "no answer", "", int((~status.isin(("ok", "late"))).sum())),
            Row(case, "late", "", int((status == "late").sum())),
            Row(
                case,
                "large on the weak type",
                "",
                int((large & (change.requests["answer"] == WEAK)).sum()),
            ),
        ]
    return rows


def measure(
    url: str, payloads: Any, rate: float, warmup_s: float, window_s: float, seed: int
) -> Measured:
    """Send a Poisson stream to the running application, and return the outcome."""
    from ray import serve

    from ray_slo.demo.systems import APP

    result = by_http(
        url,
        payloads,
        rate,
        duration_s=warmup_s + window_s,
        warmup_s=warmup_s,
        seed=seed,
        slo_s=SLO_S,
        timeout_s=10.0,
        label_field="hardware",
    )
    requests = result.measured.copy()
    sizes = np.array([len(item["items"]) for item in payloads.items])
    requests["size"] = sizes[requests["payload"].to_numpy()]
    status = serve.get_app_handle(APP).slo_status.remote().result()
    told = learned(status, by_kind=True)
    return Measured(requests, window_s, told, 1e-3 * status["dispatch_delay_ms"])


def predict(
    policy: kairos.Policy,
    pool: Mapping[str, int],
    seen: Measured,
    rate: float,
    warmup_s: float,
    window_s: float,
    seed: int,
) -> float:
    """Return the percentage of requests not in time in the simulator."""
    from ray_slo.policies import make_policy

    model = Model(MODEL, SERVER_SLO_S - MARGIN_S, (Variant(MODEL, seen.told),))
    loaded = frozenset({MODEL})
    workers = [
        Worker(f"{kind}-{i}", kind, loaded) for kind, count in pool.items() for i in range(count)
    ]
    report = simulate(
        make_policy(*policy),
        Cluster.of([model], workers, DispatchDelay(seen.delay_s)),
        Workload.poisson(rate, sizes=CASE.sizes),
        duration_s=warmup_s + window_s,
        warmup_s=warmup_s,
        seed=seed,
        report_delay_s=seen.delay_s,
    )
    return 100 * report.bad_rate()


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot goodput and the share not in time over the load."""
    from matplotlib.figure import Figure

    metrics = {"goodput": "answers in time per second", "not in time": "not in time, %"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, 2), metrics.items(), strict=True):
        for name in POLICIES:
            points = [
                (float(row.case.partition(" · ")[2].partition(" %")[0]), row.ours)
                for row in rows
                if row.metric == metric and row.case.endswith(f", {name}")
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel="load, % of the pool's fluid bound", ylabel=label)
        axes.set_ylim(bottom=0)
    axes.legend()
    return [saved(figure, directory, "live-heterogeneous")]
