"""Goodput against the latency of the network and its tail.

20 equally popular models share 32 GPUs, with Poisson arrivals and SLOs of 20, 25, 50 and 100 ms.
The paper says "similar batching profiles" without naming them; here all have the ResNet50 profile
of Table 2. Its figure shows only Symphony. Here "deferred" is our default, "deferred, as Algorithm
1" gathers as in the paper, and eager is added. Goodput is the largest total rate at which no model
has more than 1 % of bad requests.

A network latency of d ms is a `DispatchDelay`. A batch starts at least d ms after its decision,
because its backend fetches the inputs only then. So policies decide d ms ahead. In Appendix B,
eight inputs are read at once; so d is per batch here, not per request. The way back of an answer
does not count. Latencies are those of §5.6 and Appendix B, and round values near them, because the
text does not give the axis of the figure. RDMA has 0.024 ms (lowest) and 0.033 ms (99.99th
percentile). TCP has 3.034 ms (median) and 36.4 ms (99.99th percentile, "12x the median").

(a) Every batch takes exactly the d that is planned with. The paper says that RDMA "only marginally
reduces goodput", and that TCP reduces it "by up to 70 %", more with tighter SLOs. As the axis is
unknown, two figures are compared with 70 %. One is the largest loss that leaves some goodput, over
the latencies of this program. The other is the latency from which 70 % is lost (interpolated).
*Staggered bound* is one model on all N GPUs: N·b / ℓ(b) for the largest b with
d + (1 + 1/N)·ℓ(b) ≤ SLO. Its loss is unavoidable. *One batch ahead* is a limit of our hosts and
policies, which the paper does not have. A worker has one batch running and at most one sent ahead,
so two batches take at least d + ℓ(b). Where d is longer than a batch, GPUs wait for it ("busy"). 20
models increase this effect, because their batches are smaller than the bound's.

(b) Over TCP, d varies from batch to batch. It is log-normal with the paper's median and 99.99th
percentile; the shape is our choice. Policies plan with a percentile of it. The paper's scheduler
"always uses the high percentile bound". The rows show what that costs, and what lower percentiles
would cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.harness.plots import plot_series, saved
from benchmarks.harness.rows import Row
from benchmarks.own.deferred_objectives import RESNET
from benchmarks.symphony.fig11 import GPUS, cluster
from benchmarks.symphony.systems import System, search
from ray_slo.core import Cluster, DispatchDelay
from ray_slo.policies import make_policy
from ray_slo.simulation import Workload

SOURCE = "Symphony §5.6, Appendix B, Figure 14"
SLOS_MS = (20, 25, 50, 100)
TCP_MEDIAN_MS, TCP_TAIL = 3.034, 12  # the tail is the 99.99th percentile over the median
NETWORKS: dict[str, tuple[float, ...]] = {
    "RDMA range": (0.0, 0.024, 0.033, 0.1),
    "TCP range": (0.0, 1.0, TCP_MEDIAN_MS, 6.0, 10.0, 12.0, TCP_TAIL * TCP_MEDIAN_MS),
}
"""Latencies of the left and right part of the figure, in ms."""
PLANNED = (50, 75, 90, 99, 99.99)
"""Percentiles of the TCP latency with which policies plan."""
PAPER_LOSS = 70.0  # percent; "up to" in the paper

LEAST = 1000.0
"""Requests per second. At lower rates, a model has too few requests to measure 1 % of them."""

COMPARED: dict[str, System] = {
    "deferred": ("deferred", {}),
    "deferred, as Algorithm 1": ("deferred", {"exact": True}),
    "eager": ("eager", {}),
}
STAGGERED, ONE_AHEAD = "staggered bound", "staggered bound, one batch ahead"


@dataclass(frozen=True)
class Varying(DispatchDelay):
    """A delay that is drawn anew for every batch: log-normal with the median `control_s`.

    Attributes:
        sigma: standard deviation of the delay's logarithm.
        rng: draws the delays.
    """

    sigma: float = 0.0
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def __call__(self, batch_size: int) -> float:
        return self.control_s * math.exp(self.sigma * self.rng.standard_normal())

    def percentile(self, p: float) -> float:
        """Return the delay that `p` percent of the batches do not exceed, in seconds."""
        return self.control_s * math.exp(self.sigma * NormalDist().inv_cdf(p / 100))


def tcp(seed: int) -> Varying:
    """Return the network latency of the paper's TCP."""
    sigma = math.log(TCP_TAIL) / NormalDist().inv_cdf(0.9999)
    return Varying(TCP_MEDIAN_MS / 1e3, sigma=sigma, rng=np.random.default_rng([seed, 14]))


def bound(slo_ms: float, delay_ms: float, *, one_ahead: bool = False) -> float:
    """Return the requests per second of staggered execution; 0 if nothing can be in time.

    Args:
        one_ahead: whether two batches take a worker at least `delay_ms` + ℓ(b).
    """
    delay_s, left_s = delay_ms / 1e3, (slo_ms - delay_ms) / 1e3
    if left_s < RESNET.profile.latency(1):
        return 0.0
    longest_s = max(left_s / (1 + 1 / GPUS), RESNET.profile.latency(1))
    return max(
        GPUS * b / max(t, (delay_s + t) / 2 if one_ahead else t)
        for b, t in enumerate(RESNET.profile.table, start=1)
        if t <= longest_s
    )


def goodput(
    system: System,
    slo_ms: float,
    planned_ms: float,
    quick: bool,
    seed: int,
    actual: DispatchDelay | None = None,
) -> tuple[float, float]:
    """Find the largest rate at which every model's bad rate is at most 1 %.

    Returns:
        The rate, and the share of the time that GPUs are busy at it. Both are 0 below `LEAST`.

    Args:
        planned_ms: the delay with which the policy plans.
        actual: the actual delay, if it differs.
    """
    if not (most := bound(slo_ms, planned_ms)):
        return 0.0, 0.0
    planned = delayed(slo_ms, DispatchDelay(planned_ms / 1e3))
    warmup_s = 0.5 if quick else 1.5
    name, kwargs = system
    found = search(
        lambda: make_policy(name, kwargs),
        planned,
        Workload.poisson(most),
        start_rate=0.7 * most,
        growth=1.4,
        tolerance=0.05 if quick else 0.005,
        warmup_s=warmup_s,
        duration_s=warmup_s + (0.3 if quick else 2.0),
        seed=seed,
        truth=replace(planned, delay=actual) if actual else None,
    )
    if found.report is None or found.rate < LEAST:
        return 0.0, 0.0
    return found.rate, 1 - found.report.idle_fraction


def delayed(slo_ms: float, delay: DispatchDelay) -> Cluster:
    """Return the 20 models and 32 GPUs, with a network delay."""
    return replace(cluster(slo_ms), delay=delay)


def run(quick: bool, seed: int) -> list[Row]:
    slos = (20, 100) if quick else SLOS_MS
    names = (*COMPARED, STAGGERED, ONE_AHEAD)
    found: dict[tuple[str, int, float], float] = {}
    busy: dict[tuple[str, int, float], float] = {}
    goodputs: list[Row] = []
    losses: list[Row] = []
    shares: list[Row] = []
    for network, latencies_ms in NETWORKS.items():
        for name, slo in product(names, slos):
            for latency_ms in latencies_ms[:: 2 if quick else 1]:
                if (key := (name, slo, latency_ms)) not in found:
                    if name in COMPARED:
                        found[key], busy[key] = goodput(
                            COMPARED[name], slo, latency_ms, quick, seed
                        )
                    else:
                        found[key] = bound(slo, latency_ms, one_ahead=name == ONE_AHEAD)
                at = f"at {latency_ms:g} ms"
                line = f"{name}, SLO {slo} ms"
                case = f"(a) {network}, {name} · SLO {slo} ms"
                goodputs.append(Row(case, f"goodput {at}", "req/s", found[key]))
                if latency_ms:
                    loss = 100 * (1 - found[key] / found[name, slo, 0.0])
                    losses.append(Row(f"(a) {network}, loss · {line}", f"loss {at}", "%", loss))
                if network == "TCP range" and busy.get(key):
                    case = f"(a) {network}, GPUs busy at the goodput · {line}"
                    shares.append(Row(case, f"busy {at}", "%", 100 * busy[key]))
    rows = goodputs + losses + shares
    for name in names:
        of_latency = {ms: rate for (n, slo, ms), rate in found.items() if (n, slo) == (name, 20)}
        worst = 100 * (1 - min(rate for rate in of_latency.values() if rate) / of_latency[0.0])
        paper = PAPER_LOSS if name.startswith("deferred") else None
        case = f"(a) SLO 20 ms · {name}"
        rows += [
            Row(case, "largest loss with anything left", "%", worst, paper),
            Row(case, f"{PAPER_LOSS:g} % is lost from", "ms", lost_from(of_latency, PAPER_LOSS)),
        ]
    return rows + tail(quick, seed)


def lost_from(goodputs: Mapping[float, float], loss: float) -> float | None:
    """Return the latency (ms) that costs `loss` percent of the goodput, by interpolation."""
    left = (1 - loss / 100) * goodputs[0.0]
    for (low, above), (high, below) in pairwise(sorted(goodputs.items())):
        if above > left >= below:
            return low + (high - low) * (above - left) / (above - below)
    return None


def tail(quick: bool, seed: int) -> list[Row]:
    """Return the rows of (b)."""
    planned = PLANNED[::2] if quick else PLANNED
    rows: list[Row] = []
    for name in list(COMPARED)[: 1 if quick else 2]:
        for slo, p in product((50,) if quick else SLOS_MS, planned):
            actual = tcp(seed)
            rate, _ = goodput(COMPARED[name], slo, 1e3 * actual.percentile(p), quick, seed, actual)
            case = f"(b) TCP with its tail, {name} · SLO {slo} ms"
            rows.append(Row(case, f"goodput at p{p:g}", "req/s", rate))
    rows += [
        Row("(b) TCP · latency planned with", f"at p{p:g}", "ms", 1e3 * tcp(seed).percentile(p))
        for p in planned
    ]
    return rows


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot (a) in one PNG with a panel per network, and (b) in a PNG per system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    styles = {"deferred": "o-", "deferred, as Algorithm 1": "x--", STAGGERED: ":"}
    for axes, network in zip(figure.subplots(1, len(NETWORKS)), NETWORKS, strict=True):
        lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            title, _, slo = row.case.partition(" · ")
            name = title.removeprefix(f"(a) {network}, ")
            if name in styles and row.ours is not None:
                latency = float(row.metric.removeprefix("goodput at ").removesuffix(" ms"))
                lines.setdefault((slo, name), []).append((latency, row.ours))
        colours = {slo: f"C{i}" for i, slo in enumerate(dict.fromkeys(slo for slo, _ in lines))}
        for (slo, name), points in lines.items():
            axes.plot(
                *zip(*points, strict=True),
                styles[name],
                ms=4,
                color=colours[slo],
                label=f"{slo}, {name}",
            )
        axes.set_title(network, loc="left", fontsize="medium")
        axes.set_xlabel("network latency (ms)")
        axes.set_ylabel("goodput (req/s)")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path = saved(figure, directory, "goodput over latency")
    tails = [row for row in rows if row.case.startswith("(b)")]
    return [path, *plot_series(tails, directory, "percentile of the latency planned with")]
