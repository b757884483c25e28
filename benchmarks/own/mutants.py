"""Random mutants of the code that decides, and how many of them the tests of their room catch.

A mutant is one small change of the code (`own/mutation.py`). Mutants are drawn from all places of
the Ray-free rooms with the same chance. A mutant is *caught* if a test of its room fails or does
not end. Only tests that run its line are tried, the fastest first, for a minute of CPU time.
Tests that are marked slow are left out. So a survivor may still be caught by a slow test, or by a
test of another room. Survivors that change nothing, or nothing that matters, have their reason in
`MAY_LIVE`. They count as not caught.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.harness.rows import Row
from benchmarks.own.mutation import ROOT, Bench, Mutant, Trials, sample

SOURCE = "ray-slo"
ASKED = [
    (
        "all rooms",
        "caught",
        "≥",
        85,
        "after tests for what survived of the same sample; it says less about other samples",
    ),
]
ROOMS = {
    "ray_slo/policies": "tests/policies,tests/goldens",
    "ray_slo/simulation": "tests/simulation,tests/goldens",
    "ray_slo/serve": "tests/serve",
    "ray_slo/planning": "tests/planning,tests/goldens",
    "ray_slo/core": "tests/core,tests/goldens",
}
"""Where the mutants are, and the folders of the tests that should catch them."""
MAY_LIVE: dict[str, str] = {
    (
        "ray_slo/simulation/arrivals.py, _renewal: count = int(total - reached + ⟦4 * m"
        "ath.sqrt(total / shape)⟧) + 16 → (4 / math.sqrt(total / shape))"
    ): "A first guess of how many gaps to draw. More are drawn if they are too few.",
    (
        "ray_slo/policies/auto_choice.py, _alike: {r: n / sum(f.arrived) for r, n in zi"
        "p(f.roots, f.arrived, strict=⟦True⟧)} → (False)"
    ): "`strict` guards against an error that the code does not have.",
    (
        "ray_slo/policies/shared/choice.py, _solve: for m, model in zip(models, bounded"
        ", strict=⟦False⟧): → (True)"
    ): "Both sequences have the same length.",
    (
        "ray_slo/policies/deferred.py, _best: if ⟦pool.load < 1⟧: → (pool.load <= 1)"
    ): "A measured load of exactly 1.",
    (
        "ray_slo/planning/auto/headroom.py, occupancy: if ⟦bad_rate(busy, workers, room"
        ", variance * busy) <= target⟧: → (bad_rate(busy, workers, room, variance * bus"
        "y) < target)"
    ): "A tie of two floats in a bisection.",
    (
        "ray_slo/planning/brains/kairos.py, module: _SAMPLE = ⟦500⟧ # the number of siz"
        "es in a problem → (501)"
    ): "A sample of 501 sizes instead of 500.",
    (
        "ray_slo/policies/auto_traffic.py, surprise: if self._predicted is None or ⟦n <"
        " _LEAST⟧: → (n <= _LEAST)"
    ): "One request more before a load counts as a surprise.",
    (
        "ray_slo/planning/auto/groups.py, module: OVER, FULL, EVEN, COST, LOST = ⟦10.0⟧"
        ", 20.0, 0.2, 10.0, 100.0 → (11.0)"
    ): "A weight: the order of the goals is the same.",
    (
        "ray_slo/policies/batching.py, cluster_changed: self._ahead = cluster.delay(⟦1⟧) > 0 → (2)"
    ): "A delay of two requests is above 0 exactly if that of one is.",
    (
        "ray_slo/simulation/engine.py, loop: if ⟦stalls > 1000⟧: → (stalls >= 1000)"
    ): "A guard against a policy that never stops: one turn more or less.",
    (
        "ray_slo/simulation/sizing/document.py, build: workers=⟦1⟧, → (2)"
    ): "A placeholder: the question sets the number.",
    (
        "ray_slo/serve/planner/auto.py, _check_arguments: Problem((one,), (alone,), {},"
        ' (Kind("k", 1, ⟦1⟧),), **given) → (2)'
    ): "A placeholder, which only checks arguments.",
    (
        "ray_slo/planning/auto/headroom.py, module: _LARGE = ⟦700.0⟧ # exponents above "
        "this overflow → (701.0)"
    ): "The bad rate is about 1e-304 there.",
    (
        "ray_slo/planning/auto/pack.py, _in_turn: while first or ⟦left > _EPS⟧: → (left >= _EPS)"
    ): "A rest of exactly 1e-9.",
    (
        "ray_slo/serve/scheduler/learned.py, module: _LARGE = ⟦32⟧ # batch size at "
        "which changes of the delay are checked → (33)"
    ): "A limit of 33 instead of 32.",
    (
        "ray_slo/planning/auto/sizes.py, together: if not any(⟦_MARK in stream⟧ for "
        "stream in made.served): → (_MARK not in stream)"
    ): "The other way gives the same shares, but for rounding.",
    (
        "ray_slo/planning/brains/group_plans.py, _names: "
        "*linear_sum_assignment(np.array(common).reshape(-1, len(taken))), "
        "strict=⟦True⟧ → (False)"
    ): "`strict` guards against an error that the code does not have.",
    (
        "ray_slo/planning/brains/groups.py, module: _DRAIN_S = ⟦60.0⟧ # the longest "
        "time to drain a model's requests from a group → (61.0)"
    ): "A time limit of 61 s instead of 60.",
    (
        'ray_slo/serve/scheduler/solver.py, _rehearse: ⟦logger.info("held in %.2f s: '
        '%r", took_s, problem)⟧ → pass'
    ): "Only a line of a log.",
    (
        "ray_slo/planning/brains/streams.py, module: _BAD_S = ⟦10.0⟧ # the share of bad"
        " requests is over this many seconds → (11.0)"
    ): "A time limit of 11 s instead of 10.",
    (
        "ray_slo/serve/watch/log_writer.py, __init__: self._thread = "
        'threading.Thread(target=self._run, name="decision-log", daemon=⟦True⟧) → '
        "(False)"
    ): "It matters only when the process ends.",
    (
        "ray_slo/planning/herd/search.py, level: | (⟦memory + self.memory[k] > "
        "self.room⟧) → (memory + self.memory[k] >= self.room)"
    ): "A tie of two floats.",
    (
        'ray_slo/serve/worker/batches.py, run: ⟦logger.exception("batch %s failed '
        'inside the worker", batch.id)⟧ → pass'
    ): "Only a line of a log.",
    (
        'ray_slo/planning/loki/program.py, _any_route: hosted = m.variables("hosted", '
        "len(g.configs), upper=⟦1⟧, integer=True) → (2)"
    ): "Another constraint already limits the sum to 1.",
    (
        "ray_slo/planning/spot.py, _with_interruptions: columns = [_present(int(m), flo"
        "at(a)) for m, a in zip(spot[i], there, strict=⟦True⟧)] → (False)"
    ): "`strict` guards against an error that the code does not have.",
    (
        "ray_slo/simulation/arrivals.py, edges: while ends.shape[1] == 0 or ends[:, -⟦1⟧].min(initi"
        "al=math.inf) < duration_s: → (2)"
    ): "It only draws more states than are needed.",
    (
        "ray_slo/simulation/rehearsal.py, rehearse: for look in (*(look for look in _LOOKS if ⟦look"
        " < last⟧), last): → (look <= last)"
    ): "The last look twice; nothing changes in between.",
    (
        "ray_slo/simulation/sizing/search.py, _cheapest: guess = int(np.searchsorted(⟦bounds[order]"
        " * _ATTAINED⟧, question.workload.rate)) + 1 → (bounds[order] / _ATTAINED)"
    ): "It is only where the search begins.",
    (
        "ray_slo/simulation/sizing/search.py, _fluid_limit: cluster = _cluster(question, {kind: ⟦1⟧"
        "}) → (2)"
    ): "The requests do not depend on the number of workers.",
    (
        "ray_slo/serve/batch/batcher.py, _worth_a_try: if self._running or call.tried or ⟦left_s <="
        " 0⟧: → (left_s < 0)"
    ): "A remaining time of exactly 0.",
    (
        "ray_slo/policies/auto_traffic.py, due: if ⟦now - max(since, self._bunches[0][0]) < least_s"
        "⟧: → (now - max(since, self._bunches[0][0]) <= least_s)"
    ): "A tie of two times.",
    (
        "ray_slo/policies/batching.py, __init__: self._taken = ⟦False⟧ # workers will be free later"
        " than predicted before → (True)"
    ): "It is looked at once more, before the first batch.",
    (
        "ray_slo/policies/flex.py, __init__: self._preempt_delay_s = ⟦0.0⟧ → (1.0)"
    ): "`cluster_changed` sets it before it is read.",
    (
        "ray_slo/policies/price_load.py, __init__: self.level = -(2**⟦31⟧) → (32)"
    ): "No load has either level.",
    (
        "ray_slo/serve/frontend/service.py, module: _JOINING_S = ⟦0.1⟧ # additional time for a whol"
        "e pipeline, beyond its tasks → (1.1)"
    ): "A time limit that is a second longer.",
    (
        "ray_slo/policies/shared/choice.py, ModelLanes: planned: bool = ⟦False⟧ → (True)"
    ): "`_follow` sets it before it is read.",
    (
        "ray_slo/policies/shared/choice.py, bounded: most = max(profile.max_batch_within(m.slo_s), "
        "⟦1⟧) → (2)"
    ): "If not even one request is in time, the loop after it leaves a size of 1.",
    (
        "ray_slo/serve/proxy/door.py, module: _PLACES_KEPT = ⟦1024⟧ # largest number of known place"
        "s → (1025)"
    ): "A limit of 1025 instead of 1024.",
    (
        "ray_slo/planning/auto/build.py, _room: if most_busy(workers, there, target) >= needed * (⟦"
        "1 - EPS⟧): → (1 + EPS)"
    ): "A tie of two floats.",
    (
        "ray_slo/serve/watch/log_writer.py, _breathe: if ⟦not self._closing.is_set()⟧: → (self._clo"
        "sing.is_set())"
    ): "It only says how soon the event loop gets its turn.",
    (
        "ray_slo/planning/best_effort.py, plan: if ⟦hurried_plan.shed_share < _NOTHING⟧: → (hurried"
        "_plan.shed_share <= _NOTHING)"
    ): "A tie of two floats.",
    (
        "ray_slo/serve/worker/batches.py, check_hung: if ran_s > max(_HUNG_S, ⟦20⟧ * expected_s if "
        "math.isfinite(expected_s) else 0.0): → (21)"
    ): "A time limit of 21 instead of 20 times the expected one.",
    (
        "ray_slo/planning/brains/kairos.py, solve: if ⟦len(counts) > _MOST_CONFIGURATIONS⟧: → (len("
        "counts) >= _MOST_CONFIGURATIONS)"
    ): "A limit that is lower by 1.",
    (
        "ray_slo/planning/brains/kairos.py, solve: bounds = kairos.fluid_bounds(problem, counts) if"
        " len(counts) else np.zeros(⟦0⟧) → (1)"
    ): "A bound of 0 ends in the best effort, like none.",
    (
        'ray_slo/core/arguments.py, check: if hasattr(value, "dtype") and getattr(value, "ndim", '
        "⟦1⟧) == 0: → (2)"
    ): "Neither default is 0.",
    (
        "ray_slo/core/load.py, _fit: if self._length_s < wanted or self._length_s > ⟦4⟧ * wanted: →"
        " (5)"
    ): "Windows are shortened a little later.",
    (
        "ray_slo/planning/herd/search.py, tolerances: return np.asarray(values[⟦values <= self.limi"
        "t / loads.max() * (1 + EPS)⟧]) → (values < self.limit / loads.max() * (1 + EPS))"
    ): "A tie of two floats.",
    (
        "ray_slo/planning/fluid.py, solve: if ⟦found.status != 0 or x is None⟧: → (found.status != "
        "0 and x is None)"
    ): "The solver has no solution if it fails.",
    (
        "ray_slo/planning/auto/program.py, _useful: return min(self.room(*pair).workers(work), self"
        ".most[kind]) if work else ⟦0.0⟧ → (1.0)"
    ): "A worker for a variant that no request uses; no plan gains by it.",
    (
        "ray_slo/planning/tiers.py, __init__: edges = np.union1d(steps, np.append(reach, ⟦0⟧)) → "
        "(1)"
    ): "`steps` begins with 0; another size class does not change the plan.",
}
"""Survivors that may live: by a mutant's text, the reason."""
QUICK = ("ray_slo/core", 5)
UNSAVED = ("log",)  # options that do not change the result


def files(room: str) -> list[str]:
    """Return the files of a room that do not import Ray, at any place."""
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "import ray\n" not in text and "from ray import" not in text and "from ray." not in text:
            found.append(path.relative_to(ROOT).as_posix())
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mutants", type=int, metavar="N", help="how many; default: 300")
    parser.add_argument(
        "--rooms", default=",".join(ROOMS), help="folders, with commas; default: all"
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="note each mutant here; go on where it ends"
    )


def run(
    quick: bool,
    seed: int,
    mutants: int | None = None,
    rooms: str = "",
    log: Path | None = None,
) -> list[Row]:
    chosen = [room for room in rooms.split(",") if room] or list(ROOMS)
    if wrong := [room for room in chosen if room not in ROOMS]:
        raise SystemExit(f"--rooms: got {wrong[0]}; valid are {', '.join(ROOMS)}")
    if quick:
        chosen = [QUICK[0]]
    count = mutants or (QUICK[1] if quick else 300)
    drawn = sample([file for room in chosen for file in files(room)], count, seed)
    of = {room: [one for one in drawn if one.file.startswith(f"{room}/")] for room in chosen}
    with ThreadPoolExecutor(2) as pool:
        trials = Trials(log)
        caught = dict(zip(of, pool.map(partial(_room, trials), of, of.values()), strict=True))
    rows = [_row(room, results) for room, results in caught.items()]
    every = {one: found for results in caught.values() for one, found in results.items()}
    rows = [r for row in rows for r in row] + _row("all rooms", every)
    survivors = [one for one, found in every.items() if not found]
    rows += [
        Row(f"survivors: 1 where it may live · {one}", "may live", "", float(str(one) in MAY_LIVE))
        for one in survivors
    ]
    return rows


def _room(trials: Trials, room: str, of: list[Mutant]) -> dict[Mutant, bool]:
    todo = [one for one in of if trials.key(one) not in trials.known]
    if todo:
        with Bench() as bench:
            _say(f"{room}: {len(todo)} mutants; running the tests of {ROOMS[room]} once")
            tests = bench.watched(room, ROOMS[room], trials.watched(room))
            _say(f"{room}: {len(tests.took_s)} tests took {sum(tests.took_s.values()):.0f} s")
            for test in tests.failed:
                _say(f"{room}: left out, as it fails in the copy: {test}")
            for number, mutant in enumerate(todo, 1):
                start = time.monotonic()
                trials.add(mutant, bench.caught(mutant, tests))
                word = "caught" if trials.known[trials.key(mutant)] else "SURVIVED"
                took = f"{time.monotonic() - start:.0f} s"
                _say(f"{number}/{len(todo)} {word} in {took}: {mutant}")
    return {one: trials.known[trials.key(one)] for one in of}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _row(case: str, results: dict[Mutant, bool]) -> list[Row]:
    total, found = len(results), sum(results.values())
    share = 100 * found / total if total else float("nan")
    return [
        Row(case, "mutants", "", total),
        Row(case, "survived", "", total - found),
        Row(case, "caught", "%", share),
    ]
