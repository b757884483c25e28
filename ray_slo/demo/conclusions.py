"""One sentence for each part of the report, made from its figures. It also says when ray-slo is
worse."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ray_slo.cli._output import percent
from ray_slo.demo.extras import HIGH, LOW_AGAIN, Following, Model
from ray_slo.demo.machine import Use
from ray_slo.demo.stream import BURST, CALM, RISE, WHOLE, OverTime, Stretch, Sums, starts

# Required goodput in the whole run, and in the calm stretch, as multiples of tuned plain Serve's.
AHEAD = 1.3
LEVEL = 0.98
KEPT = 0.05  # a model keeps its SLO up to this bad rate
POINT = 0.1  # smaller differences in accuracy, in percentage points, count as none


def compared(name: str, ours: Mapping[str, Sums], plain: Mapping[str, Sums]) -> str:
    """Return the sentence that compares a system with tuned plain Serve, in the whole run and in
    the calm stretch."""
    whole, calm = ratio(ours[WHOLE], plain[WHOLE]), ratio(ours[CALM], plain[CALM])
    if whole is None:
        verdict = "answers requests in time, and tuned plain Serve answers none"
        if not ours[WHOLE].goodput:
            verdict = "answers no request in time, and neither does tuned plain Serve"
    elif whole >= AHEAD:
        verdict = f"answers {whole:.2f} × as many requests in time as tuned plain Serve"
    elif LEVEL <= whole <= 1 / LEVEL:
        verdict = "is level with tuned plain Serve"
    elif whole > 1:
        verdict = f"is ahead of tuned plain Serve by only {whole:.2f} ×"
    else:
        verdict = f"is not ahead of tuned plain Serve: it answers {whole:.2f} × as many in time"
    if calm is None:
        in_calm = "In the calm stretch, tuned plain Serve answers none in time."
    elif LEVEL <= calm <= 1 / LEVEL:
        in_calm = "In the calm stretch, the two are level."
    else:
        in_calm = f"In the calm stretch, it answers {calm:.2f} × as many."
    return f"Over the whole run, {name} {verdict}. {in_calm}"


def ratio(ours: Sums, plain: Sums) -> float | None:
    """Return the goodput as a multiple of plain Serve's. None if plain Serve has none."""
    return ours.goodput / plain.goodput if plain.goodput > 0 else None


def accuracy(times: OverTime, story: Sequence[Stretch], found: Mapping[str, Sums]) -> str:
    """Return the sentence about the deployment with variants in the overload: its accuracy, and its
    share of answers in time."""
    by_stretch = _means(times, story)
    calm, overload = by_stretch[CALM], min(by_stretch[RISE], by_stretch[BURST])
    if np.isnan(calm) or np.isnan(overload):
        return "No answer in time says which network gave it, so nothing can be said here."
    fall = calm - overload
    given = (
        f"falls by {fall:.1f} points, from {calm:.1f} % to {overload:.1f} %"
        if fall >= POINT
        else f"stays at {calm:.1f} %"
    )
    bad = found["overload"].bad
    share = f"{percent(1 - bad)} of the requests are answered in time"
    whose = "In the overload, the accuracy of @ray_slo.deployment"
    return f"{whose} {given}, and {share if bad <= KEPT else 'only ' + share}."


def _means(times: OverTime, story: Sequence[Stretch]) -> dict[str, float]:
    """Return the mean accuracy in each stretch, in percent, weighted by answers in time. NaN if
    there are none."""
    begins = starts(story, 0.0)
    found = {}
    for stretch, (begin, end) in zip(story, itertools.pairwise(begins), strict=True):
        here = (times.at_s >= begin) & (times.at_s < end) & ~np.isnan(times.accuracy)
        weight = times.goodput[here]
        found[stretch.name] = (
            float(np.average(times.accuracy[here], weights=weight))
            if weight.sum()
            else float("nan")
        )
    return found


def two_models(models: Sequence[Model]) -> str:
    """Return the sentence that says whether each model kept its own SLO."""
    missed = [model for model in models if model.sums.bad > KEPT]
    each = "; ".join(
        f"{model.name}: {percent(1 - model.sums.bad)} within {1e3 * model.slo_s:.0f} ms"
        for model in models
    )
    if not missed:
        return f"Each model keeps its own SLO on the same replicas ({each})."
    names = " and ".join(model.name for model in missed)
    return f"Not every model keeps its SLO: {names} does not ({each})."


def following(found: Following) -> str:
    """Return the sentence that says whether the number of replicas followed the load."""
    high, low = found.during(HIGH), found.during(LOW_AGAIN)
    before = high[0][1] if high else 0
    most = max((count for _, count in high), default=0)
    after = low[-1][1] if low else 0
    bad = found.sums[HIGH].bad
    if most <= before and bad <= KEPT:
        return (
            f"The load needed no more replicas than the {before} at the start: "
            f"{percent(bad)} of the requests in the high stretch were bad."
        )
    if most <= before:
        return (
            f"The replicas did not follow the load: {before} served throughout, and "
            f"{percent(bad)} of the requests in the high stretch were bad."
        )
    came_s = next((at for at, count in high if count > before), None)
    when = "" if came_s is None else f" {came_s:.0f} s after the load rose"
    gone = (
        f"afterwards {after} {'was' if after == 1 else 'were'} left"
        if after < most
        else f"at the end of this short run all {after} still served"
    )
    return (
        f"From {before} to {most} replicas, the first more{when}; {gone}. "
        f"{percent(bad)} of the requests in the high stretch were bad."
    )


def machine(uses: Mapping[str, Use]) -> tuple[bool, str]:
    """Return whether the machine was disturbed, and a sentence about it.

    Args:
        uses: use of the machine by other processes, for each part of the run.
    """
    complaints = [
        f"{name}: {' and '.join(found)}"
        for name, use in uses.items()
        if (found := use.complaints())
    ]
    if complaints:
        return True, "The machine was disturbed, so the figures are less certain. " + "; ".join(
            complaints
        )
    if all(use.others is None for use in uses.values()):
        return False, "The client sent its requests on time. This system does not tell more."
    return False, "The machine was quiet, and the client sent its requests on time."
