"""Change a question: "load=+20%", "slo=80ms", "latency=1.2x"."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ray_slo.simulation.sizing.question import Question

_CHANGES = {"load": "4800/s", "slo": "80ms", "latency": "1.2x", "budget": "3"}
_UNITS = {"load": "/s", "slo": "ms", "latency": "x", "budget": ""}
_VALUE = re.compile(r"(?P<sign>[+-]?)(?P<number>\d+(\.\d+)?)(?P<unit>%|x|ms|/s|)")


def what_if(question: Question, change: str) -> Question:
    """The question after a change: "load=+20%", "load=4800/s", "slo=80ms", "slo=-10%",
    "latency=1.2x" (of every profile), "budget=3"; several with commas.

    Raises:
        ValueError: the change is not valid; the message names it and the valid ones.
    """
    for part in change.split(","):
        key, _, text = (s.strip() for s in part.partition("="))
        if key not in _CHANGES:
            raise ValueError(
                f"what-if {part.strip()!r}: {key!r} must be one of {', '.join(_CHANGES)}, "
                "as in load=+20%"
            )
        question = _changed(question, key, text)
    return question


def _changed(question: Question, key: str, text: str) -> Question:
    found = _VALUE.fullmatch(text)
    unit = found["unit"] if found else None
    if found is None or unit not in ("%", "x", _UNITS[key]) or (unit == "%") != bool(found["sign"]):
        raise ValueError(
            f"what-if {key}={text}: wants a value like +20%, -10%, 1.5x or {_CHANGES[key]}"
        )
    number = float(found["number"])
    factor = None
    if unit == "%":
        factor = 1 + float(found["sign"] + found["number"]) / 100
    elif unit == "x":
        factor = number
    if not (factor if factor is not None else number) > 0:
        raise ValueError(f"what-if {key}={text}: nothing is left")
    if key == "load":
        rate = number if factor is None else factor * question.workload.rate
        return replace(question, workload=question.workload.at_rate(rate))
    if key == "budget":
        if question.budget_per_hour is None:
            raise ValueError(f"what-if {key}={text}: the spec has no pool.budget_per_hour")
        budget = number if factor is None else factor * question.budget_per_hour
        return replace(question, budget_per_hour=budget)
    if key == "latency":
        assert factor is not None
        return _slower(question, factor)
    return _other_slo(question, factor, number / 1e3, text)


def _slower(question: Question, factor: float) -> Question:
    def slower(model: Any) -> Any:
        scaled = (
            replace(v, profiles={k: p.scaled(factor) for k, p in v.profiles.items()})
            for v in model.variants
        )
        return replace(model, variants=tuple(scaled))

    pipeline = question.pipeline
    return replace(
        question,
        models=tuple(map(slower, question.models)),
        pipeline=pipeline and replace(pipeline, models=tuple(map(slower, pipeline.models))),
    )


def _other_slo(question: Question, factor: float | None, slo_s: float, text: str) -> Question:
    def other(now_s: float) -> float:
        return slo_s if factor is None else factor * now_s

    workload = question.workload
    if workload.slo_mix:
        if factor is None:
            raise ValueError(f"what-if slo={text}: the workload has an slo_mix; give a percentage")
        mix = [s.model_copy(update={"slo_ms": factor * s.slo_ms}) for s in workload.slo_mix]
        workload = workload.model_copy(update={"slo_mix": mix})
    pipeline = question.pipeline
    if pipeline is not None:
        (tree,) = pipeline.trees
        tree = replace(tree, slos_s={c: other(slo_s) for c, slo_s in tree.slos_s.items()})
        pipeline = replace(pipeline, trees=(tree,))
    return replace(
        question,
        workload=workload,
        models=tuple(replace(m, latency_slo_s=other(m.latency_slo_s)) for m in question.models),
        pipeline=pipeline,
    )
