"""Loki's published profiles as pipelines (`benchmarks/data/loki`)."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping

from benchmarks.harness.data import published
from benchmarks.loki.terms import Task, Variant
from ray_slo.core.profiles import LatencyProfile

DETECT, CARS, FACES = "object_detection", "car_classification", "facial_recognition"
SOURCE, CAPTIONS = "source", "image_captioning"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def traffic(
    children: Collection[str] = (CARS,),
    batch_sizes: Collection[int] = BATCH_SIZES,
    without: Collection[str] = (),
) -> tuple[Task, ...]:
    """Return the traffic pipeline: detection, then these child tasks, without some variants.

    Latencies are medians on a GTX 1080 Ti at these batch sizes. Accuracies are relative to the best
    variant of a task, in percent.
    """
    tasks = {task: None if task == DETECT else DETECT for task in (DETECT, *children)}
    return _tasks("traffic_analysis", tasks, batch_sizes, without)


def social_media(batch_sizes: Collection[int] = BATCH_SIZES) -> tuple[Task, ...]:
    """Return the social media pipeline: an image goes to detection and to captioning at once.

    As published, the root splits the image. It is a task that takes no time but needs a worker.
    """
    tasks = {SOURCE: None, DETECT: SOURCE, CAPTIONS: SOURCE}
    return _tasks("social_media", tasks, batch_sizes)


def trace(name: str) -> list[float]:
    """Return the requests per second of a published trace, one figure per second."""
    with published(f"loki/trace_{name}.csv").open(newline="") as file:
        return [float(row["qps"]) for row in csv.DictReader(file)]


def _tasks(
    pipeline: str,
    parents: Mapping[str, str | None],
    batch_sizes: Collection[int],
    without: Collection[str] = (),
) -> tuple[Task, ...]:
    points: dict[tuple[str, str], dict[int, float]] = {}
    accuracy: dict[str, float] = {}
    for row in _rows("loki/profiles.csv", pipeline):
        if row["variant"] in without:
            continue
        if row["task"] in parents and int(row["batch_size"]) in batch_sizes:
            accuracy[row["variant"]] = float(row["accuracy"])
            measured = points.setdefault((row["task"], row["variant"]), {})
            measured[int(row["batch_size"])] = float(row["latency_p50_ms"]) / 1e3
    factors: dict[str, dict[str, float]] = {}
    for row in _rows("loki/branching.csv", pipeline):
        if row["child_task"] in parents:
            factors.setdefault(row["variant"], {})[row["child_task"]] = float(row["edge_factor"])
    return tuple(
        Task(
            task,
            tuple(
                Variant(name, accuracy[name], LatencyProfile.from_points(p), factors.get(name, {}))
                for (of, name), p in points.items()
                if of == task
            ),
            parent,
        )
        for task, parent in parents.items()
    )


def _rows(name: str, pipeline: str) -> list[dict[str, str]]:
    with published(name).open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["pipeline"] == pipeline]
