"""Live on Ray Serve: a model moves between two serving groups under load.

There are two groups with one worker each, and three networks that read digits. Poisson arrivals go
through a handle, to all three models at once. After a while without moves, `digits-m` moves to the
other group and back, several times. A move begins with the order. It ends when the worker of the
old group has unloaded the model, after it has finished the model's batches. Meanwhile the worker of
the new group loads and measures the model while it serves others. *Failed* requests have no answer,
no refusal and no expiry with a reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live.load import Calls
from ray_slo.simulation.arrivals import Poisson

SOURCE = "ray-slo, SHEPHERD §4"
ASKED = [("* · during moves", "failed", "≤", 0)]
MODELS = ("digits-s", "digits-m", "digits-xs")
MOVED = "digits-m"
GROUPS = {"a": ["digits-s", "digits-m"], "b": ["digits-xs"]}
SLO_S = 1.0
RATE = 30.0  # requests per second, of all models together
SETTLE_S = 60.0  # a move that takes longer fails


@dataclass(frozen=True)
class Seen:
    """What became of one request."""

    sent_s: float
    model: str
    status: str  # "answered", or as in `ray_slo.load.drive`
    latency_s: float


def run(quick: bool, seed: int) -> list[Row]:
    from ray_slo.demo.systems import APP, local_serve, running

    still_s, moves, pause_s = (2.0, 1, 1.0) if quick else (20.0, 6, 4.0)
    with local_serve(), running(application()):
        from ray import serve

        handle = serve.get_app_handle(APP)
        seen, moved = asyncio.run(drive_and_move(handle, still_s, moves, pause_s, seed))
    return rows(seen, moved)


def application() -> Any:
    """Return the application: three networks in two groups."""
    from ray_slo.serve import build_app

    models = {
        name: {
            "callable": "ray_slo.demo.digits:Digits",
            "kwargs": {"variant": name},
            "latency_slo_ms": 1e3 * SLO_S,
            "max_batch_size": 32,
        }
        for name in MODELS
    }
    cpu = {"default": {"ray_actor_options": {"num_cpus": 1}}}
    groups = {name: {"workers": cpu, "models": served} for name, served in GROUPS.items()}
    return build_app({"models": models, "groups": groups, "profile_seconds": 1.0, "name": "digits"})


async def drive_and_move(
    handle: Any, still_s: float, moves: int, pause_s: float, seed: int
) -> tuple[list[Seen], list[tuple[float, float]]]:
    """Send requests until all moves are done; return the requests and (begin, end) of each move."""
    from ray_slo.demo.digits.data import test_set, to_png

    images, _ = test_set()
    pictures = [to_png(image) for image in images[:100]]
    rng = np.random.default_rng(seed)
    calls = Calls()

    async def one(at: float, what: tuple[str, bytes]) -> Seen:
        model, picture = what
        reply = await calls.call(at, handle.remote, picture, model=model)
        return Seen(at, model, reply.status, reply.latency_s)

    async def settled() -> bool:
        status = await handle.slo_status.remote()
        return bool(status["plan"].get("state") == "settled")

    async def move() -> list[tuple[float, float]]:
        done = []
        await asyncio.sleep(still_s)
        for i in range(moves):
            began = calls.now_s
            await handle.slo_move.remote(MOVED, "ba"[i % 2])
            until = began + SETTLE_S
            while not await settled():
                if calls.now_s > until:
                    raise TimeoutError(f"{MOVED} did not move within {SETTLE_S:g} s")
                await asyncio.sleep(0.1)
            done.append((began, calls.now_s))
            await asyncio.sleep(pause_s)
        return done

    times = Poisson(rate=RATE).times(still_s + moves * SETTLE_S, rng).tolist()
    due = (
        (at, (str(rng.choice(MODELS)), pictures[int(rng.integers(len(pictures)))])) for at in times
    )
    moved, seen = await calls.beside(move(), due, one)
    return seen, moved


def rows(seen: list[Seen], moved: list[tuple[float, float]]) -> list[Row]:
    """Return the rows: what became of requests before, during and after moves."""
    first = moved[0][0]
    phases = {
        "before the first move": [s for s in seen if s.sent_s < first],
        "during moves": [s for s in seen if any(a <= s.sent_s <= b for a, b in moved)],
        "after moves": [
            s for s in seen if s.sent_s > first and not any(a <= s.sent_s <= b for a, b in moved)
        ],
        "all": seen,
    }
    longest = max(b - a for a, b in moved)
    made = [
        Row("moves", "moves", "", len(moved)),
        Row("moves", "median time of a move", "s", float(np.median([b - a for a, b in moved]))),
        Row("moves", "longest", "s", longest),
    ]
    for who, models in ((MOVED, {MOVED}), ("the other models", set(MODELS) - {MOVED})):
        for phase, requests in phases.items():
            mine = [s for s in requests if s.model in models]
            answered = [s.latency_s for s in mine if s.status == "answered"]
            late = sum(latency > SLO_S for latency in answered)
            refused = sum(s.status in ("refused", "expired") for s in mine)
            p50, p95 = np.quantile(answered, (0.5, 0.95)) if answered else (np.nan, np.nan)
            case = f"{who}, {RATE:g} requests/s on all models · {phase}"
            made += [
                Row(case, "requests", "", len(mine)),
                Row(case, "failed", "", len(mine) - len(answered) - refused),
                Row(case, "refused", "", refused),
                Row(case, "late", "", late),
                Row(case, "latency p50", "ms", 1e3 * float(p50)),
                Row(case, "latency p95", "ms", 1e3 * float(p95)),
            ]
    return made
