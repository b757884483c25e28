"""A day of traffic analysis end to end, with InferLine and Proteus.

20 servers, 250 ms. The pipeline is detection, then cars and faces, on the published profiles. All
three tasks fit into 250 ms, and hardware scaling ends at 198 req/s. The published trace has the
shape of a day of Azure Functions, in 347 points of 50 to 425 req/s. With one point per second, the
day would pass 249 times as fast, and demand would double in 20 s, two periods of the planner. Here
a point lasts 4 s (62 times as fast). With --quick, only every sixteenth point is run, so starts and
loads weigh more.

Further rows compare ours and Proteus on the two-task chain (no faces; hardware scaling ends at 208
req/s). Others have ours with other headroom and times, while demand rises to 191 req/s (the first
80 points). The last show the cost of swaps while demand rises to 295 req/s (the next 50 points).
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness.rows import Row
from benchmarks.loki.data import CARS, FACES, trace, traffic
from benchmarks.loki.systems import OFF_PEAK, Day, compare, figures, plot_days, problem

SOURCE = "Loki §6.2, Figure 5"
ASKED = [
    ("*three tasks · ours", "violations while hardware scaling suffices", "≤", 1),
    ("*peers over ours · *", "violations, whole day", "≥", 5),
    (
        "*peers over ours · Proteus",
        "servers, off-peak",
        "≥",
        2.5,
        "a plan of the three-task tree needs one server for faces alone",
    ),
    (
        "*peers over ours · Proteus",
        "servers, up to",
        "≥",
        2.67,
        "a plan has a whole number of servers: ours has 8 of 20",
    ),
    (
        "*peers over ours · InferLine",
        "capacity, ours over theirs",
        "≥",
        2.5,
        "the trace ends at 425 req/s, so it does not show all of our capacity",
    ),
]
STEP_S, QUICK_EVERY, RISE, SWAPS = 4.0, 16, 80, 50
# From Figure 5 and §6.2, which say "up to".
PAPER = {
    "Proteus: violations, whole day": 10.0,
    "Proteus: servers, up to": 2.67,
    "InferLine: capacity, ours over theirs": 2.5,
}


def run(quick: bool, seed: int) -> list[Row]:
    rates = trace("traffic_analysis_maf_reconstructed")[:: QUICK_EVERY if quick else 1]
    day = Day("three tasks", problem(traffic((CARS, FACES)), seed), rates, STEP_S)
    rows = compare(day, seed, PAPER)
    if quick:
        return rows
    rise = replace(day, rates=rates[:RISE])
    chain = replace(rise, problem=problem(traffic(), seed))
    for name, asked in (("two tasks", chain), ("three tasks", rise)):
        for system in ("ours", "Proteus"):
            rows += _rise(
                f"first {RISE} points, {name} · {system}", asked, system, max(rates), seed
            )
    label = f"first {RISE} points, three tasks, ours"
    for quantile in (None, 0.99):
        asked = replace(rise, problem=replace(rise.problem, headroom_quantile=quantile))
        case = f"{label} · headroom {quantile or 'none'}"
        rows += _rise(case, asked, "ours", max(rates), seed)
    for name, times in (
        ("no time to start or load", {"start_s": 0.0, "load_s": 0.0, "solve_s": 0.0}),
        ("5 s to start, 5 s to load", {"start_s": 5.0, "load_s": 5.0}),
    ):
        rows += _rise(f"{label} · {name}", rise, "ours", max(rates), seed, **times)
    swapping = replace(day, rates=rates[RISE : RISE + SWAPS])
    for name, times in (
        ("make before break", {}),
        ("break before make", {"make_before_break": False}),
    ):
        report = swapping.run("ours", seed, **times)
        case = f"next {SWAPS} points, three tasks, ours · {name}"
        rows += [
            Row(case, "swaps", "", float(report.plans.swaps.sum())),
            Row(case, "violations", "%", 100 * report.bad_rate()),
            Row(case, "accuracy", "%", report.accuracy()),
        ]
    return rows


def _rise(
    case: str, day: Day, system: str, most: float, seed: int, **times: float | bool
) -> list[Row]:
    """Return figures while hardware scaling suffices, and below 15 % of the day's peak demand."""
    windows = day.windows(day.run(system, seed, **times)).fillna({"accuracy": 0.0})
    first = windows.phase == "hardware scaling"
    made = figures(windows, first)
    low = windows.most <= OFF_PEAK * most
    return [
        Row(case, "violations while hardware scaling suffices", "%", made["violations"]),
        Row(case, "accuracy", "%", made["accuracy"]),
        Row(case, "servers", "", made["servers"]),
        Row(case, "servers, off-peak", "", figures(windows, low)["servers"]),
        Row(case, "least servers", "", float(windows.workers.min())),
    ]


plot = plot_days
