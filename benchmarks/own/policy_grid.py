"""Every policy on random cells: value in time, as a share of the best policy's.

`grid_cells` says what is drawn, and `grid_settings` which policies take part. All policies run on
the same arrivals in a cell. *Value in time* is the mean over all requests of the accuracy of the
answer; a late, refused or lost request counts 0. With one variant, all answers count alike, so
shares of the value are shares of the requests answered in time. The *best* is the largest value of
any policy that takes part. Policies that stop batches take part only in cells that allow it.
*Regret* is the difference from the best.

The best of many settings on the same arrivals is partly luck. With `--draws 2`, every cell runs
again with other arrivals. The rows "luck" then show how near the setting that was best under one
draw comes to the best under the other. It knows the cell, but not the arrivals, as `auto` does.

`ramsis` is left out, because the tables of one cell take 40 s to solve. `pipeline` takes part with
Loki's planner, which needs equal workers, and at least one per task. All others have no planner:
every worker has every variant. `kairos` matches requests to workers. It takes part where requests
have sizes or workers differ, with up to 24 workers. `price` takes part where models have variants,
or where there are few models. "As printed" are the papers' policies in their exact modes.

`out/policy-grid` keeps the figures of each cell, with a mark of the code that made them. So a run
that was stopped continues, and after a change of one policy only that policy runs again.

    python -m benchmarks policy-grid --seed 0 --cells 60      # the first 60 cells
    python -m benchmarks policy-grid --seed 0 --cell 17       # one cell, with all its figures
    python -m benchmarks policy-grid --cells 60 --again auto  # only `auto` runs, all else is kept
    python -m benchmarks policy-grid --cells 60 --draws 2     # how much of the best is luck
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.harness.rows import Failed, Row
from benchmarks.own.grid_cells import Cell, cell
from benchmarks.own.grid_run import code_for, keep, kept, kept_at, measure
from benchmarks.own.grid_settings import SETTINGS

SOURCE = "ray-slo"
ASKED = [
    (
        "asked of *",
        "cells within 1 % of the best",
        "≥",
        97,
        "the best of many settings is partly luck, and bursts increase the regret",
    ),
    (
        "asked of *",
        "least share of the best",
        "≥",
        97,
        "the worst cells are overloads of several models on one worker, and bursts with variants",
    ),
    (
        "asked of *",
        "every model under 1 % bad, of the cells where any policy does",
        "≥",
        99,
        "`auto` gives up at most 0.7 % of the value to keep every model below this",
    ),
    (
        "asked of *",
        "p50 at most 1.02 of eager's, of the cells below 0.7 load",
        "≥",
        95,
        "with several variants, `auto` answers with larger networks, which take longer",
    ),
]
CELLS = 300
REQUESTS = 8000
"""Least number of measured requests in a cell; up to 5 times as many if these take few SLOs."""
WORST = 10
CLOSE = 0.99
BAD = 0.01
AUTO = "auto"

Figures = dict[str, dict[str, Any]]
"""Figures of a cell, by setting."""

REGIONS: dict[str, Callable[[Cell], bool]] = {
    "all": lambda c: True,
    "load below 0.7": lambda c: c.load < 0.7,
    "0.7 to 1": lambda c: 0.7 <= c.load < 1,
    "1 and more": lambda c: c.load >= 1,
    "one variant": lambda c: c.variants == 1,
    "several": lambda c: c.variants > 1,
    "pipelines": lambda c: c.tree is not None,
    "sizes": lambda c: c.sized,
    "unlike workers": lambda c: len(c.kinds) > 1,
    "exact": lambda c: not c.noise,
    "noise": lambda c: bool(c.noise),
    "preemption": lambda c: c.preemption,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cells", type=int, default=CELLS, help=f"number of cells to run; default: {CELLS}"
    )
    parser.add_argument(
        "--cell", type=int, help="run only the cell with this number, and print all its figures"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of processes; default: 2")
    parser.add_argument("--policies", help="run only these settings, separated by ';'")
    parser.add_argument(
        "--again",
        help="run these settings again, separated by ';'; others keep figures of any code",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help="random arrivals per cell; 2 shows how much of the best is luck; default: 1",
    )


def run(
    quick: bool,
    seed: int,
    cells: int = CELLS,
    cell: int | None = None,
    jobs: int = 2,
    policies: str | None = None,
    again: str | None = None,
    draws: int = 1,
) -> list[Row]:
    names = _names("policies", policies) or list(SETTINGS)
    if cell is not None:
        return _alone(seed, cell, names)
    if quick:
        cells, jobs = min(cells, 4), 1
    numbers = range(cells)
    made = {number: _cell(seed, number) for number in numbers}
    found, *others = (
        _run_all(seed, made, names, jobs, quick, _names("again", again), draw)
        for draw in range(draws)
    )
    complaints = [
        f"{name}, {made[k].command}: {figures['error']}"
        for k, of in found.items()
        for name, figures in of.items()
        if "error" in figures
    ]
    rows = list(_rows(made, found))
    if others:
        rows += luck_rows(AUTO, [found, *others])
    if complaints:
        raise Failed(rows, complaints)
    return rows


_cell = cell  # because `run` has an argument called `cell`


def _names(option: str, given: str | None) -> list[str]:
    names = [name.strip() for name in (given or "").split(";") if name.strip()]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise SystemExit(f"--{option}: no setting {unknown[0]!r}; choose of {'; '.join(SETTINGS)}")
    return names


# -- running ---------------------------------------------------------------------------------------


def _alone(seed: int, number: int, names: Sequence[str]) -> list[Row]:
    of = cell(seed, number)
    figures = {n: measure(seed, number, n, REQUESTS) for n in names if SETTINGS[n].takes_part(of)}
    best = max(f["value"] for f in figures.values())
    title = f"{of.command}: {of.says}"
    rows = []
    for name, found in figures.items():
        case = f"{title} · {name}"
        rows += [
            Row(case, "value", "%", 100 * found["value"]),
            Row(case, "of the best", "%", 100 * found["value"] / best),
            Row(case, "bad, worst model", "%", 100 * found.get("worst", 1.0)),
            Row(case, "accuracy", "%", found.get("accuracy")),
            Row(case, "p50", "ms", 1e3 * found.get("p50_s", np.nan)),
            Row(case, "p99", "ms", 1e3 * found.get("p99_s", np.nan)),
            Row(case, "CPU per request", "µs", 1e6 * found["cpu_s"] / found.get("requests", 1)),
        ]
    if errors := [f"{name}: {f['error']}" for name, f in figures.items() if "error" in f]:
        raise Failed(rows, errors)
    return rows


def _run_all(
    seed: int,
    made: Mapping[int, Cell],
    names: Sequence[str],
    jobs: int,
    quick: bool,
    again: Sequence[str],
    draw: int,
) -> dict[int, Figures]:
    """Run every setting on every cell that it fits, unless its figures are kept."""
    requests = REQUESTS / 8 if quick else REQUESTS
    found: dict[int, Figures] = {number: {} for number in made}
    missing: dict[int, list[str]] = {}
    for number, of in made.items():
        for name in (n for n in names if SETTINGS[n].takes_part(of)):
            code = None if again and name not in again else code_for(of, name)
            path = kept_at(seed, number, name, requests, draw=draw)
            figures = None if quick or name in again else kept(path, code)
            if figures is None:
                missing.setdefault(number, []).append(name)
            else:
                found[number][name] = figures
    begin = time.monotonic()
    tasks = [(seed, number, of, requests, not quick, draw) for number, of in missing.items()]
    for done, (number, figures) in enumerate(_results(tasks, jobs), 1):
        found[number] |= figures
        left_s = (time.monotonic() - begin) / done * (len(tasks) - done)
        if not quick:
            print(f"cell {number} ({done} of {len(tasks)}, {left_s:.0f} s left)", file=sys.stderr)
    # In the order of `names`, regardless of what was kept and what has run.
    return {k: {n: of[n] for n in names if n in of} for k, of in found.items()}


_Task = tuple[int, int, list[str], float, bool, int]


def _results(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[int, Figures]]:
    if jobs == 1 or len(tasks) < 2:
        yield from map(_one, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_one, task) for task in tasks]):
            yield future.result()


def _one(task: _Task) -> tuple[int, Figures]:
    """Run some settings on a cell, and keep their figures."""
    seed, number, names, requests, keeps, draw = task
    of = cell(seed, number)
    found = {}
    for name in names:
        code = code_for(of, name)
        found[name] = measure(seed, number, name, requests, draw)
        if keeps:
            keep(kept_at(seed, number, name, requests, draw=draw), code, found[name])
    return number, found


# -- rows ------------------------------------------------------------------------------------------


def shares_of(figures: Figures) -> dict[str, float]:
    """Return each value as a share of the best; empty if no policy got any value."""
    best = max((f["value"] for f in figures.values()), default=0.0)
    return {name: f["value"] / best for name, f in figures.items()} if best > 0 else {}


def _rows(made: Mapping[int, Cell], found: Mapping[int, Figures]) -> Iterator[Row]:
    shares = {k: shares_of(of) for k, of in found.items()}
    names = [n for n in SETTINGS if any(n in of for of in shares.values())]
    if AUTO in names:
        yield from asked_rows(AUTO, made, found, shares)
    for name in names:
        yield from regret_rows(name, shares)
    for name in names:
        for region, holds in REGIONS.items():
            of = [s[name] for k, s in shares.items() if name in s and holds(made[k])]
            yield Row(
                f"mean share of the best, by region · {name}",
                region,
                "%",
                100 * float(np.mean(of)) if of else None,
            )
    for name in names:
        yield from worst_rows(name, made, shares)


def regret_rows(name: str, shares: Mapping[int, Mapping[str, float]]) -> Iterator[Row]:
    of = np.array([s[name] for s in shares.values() if name in s])
    case = f"regret · {name}"
    yield Row(case, "cells", "", len(of))
    yield Row(case, "mean share of the best", "%", 100 * float(of.mean()))
    yield Row(case, "within 1 %", "% of cells", 100 * float((of >= CLOSE).mean()))
    yield Row(case, "least", "%", 100 * float(of.min()))
    yield Row(case, "5th percentile", "%", 100 * float(np.percentile(of, 5)))


def luck_rows(name: str, draws: Sequence[Mapping[int, Figures]]) -> Iterator[Row]:
    """Return how near the best setting of one draw comes to the best of another, and `name` too.

    The setting that was best in a draw knows the cell, but not the arrivals of the other draw. The
    best of many settings on the same arrivals is better than that, by luck.
    """
    shares: dict[str, list[float]] = {"the best setting of another draw": [], name: []}
    for one, other in itertools.permutations(draws, 2):
        for k, figures in one.items():
            of = shares_of(other[k])
            if fixed := [n for n in figures if n != name and n in of]:
                picked = max(fixed, key=lambda n: figures[n]["value"])
                shares["the best setting of another draw"].append(of[picked])
            if name in of:
                shares[name].append(of[name])
    for who, found in shares.items():
        case = f"luck · {who}"
        yield Row(case, "mean share of the best", "%", 100 * float(np.mean(found)))
        yield Row(case, "within 1 %", "% of cells", _percent([s >= CLOSE for s in found]))
        yield Row(case, "least", "%", 100 * min(found))


def asked_rows(
    name: str,
    made: Mapping[int, Cell],
    figures: Mapping[int, Figures],
    shares: Mapping[int, Mapping[str, float]],
) -> Iterator[Row]:
    """Return the rows that `ASKED` refers to."""
    case = f"asked of {name}"
    of = np.array([s[name] for s in shares.values() if name in s])
    yield Row(case, "cells", "", len(of))
    yield Row(case, "cells within 1 % of the best", "%", 100 * float((of >= CLOSE).mean()))
    yield Row(case, "least share of the best", "%", 100 * float(of.min()))
    fine = [
        f[name].get("worst", 1.0) <= BAD
        for f in figures.values()
        if name in f and min(x.get("worst", 1.0) for x in f.values()) <= BAD
    ]
    metric = "every model under 1 % bad, of the cells where any policy does"
    yield Row(case, metric, "%", _percent(fine))
    calm = {k: f for k, f in figures.items() if made[k].load < 0.7 and name in f}
    for words, chosen in (
        ("p50 at most 1.02 of eager's, of the cells below 0.7 load", calm),
        (
            "the same, of those with one variant",
            {k: f for k, f in calm.items() if made[k].variants == 1},
        ),
    ):
        ratios = [latency_ratio(f, name, "p50_s") for f in chosen.values()]
        yield Row(case, words, "%", _percent([r <= 1.02 for r in ratios if r is not None]))
    metric = "the same, of any policy within 1 % of the best in value"
    yield Row(case, metric, "%", _percent([_is_quick(f, shares[k]) for k, f in calm.items()]))
    ratios = [latency_ratio(f, name, "p99_s") for f in calm.values()]
    metric = "p99 at most 1.02 of eager's, of the cells below 0.7 load"
    yield Row(case, metric, "%", _percent([r <= 1.02 for r in ratios if r is not None]))


def _is_quick(figures: Figures, shares: Mapping[str, float]) -> bool:
    """Whether any policy with nearly the best value has a p50 of at most 1.02 of eager's."""
    ratios = [latency_ratio(figures, n, "p50_s") for n, share in shares.items() if share >= CLOSE]
    return any(ratio is not None and ratio <= 1.02 for ratio in ratios)


def _percent(held: Sequence[bool]) -> float | None:
    return 100 * float(np.mean(held)) if held else None


def latency_ratio(figures: Figures, name: str, what: str) -> float | None:
    """Return a latency divided by eager's; None if one of them is missing."""
    ours, theirs = (figures.get(n, {}).get(what) for n in (name, "eager"))
    return ours / theirs if ours and theirs else None


def worst_rows(
    name: str, made: Mapping[int, Cell], shares: Mapping[int, Mapping[str, float]]
) -> Iterator[Row]:
    """Return the cells with the largest regret, and the best setting of each."""
    of = sorted((s[name], k) for k, s in shares.items() if name in s)
    for share, k in of[:WORST]:
        best = max(shares[k], key=shares[k].__getitem__)
        label = f"`{made[k].command}`: {made[k].says}; best: {best}"
        yield Row(f"worst cells of {name} · {label}", "share of the best", "%", 100 * share)
