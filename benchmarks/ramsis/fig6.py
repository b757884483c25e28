"""Accuracy against constant load, with Jellyfish+, ModelSwitching and greedy.

60 workers for the image task, 20 for the text task, with Poisson arrivals for 30 s. Every system
knows the load (§7.2). Accuracy is the mean over requests answered in time. As in the paper, a point
with more than 5 % of late requests is left out, and shown in a separate table. The paper prints
violation rates (Table 4) and gains, but no accuracies.

The paper's system runs on real workers whose latency varies around the profile. Here latency is
exactly the profile, as in the paper's own simulation.

Three systems are not in the paper. "Our default" drops requests that cannot be answered in time.
"Greedy" ignores the load. The task "wide" has those of the 26 models that no other beats at every
batch size. The paper's 9 are those that no other beats for a single request.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row
from benchmarks.ramsis.systems import (
    IMAGE_SLOS_MS,
    IMAGE_WORKERS,
    JELLYFISH,
    LOADS,
    RAMSIS,
    SWITCHING,
    TEXT_SLOS_MS,
    TEXT_WORKERS,
    cluster,
    every_system,
    gains,
    image_task,
    rows_of,
    switching_limits,
    text_task,
    under_load,
)

SOURCE = "RAMSIS §7.2, Figure 6, Table 4"
ASKED = [
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 400/s", "≥", 84.2),
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 800/s", "≥", 81.0),
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 1200/s", "≥", 78.7),
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 1600/s", "≥", 76.2),
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 2000/s", "≥", 74.9),
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 2400/s", "≥", 73.3),
    (
        "image, SLO 150 ms, 60 workers · ramsis, our default",
        "accuracy at 2800/s",
        "≥",
        73.0,
        "0.01 points less; with the 26 models that no other beats it is 73.05",
    ),
    ("image, SLO 150 ms, 60 workers · ramsis, our default", "accuracy at 3200/s", "≥", 64.6),
    (
        "image, SLO 150 ms, 60 workers, violations · RAMSIS",
        "late at 3600/s",
        "≤",
        2.45,
        "the published profiles support about half the rates that the paper reports",
    ),
]
PAPER_VIOLATIONS = {
    ("image", 150.0): {
        RAMSIS: (0.0669, 0.1089, 0.4990, 0.3637, 0.3076, 0.0516, 0.2288, 0.4786, 2.4540, 19.460),
        JELLYFISH: (0.0, 0.2302, 0.0279, 0.1087, 0.0150, 0.0140, 0.0695, 3.6645, 2.7240, 24.119),
        SWITCHING: (1.2377, 1.3180, 0.0306, 0.0543, 0.0, 0.0084, 0.0084, 0.0587, 0.0019, 97.874),
    },
    ("image", 300.0): {
        RAMSIS: (0.0252, 0.4402, 0.0725, 0.3390, 0.2876, 0.0168, 0.2278, 0.0745, 0.3375, 4.3920),
        JELLYFISH: (0.0419, 0.2306, 0.8504, 0.0, 0.0067, 0.1340, 1.0823, 0.1419, 0.6982, 4.2465),
        SWITCHING: (0.0, 2.6245, 1.4995, 0.0084, 0.0284, 0.1173, 0.0970, 0.0126, 0.0, 0.0210),
    },
    ("image", 500.0): {
        RAMSIS: (0.5038, 0.7513, 0.1312, 0.2324, 0.1739, 0.0112, 0.0239, 0.0935, 0.5560, 1.7970),
        JELLYFISH: (0.0, 0.0587, 0.2090, 0.1366, 0.0938, 0.3522, 0.4759, 0.6393, 0.3343, 2.8462),
        SWITCHING: (0.0, 0.5998, 0.6742, 1.7317, 0.0033, 0.0028, 0.1678, 0.0032, 0.1402, 0.7437),
    },
}
"""Percent at 400, 800, …, 4000 requests/s (Table 4; the text task's violations are below 0.7)."""

PAPER_GAINS = {
    "image": {SWITCHING: (15.42, 4.82), JELLYFISH: (15.42, 4.95)},
    "text": {SWITCHING: (4.88, 2.25), JELLYFISH: (4.88, 2.26)},
}


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    loads = (400, 3200) if quick else LOADS
    for task, workers, slos_ms in (
        ("image", IMAGE_WORKERS, IMAGE_SLOS_MS),
        ("image, wide", IMAGE_WORKERS, IMAGE_SLOS_MS),
        ("text", TEXT_WORKERS, TEXT_SLOS_MS),
    ):
        compared = []
        if quick and task == "image, wide":
            continue
        for slo_ms in slos_ms[:1] if quick else slos_ms:
            variants = text_task() if task == "text" else image_task()
            if task == "image, wide":
                variants = image_task(wide_slo_s=slo_ms / 1e3)
            here = cluster(variants, slo_ms / 1e3, workers)
            limits = switching_limits(here, quick=quick, loads=loads)
            points = under_load(
                here,
                partial(every_system, limits),
                quick=quick,
                seed=seed,
                loads=loads,
            )
            paper = {
                name: dict(zip(LOADS, of_load, strict=True))
                for name, of_load in PAPER_VIOLATIONS.get((task, slo_ms), {}).items()
            }
            title = f"{task}, SLO {slo_ms:g} ms, {workers} workers"
            rows += rows_of(title, points, "{:g}/s", paper)
            compared.append(points)
        rows += gains(f"{task}, all SLOs", compared, PAPER_GAINS.get(task, {}))
    return rows


plot = partial(plot_series, x_label="load (requests/s)")
