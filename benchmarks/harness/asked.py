"""What was asked of figures before they were measured, to stand beside them on the page."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Ask(NamedTuple):
    """Every row of `case` and `metric` (shell patterns) should be on this side of `value`."""

    case: str
    metric: str
    sign: str  # "≥" or "≤"
    value: float

    def rows(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are meant, with a figure; the one that is worst off first."""
        found = [
            row
            for row in rows
            if row["ours"] is not None
            and fnmatchcase(row["case"], self.case)
            and fnmatchcase(row["metric"], self.metric)
        ]
        return sorted(found, key=lambda row: row["ours"], reverse=self.sign == "≤")

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.sign == "≥" else figure <= self.value


ASKED: dict[str, list[Ask]] = {
    "symphony-table2": [
        Ask("ResNet50* · deferred", "goodput", "≥", 5450),
        Ask("InceptionResNetV2* · deferred", "goodput", "≥", 965),
        Ask("* · deferred", "of bound at *", "≥", 97),
    ],
    "symphony-fig9": [Ask("1080Ti, mixed* · deferred", "over best peer", "≥", 2.0)],
    "responsive-grid": [Ask("responsive · *", "goodput over consolidate's", "≥", 0.99)],
    "shepherd-table5": [Ask("1,000,000 streams*", "solve", "≤", 13)],
    "shepherd-fig12": [
        Ask("chosen · ResNet50, batch 8", "delay p95", "≤", 5),
        Ask("chosen · ResNet50, batch 8", "slowdown", "≤", 5),
    ],
    "ramsis-fig6": [
        Ask(
            "image, SLO 150 ms, 60 workers · ramsis, our default",
            f"accuracy at {load}/s",
            "≥",
            value,
        )
        for load, value in (
            (400, 84.2),
            (800, 81.0),
            (1200, 78.7),
            (1600, 76.2),
            (2000, 74.9),
            (2400, 73.3),
            (2800, 73.0),
            (3200, 64.6),
        )
    ],
    "ramsis-price": [
        Ask("price over RAMSIS · *", "least gain", "≥", 0),
        Ask("image, 60 workers, SLO 150 ms, Poisson · price", "accuracy at 3200/s", "≥", 71.0),
    ],
    "loki-solver": [
        Ask("capacity* · two tasks", "hardware scaling", "≥", 207.9),
        Ask("capacity* · two tasks", "at any accuracy", "≥", 2305),
        Ask("capacity* · two tasks*", "gain", "≥", 2.5),
        Ask("plan · two tasks, gurobi*", "median on the clock", "≤", 100),
        Ask("plan · two tasks, highs*", "median on the clock", "≤", 100),
        Ask("routing tables · two tasks*", "time", "≤", 0.15),
    ],
    "loki-fig5": [
        Ask("*three tasks · ours", "violations while hardware scaling suffices", "≤", 1),
    ],
    "loki-fig6": [
        Ask("*hardware scaling suffices · ours", "violations", "≤", 1),
    ],
    "kairos-fig8": [Ask("* · Kairos (*", "over homogeneous", "≥", 1.25)],
    "kairos-fig9": [Ask("* · Kairos (*", "of ORACLE", "≥", 85)],
    "kairos-fig10": [Ask("*space of 331 · Kairos+", "evaluated", "≤", 1)],
    "kairos-matching": [
        Ask("20 requests × 20 workers", "policy, pick=urgent", "≤", 0.1),
        Ask("500 requests × 100 workers", "policy, pick=urgent", "≤", 5),
    ],
    "kairos-bounds": [
        Ask("time · 949 configurations*", "fluid", "≤", 10),
        Ask("time · 94,458 configurations*", "fluid", "≤", 1000),
    ],
    "live-preemption": [
        Ask("asleep, the first burst · flex, no preemption", "flex is better by", "≥", 3),
        Ask("asleep, many bursts · flex, no preemption", "flex is better by", "≥", 3),
    ],
    "live-groups": [Ask("* · during moves", "failed", "≤", 0)],
    "live-heterogeneous": [
        Ask("*, kairos", "large queries on the weak type", "≤", 0),
        Ask("planner kairos*", "no answer", "≤", 0),
    ],
    "live-replay": [
        Ask("the same policy on its own log*", "decided otherwise", "≤", 0),
        Ask("deferred − eager · *", "off, log of *", "≤", 5),
    ],
    "live-attack": [
        Ask("*, burst*", "answered in time", "≥", 162),  # 90 % of what the workers could do
        Ask("*, burst*", "refused, p99", "≤", 1.4),
        Ask("*burst*", "recovery", "≤", 1.0),
        Ask("*, ?[!uR]*", "good in time", "≥", 99),  # beside all but the bursts
        Ask("*, gRPC: ?[!u]*", "good in time", "≥", 99),
        Ask("*", "memory", "≤", 1.5),
    ],
    "shipped": [
        Ask("*", "elsewhere", "≤", 0),
        Ask("*", "in time at its rate", "≥", 1),
        Ask("traffic-loki, 0.3/s", "refused", "≤", 0),
    ],
}
