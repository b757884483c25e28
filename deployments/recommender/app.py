"""The application: a plain class with a batch method, for ray-slo, Ray Serve or your own loop.

A query is a user and a list of items to rank. Its *size* is the number of items, and its cost grows
with it (Kairos §2). Give the model `max_batch_size: 1000` (items) and policy `kairos`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ray_slo.models.devices import pick_device
from ray_slo.models.lanes import Lane
from ray_slo.models.running import How, OnRunner, Runner, Staged
from ray_slo.models.ways import fit

from .data import ITEMS, USERS

MAX_ITEMS = 1000
BASE_VARIABLE, ITEM_VARIABLE = "SIMULATED_BASE_MS", "SIMULATED_ITEM_MS"

_log = logging.getLogger(__name__)


class Query(NamedTuple):
    """A user, and the items to rank for them, shape (size,)."""

    user: int
    items: NDArray[np.int64]


class Answer(TypedDict):
    """The items, best first."""

    ranking: list[int]


class Ahead(NamedTuple):
    """Queries whose users and items are staged on the device."""

    queries: list[Query]
    staged: Staged


class Pace(NamedTuple):
    """The least time of a batch on *simulated* hardware: a base time plus a time per item.

    A worker that is done earlier sleeps, so its CPU must be faster than the simulated hardware. A
    kind of worker sets the times in the environment, in its `ray_actor_options`:
    `runtime_env: {env_vars: {SIMULATED_BASE_MS: "20", SIMULATED_ITEM_MS: "0.1"}}`. Without them,
    the time is that of the CPU alone.
    """

    base_s: float = 0.0
    per_item_s: float = 0.0

    @classmethod
    def from_environment(cls) -> Pace:
        """ValueError: not a number of milliseconds."""
        return cls(_milliseconds(BASE_VARIABLE), _milliseconds(ITEM_VARIABLE))

    def keep(self, started: float, items: int) -> None:
        """Sleep until a batch with this number of items, started at this `time.perf_counter()`, may
        end."""
        time.sleep(max(started + self.base_s + items * self.per_item_s - time.perf_counter(), 0.0))


def _milliseconds(variable: str) -> float:
    text = os.environ.get(variable, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{variable}: got {text!r}, wanted milliseconds, at least 0")
    return value / 1e3


class Recommender(OnRunner):
    """Ranks items for users.

    Args:
        network: "ncf" or "wide_deep".
        weights: "none" (random), "local" (trained here before), "download" (trained here once, as
            nobody publishes any) or a path; see `deployments.recommender.train.load`. Default:
            $RAY_SLO_WEIGHTS, else "download".
        threads: of torch. Default: torch's own, which is $OMP_NUM_THREADS where that is set; Ray
            sets it to the whole part of an actor's `num_cpus` (at least 1), so that a kind of
            worker with more CPUs is faster.
        device: "auto", "cpu", "cuda", "cuda:1", …
        how: the way in which the network is run; see `ray_slo.models.vision.load`.

    Raises:
        ValueError: unknown network, no such weights or device, threads that are no number.
    """

    def __init__(
        self,
        network: str = "wide_deep",
        weights: str | Path | None = None,
        threads: int | None = None,
        device: str = "auto",
        how: str | Mapping[str, Any] | How = "auto",
    ) -> None:
        if threads is not None:
            if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
                raise ValueError(f"threads: got {threads!r}, wanted a whole number from 1")
            import torch

            torch.set_num_threads(threads)
        from .train import load

        self.runner, self.runs = fit(
            load(network, weights),
            pick_device(device),
            lambda runner, size: _stage(runner, [self.example_input(size)]),
            how,
            plain=How(),
            fixed_shape=False,  # recordings are of few items; most queries have more
            call=lambda network, pairs: network(pairs["users"], pairs["items"]),
            sizes=(1, MAX_ITEMS),
        )
        _log.info("%s runs in %s", network, self.runs)
        self.pace = Pace.from_environment()

    def stage(self, queries: list[Query]) -> Ahead:
        """Copy the next batch to the device while another one runs."""
        return Ahead(queries, _stage(self.runner, queries))

    def __call__(self, batch: list[Query] | Ahead) -> list[Answer]:
        """One ranking per query, in the same order."""
        if not batch:
            return []
        started = time.perf_counter()
        queries, staged = batch if isinstance(batch, Ahead) else self.stage(batch)
        scores = self.runner(staged).cpu().numpy()
        items = np.concatenate([query.items for query in queries])
        ends = np.cumsum([len(query.items) for query in queries])[:-1]
        answers: list[Answer] = [
            {"ranking": of_query[np.argsort(-score, kind="stable")].tolist()}
            for of_query, score in zip(np.split(items, ends), np.split(scores, ends), strict=True)
        ]
        self.pace.keep(started, len(items))
        return answers

    @staticmethod
    def size(query: Query) -> int:
        """Items in it: what a query costs, in the unit of profiles and of `max_batch_size`."""
        return len(query.items)

    @staticmethod
    def preprocess(item: Any) -> Query:
        """``{"user": 7, "items": [3, 14, 15]}``, or a `Query`.

        ValueError names the field that was wrong.
        """
        if isinstance(item, Query):
            user, items = item
        elif isinstance(item, dict) and set(item) == {"user", "items"}:
            user, items = item["user"], item["items"]
        else:
            keys = f"the keys {sorted(map(str, item))}" if isinstance(item, dict) else _kind(item)
            raise ValueError(f"query: got {keys}, wanted {{'user': number, 'items': [number, …]}}")
        if isinstance(user, bool) or not isinstance(user, int | np.integer):
            raise ValueError(f"user: got {_kind(user)}, wanted a whole number")
        if not 0 <= user < USERS:
            raise ValueError(f"user: got {user}, wanted 0 to {USERS - 1}")
        if not isinstance(items, list | tuple | np.ndarray):
            raise ValueError(f"items: got {_kind(items)}, wanted a list of whole numbers")
        if not 1 <= len(items) <= MAX_ITEMS:
            raise ValueError(f"items: got {len(items)}, wanted 1 to {MAX_ITEMS}")
        if not isinstance(items, np.ndarray) and not set(map(type, items)) <= {int}:
            raise ValueError("items: got something else among them, wanted whole numbers")
        array = np.asarray(items)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"items: got {array.dtype} of shape {array.shape}, wanted a list of whole numbers"
            )
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= ITEMS:
            wrong = low if low < 0 else high
            raise ValueError(f"items: got {wrong} among them, wanted 0 to {ITEMS - 1}")
        return Query(int(user), array.astype(np.int64))

    @staticmethod
    def example_input(size: int = 1) -> Query:
        """A preprocessed query of so many items, for profiling."""
        rng = np.random.default_rng(size)
        return Query(int(rng.integers(USERS)), rng.integers(0, ITEMS, size))


def _stage(runner: Runner, queries: list[Query]) -> Staged:
    users = np.repeat([query.user for query in queries], [len(query.items) for query in queries])
    items = np.concatenate([query.items for query in queries])

    def make(lane: Lane) -> dict[str, Any]:
        return {"users": lane.put(users), "items": lane.put(items)}

    return runner.stage(make)


def payloads(count: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """What `ray-slo bench --payload deployments.recommender:payloads` sends: queries of 1 to
    `MAX_ITEMS` items, half of them of less than 90, as in `configs/plan-pool.yaml`."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(np.rint(90 * np.exp(rng.normal(0, 1.1, count))), 1, MAX_ITEMS).astype(int)
    sizes[:2] = 1, MAX_ITEMS
    return [
        {
            "user": int(rng.integers(USERS)),
            "items": rng.choice(ITEMS, size, replace=False).tolist(),
        }
        for size in sizes
    ]


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
