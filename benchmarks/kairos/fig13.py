"""Upper bounds and measured throughput of the configurations with the highest bounds.

In the paper, the best configuration is always among the top ten by Equation 15, and throughput
follows the bounds. The rank correlation (Spearman) is over the configurations tried: those with the
highest bounds by either method. The star marks the planner's choice.
"""

from __future__ import annotations

from scipy.stats import spearmanr

from benchmarks.harness.rows import Row
from benchmarks.kairos.systems import MODELS, Case, homogeneous, planned, space, text, throughput
from ray_slo.papers import kairos

SOURCE = "Kairos Figure 13"
ASKED = [
    (
        "ranking · *",
        "rank of the best by Eq. 15",
        "≤",
        10,
        "on these latencies, which are not the paper's, Eq. 15 is no upper bound",
    )
]


def run(quick: bool, seed: int) -> list[Row]:
    how = {"requests": 500 if quick else 2000, "tolerance": 0.03 if quick else 0.01, "seed": seed}
    top = 3 if quick else 20
    rows = []
    for model in ("RM2",) if quick else MODELS:
        case = Case(model)
        base, _ = homogeneous(case, **how)
        problem = case.problem()
        named, counts, fluid = space(case)
        paper, _ = kairos.paper_bounds(problem, counts)
        by_paper = sorted(range(len(named)), key=lambda i, p=paper: -p[i])
        tried = sorted({*range(top), *by_paper[:top]})
        got = {i: throughput(case, named[i], **how) for i in tried}
        plan = planned(problem)
        for rank, i in enumerate(tried[:top], 1):
            star = " *" if named[i] == plan.counts else ""
            label = f"{model}, over homogeneous · {rank}. {text(named[i])}{star}"
            rows += [
                Row(label, "fluid bound", "×", float(fluid[i]) / base),
                Row(label, "Equation 15", "×", float(paper[i]) / base),
                Row(label, "Kairos", "×", got[i] / base),
            ]
        best = max(got, key=got.__getitem__)
        reached = [got[i] for i in tried]
        label = f"ranking · {model}, of {len(tried)} tried"
        rows += [
            Row(label, "rank of the best by fluid", "", float(best + 1)),
            Row(label, "rank of the best by Eq. 15", "", float(by_paper.index(best) + 1)),
            Row(label, "correlation, fluid", "", float(spearmanr(fluid[tried], reached).statistic)),
            Row(
                label, "correlation, Eq. 15", "", float(spearmanr(paper[tried], reached).statistic)
            ),
        ]
    return rows
