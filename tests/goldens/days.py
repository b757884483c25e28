"""A short simulated day in a few figures, with what may differ.

    asked 3012, in time 2999, refused 13, accuracy 88.4 %, mean batch 2.13, worker-hours 0.0333

A request that was asked is in time, refused, or late. Requests, accuracy (of those in time) and
batches depend a little on ties and on rounding. So a count may differ by 1 % of what was asked, the
accuracy by half a point, and the other figures by 6 %. What is asked is drawn from the seed, and is
exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ray_slo.simulation.application_spec import ApplicationSpec

FIGURE = re.compile(r"(?P<name>[a-z-]+(?: [a-z-]+)*) (?P<value>[\d.]+)")


def lived(document: Mapping[str, Any]) -> dict[str, float]:
    """The figures of `ray-slo simulate` for the document of an application."""
    report = ApplicationSpec.model_validate(document).run()
    return {
        "asked": report.count(),
        "in time": report.count("ok"),
        "refused": report.count("dropped"),
        "accuracy": round(report.accuracy(), 2),
        "mean batch": round(float(report.batches["size"].mean()), 2),
        "worker-hours": round(report.worker_hours(), 4),
    }


def check(what: str, document: Mapping[str, Any], text: str) -> None:
    """Compare the figures of a day with those in a text.

    Raises:
        AssertionError: they differ. The message names the day and the figures.
    """
    found = lived(document)
    expected = {m["name"]: float(m["value"]) for m in FIGURE.finditer(text)}
    assert expected.keys() == found.keys()
    may = {"asked": 0.0, "in time": 0.01 * found["asked"], "refused": 0.01 * found["asked"]}
    may["accuracy"] = 0.5
    wrong = [
        f"{name} is {found[name]:g}, not {value:g}"
        for name, value in expected.items()
        if abs(found[name] - value) > may.get(name, 0.06 * value)
    ]
    assert not wrong, f"{what}: " + "; ".join(wrong)
