"""Loki's published profiles as pipelines (`loki/*.csv` of RAY_SLO_DATA)."""

from __future__ import annotations

import csv
from collections.abc import Collection

from benchmarks.data import published
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning.loki import Task, Variant

DETECT, CARS, FACES = "object_detection", "car_classification", "facial_recognition"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def traffic(
    children: Collection[str] = (CARS,),
    batch_sizes: Collection[int] = BATCH_SIZES,
    without: Collection[str] = (),
) -> tuple[Task, ...]:
    """The traffic pipeline: detection, then these child tasks; without some variants.

    Latencies are the medians on a GTX 1080 Ti at the batch sizes asked for; accuracies are relative
    to a task's best variant, percent.
    """
    points: dict[tuple[str, str], dict[int, float]] = {}
    accuracy: dict[str, float] = {}
    for row in _rows("loki/profiles.csv"):
        if row["source"] != "simulator_runtimes.csv" or row["variant"] in without:
            continue
        if row["task"] in (DETECT, *children) and int(row["batch_size"]) in batch_sizes:
            accuracy[row["variant"]] = float(row["accuracy"])
            measured = points.setdefault((row["task"], row["variant"]), {})
            measured[int(row["batch_size"])] = float(row["latency_p50_ms"]) / 1e3
    factors: dict[str, dict[str, float]] = {}
    for row in _rows("loki/branching.csv"):
        if row["child_task"] in children:
            factors.setdefault(row["variant"], {})[row["child_task"]] = float(row["edge_factor"])
    return tuple(
        Task(
            task,
            tuple(
                Variant(name, accuracy[name], LatencyProfile.from_points(p), factors.get(name, {}))
                for (of, name), p in points.items()
                if of == task
            ),
            None if task == DETECT else DETECT,
        )
        for task in (DETECT, *children)
    )


def _rows(name: str) -> list[dict[str, str]]:
    with published(name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [r for r in rows if r["pipeline"] == "traffic_analysis"]
