"""The worked example: staggered execution, and three missing requests.

3 GPUs, ℓ(b) = b + 5, SLO 12; request R_i arrives at 0.75 · (i − 1). Times are in the paper's units.
Figure 4: deferred scheduling falls into a staggered pattern by itself. Figure 5: R13, R14 and R15
are missing. In (a), scheduling is eager from R16 on, as in the paper; earlier batches were
deferred. Then batches shrink until requests are dropped. In (b), deferral lets GPUs wait a little,
and returns to the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.harness.plots import saved
from benchmarks.harness.rows import Row
from ray_slo.core import (
    BatchOutcome,
    Cluster,
    Decision,
    Dispatch,
    LatencyProfile,
    Model,
    Policy,
    Request,
    Variant,
)
from ray_slo.policies import make_policy
from ray_slo.simulation import Report, Times, Workload, simulate

SOURCE = "Symphony §3.3, Figures 4 and 5"
GAP, MISSING, SWITCH_AT = 0.75, (13, 14, 15), 0.75 * 15  # R16 arrives at 11.25
CLUSTER = Cluster.uniform(
    [Model("m", 12.0, (Variant("m", {"default": LatencyProfile.linear(1, 5)}),))], 3
)


class Switch:
    """Deferred until a moment, eager from then on.

    A policy only knows its own batches. So the second policy gets a worker only when the first
    policy's batch on it has ended.
    """

    serves_late = False

    def __init__(self, first: Policy, then: Policy, at: float) -> None:
        self.policies, self.at = (first, then), at
        self.switched = False
        self.owner: dict[str, Policy] = {}  # by worker: the policy whose batch runs on it
        self.cluster: Cluster

    def _refresh(self, now: float) -> None:
        first, then = self.policies
        free = {w: c for w, c in self.cluster.workers.items() if self.owner.get(w) is not first}
        then.cluster_changed(now, Cluster(self.cluster.models, free))

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self.cluster = cluster
        self.policies[0].cluster_changed(now, cluster)

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        if now >= self.at and not self.switched:
            self.switched = True
            self._refresh(now)
        self.policies[self.switched].requests_arrived(now, requests)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        for policy in self.policies:
            policy.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: str, outcome: BatchOutcome) -> None:
        owner = self.owner.pop(worker)
        if self.switched and owner is self.policies[0]:
            self._refresh(now)
        else:
            owner.batch_finished(now, worker, outcome)

    def decide(self, now: float) -> Decision:
        policy = self.policies[self.switched]
        decision = policy.decide(now)
        for action in decision.actions:
            if isinstance(action, Dispatch):
                self.owner[action.worker] = policy
        return decision


def simulate_example(policy: str, missing: Sequence[int], requests: int) -> Report:
    """Run the example. `policy` is "deferred", "responsive" or "eager from R16"."""
    times = [GAP * (i - 1) for i in range(1, requests + 1) if i not in missing]
    paper = {"exact": True}
    made: Any
    if policy == "responsive":
        made = make_policy("deferred", {"objective": "responsive"})
    else:
        made = make_policy("deferred", paper)
        if policy == "eager from R16":
            made = Switch(made, make_policy("eager"), SWITCH_AT)
    return simulate(made, CLUSTER, Workload(arrivals=Times(times_s=times)))


def run(quick: bool, seed: int) -> list[Row]:
    """The example has no randomness; `seed` has no effect."""
    requests = 60 if quick else 240
    rows: list[Row] = []
    timeline: list[Row] = []
    cases = (
        ("Fig. 4, deferred", "deferred", (), 0, ()),
        ("Fig. 5a, eager from R16", "eager from R16", MISSING, None, (35, 37, 38)),
        ("Fig. 5b, deferred", "deferred", MISSING, 0, ()),
        ("Fig. 5b, responsive", "responsive", MISSING, None, ()),
    )
    for case, policy, missing, paper_bad, paper_first in cases:
        report = simulate_example(policy, missing, requests)
        numbers = [i for i in range(1, requests + 1) if i not in missing]
        frame = report.requests
        bad = [numbers[i] for i in frame.index[frame.outcome != "good"]]
        rows += [
            Row(case, "mean batch", "", float(report.batch_sizes.mean())),
            Row(case, "bad requests", "", len(bad), paper_bad),
        ]
        for metric, ours, paper in zip_longest(("first", "second", "third"), bad[:3], paper_first):
            rows.append(Row(case, f"{metric} bad", "R", ours, paper))
        served = frame[frame.batch >= 0].groupby("batch").groups
        for index, batch in report.batches.iterrows():
            of = [numbers[i] for i in served[index]]
            if batch.started_s > 36:
                break
            label = f"{case} · GPU {int(batch.worker[1:]) + 1} · R{of[0]}–R{of[-1]}"
            timeline += [
                Row(label, "start", "", float(batch.started_s)),
                Row(label, "finish", "", float(batch.finished_s)),
                Row(label, "batch size", "", int(batch["size"])),
            ]
    return rows + timeline


def plot(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Plot the batches of each GPU, with one panel per case."""
    from matplotlib.figure import Figure

    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        if " · GPU " in row.case and row.ours is not None:
            bars.setdefault(row.case, {})[row.metric] = row.ours
    cases = list(dict.fromkeys(label.split(" · ")[0] for label in bars))
    figure = Figure(figsize=(10, 1.9 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), sharex=True, squeeze=False)[:, 0]
    for case, axes in zip(cases, panels, strict=True):
        for label, bar in bars.items():
            if not label.startswith(f"{case} · "):
                continue
            gpu = int(re.findall(r"GPU (\d+)", label)[0])
            size, width = int(bar["batch size"]), bar["finish"] - bar["start"]
            colour = "tab:green" if size >= 4 else "tab:red"
            axes.barh(gpu, width, left=bar["start"], color=colour, alpha=0.5, edgecolor="0.2")
            middle = bar["start"] + width / 2
            axes.text(middle, gpu, str(size), ha="center", va="center")
        axes.set_yticks([1, 2, 3], ["GPU 1", "GPU 2", "GPU 3"])
        axes.invert_yaxis()
        axes.set_title(case, loc="left", fontsize="medium")
    panels[-1].set_xlabel("time (number: batch size; red: below 4)")
    return [saved(figure, directory, "timeline")]
