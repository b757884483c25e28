"""Loads a network, trained on first use and kept: ``python -m deployments.recommender.train``.

Positives are what a user interacted with; each comes with `NEGATIVES` items drawn at random. Seeds
are fixed. The measure is NCF's: is the held-out item among the ten best of it and 99 others that
the user did not interact with (hit rate at 10)?
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ray_slo.models.loading import one_of, say, weights_source

from . import data

if TYPE_CHECKING:
    import torch

EPOCHS = {"ncf": 4, "wide_deep": 1}
NAMES = tuple(EPOCHS)
NEGATIVES = 2
BATCH = 512
LEARNING_RATE = 2e-3
TABLE_RATE = 1e-2  # of embeddings: each row is seen in few batches
OTHERS = 99
TOP = 10
SEED = 0
THREADS = 1  # several stall each other where cores are busy


@cache
def _version() -> str:
    """A hash of everything the weights depend on: code and recipe."""
    digest = hashlib.sha256()
    for name in ("data.py", "networks.py", "train.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:12]


def cache_folder() -> Path:
    """``$RAY_SLO_CACHE`` (default ``~/.cache/ray-slo``) / recommender / version of the recipe."""
    root = os.environ.get("RAY_SLO_CACHE") or Path.home() / ".cache" / "ray-slo"
    return Path(root) / "recommender" / _version()


def check(name: str) -> str:
    """The name of a network.

    Raises:
        ValueError: it is none; lists the valid ones.
    """
    if name not in NAMES:
        raise one_of("network", name, list(NAMES))
    return name


def load(name: str, weights: str | Path | None = None) -> torch.nn.Module:
    """A network, ready to score: (users, items) to logits.

    Args:
        name: one of `NAMES`.
        weights: "none" (random, the same in every process), "local" (trained here before),
            "download" (trained here if need be, once per machine), or the path of a state dict, or
            of a folder that holds it as `<name>.pt`. Default: $RAY_SLO_WEIGHTS, else "download".

    Raises:
        ValueError: unknown name, or no such weights, or of another network.
        OSError: "download", and the cache cannot be written.
    """
    check(name)
    source = weights_source(
        weights,
        f"a state dict of {name}, or of a folder with {name}.pt",
        download="trains what is missing, once",
    )
    if source == "local" and not _file(name).is_file():
        raise ValueError(
            f"weights: got 'local', but {str(_file(name))!r} is not there; make it with python -m "
            "deployments.recommender.train, or " + say("'download' (trains it)")
        )
    if source == "download":
        _train_if_missing(name)
    if source == "local" or source == "download":
        source = _file(name)
    module = _fresh(name)
    if isinstance(source, Path):
        _fill(module, name, source / f"{name}.pt" if source.is_dir() else source)
    return module.eval().requires_grad_(False)


def hit_rate(name: str) -> float:
    """Measured share of users in 0..1 whose held-out item is among the `TOP`; trains if need be."""
    _train_if_missing(check(name))
    measured: float = json.loads(_file(name).with_suffix(".json").read_text())["hit_rate"]
    return measured


def _file(name: str) -> Path:
    return cache_folder() / f"{name}.pt"


def _fresh(name: str) -> torch.nn.Module:
    import torch

    from .networks import NETWORKS

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return NETWORKS[name]()


def _fill(module: torch.nn.Module, name: str, path: Path) -> None:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch each have their own
        raise ValueError(
            f"weights: {str(path)!r} is not what torch.save(network.state_dict(), path) writes"
        ) from error
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: {str(path)!r} is not a state dict of {name}") from error


def _train_if_missing(name: str) -> None:
    """One process trains; the others wait for it."""
    target = _file(name)
    if target.exists():
        return
    from filelock import FileLock  # comes with torch

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if target.exists():
            return
        import torch

        module = train(name)
        rate = measure(_scorer(module))
        target.with_suffix(".json").write_text(json.dumps({"hit_rate": rate}) + "\n")
        partial = target.with_suffix(".tmp")  # renamed: a reader sees a whole file or none
        torch.save(module.state_dict(), partial)
        partial.replace(target)


def train(name: str, epochs: int | None = None) -> torch.nn.Module:
    """A network trained from scratch; the caller's torch settings are kept."""
    import torch
    from torch.nn import functional

    seen = data.interactions().seen
    users = torch.arange(data.USERS).repeat_interleave(seen.shape[1])
    items = torch.from_numpy(seen.reshape(-1).copy())
    module = _fresh(name).train()
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(SEED)
    tables, layers = [], []
    for owner in module.modules():
        mine = list(owner.parameters(recurse=False))
        (tables if isinstance(owner, torch.nn.Embedding) else layers).extend(mine)
    optimizer = torch.optim.Adam(
        [{"params": tables, "lr": TABLE_RATE}, {"params": layers, "lr": LEARNING_RATE}]
    )
    try:
        with torch.enable_grad():
            for _ in range(EPOCHS[name] if epochs is None else epochs):
                for batch in torch.randperm(len(users), generator=generator).split(BATCH):
                    others = torch.randint(
                        data.ITEMS, (NEGATIVES * len(batch),), generator=generator
                    )
                    logits = module(
                        users[batch].repeat(1 + NEGATIVES), torch.cat([items[batch], others])
                    )
                    wanted = torch.zeros(len(logits))
                    wanted[: len(batch)] = 1
                    loss = functional.binary_cross_entropy_with_logits(logits, wanted)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return module.eval().requires_grad_(False)


Score = Callable[[data.Ints, data.Ints], np.ndarray]
"""Users and items, both (n,), to scores (n,)."""


def _scorer(module: torch.nn.Module) -> Score:
    import torch

    def score(users: data.Ints, items: data.Ints) -> np.ndarray:
        with torch.inference_mode():
            logits: np.ndarray = module(torch.from_numpy(users), torch.from_numpy(items)).numpy()
        return logits

    return score


def measure(score: Score) -> float:
    """Hit rate at `TOP` on the held-out items, in 0..1."""
    seen, held_out = data.interactions()
    rng = np.random.default_rng(SEED + 2)
    hits = 0
    for user in range(data.USERS):
        free = np.ones(data.ITEMS, dtype=bool)
        free[seen[user]] = free[held_out[user]] = False
        others = rng.choice(np.flatnonzero(free), OTHERS, replace=False)
        items = np.append(others, held_out[user])
        scores = score(np.full(len(items), user), items)
        hits += int((scores > scores[-1]).sum() < TOP)
    return hits / data.USERS


def popularity() -> Score:
    """What needs no network: items by how often they occur in what is learned from."""
    counts = np.bincount(data.interactions().seen.reshape(-1), minlength=data.ITEMS)
    return lambda users, items: counts[items].astype(float)


def main() -> None:
    """Trains what is missing; prints size, cost on one core, and what the networks are worth."""
    import torch

    torch.set_num_threads(THREADS)
    print(f"popularity alone: hit rate at {TOP} {100 * measure(popularity()):.1f} %")
    rng = np.random.default_rng(SEED)
    for name in NAMES:
        start = time.perf_counter()
        module = load(name)
        took = time.perf_counter() - start
        score, times = _scorer(module), {}
        for size in (1, 100, 1000):
            users, items = np.zeros(size, np.int64), rng.integers(0, data.ITEMS, size)
            runs = []
            for _ in range(12):
                start = time.perf_counter()
                score(users, items)
                runs.append(time.perf_counter() - start)
            times[size] = 1e3 * float(np.median(runs[2:]))
        print(
            f"{name}: loaded or trained in {took:.1f} s, "
            f"{sum(p.numel() for p in module.parameters()):,} parameters, "
            f"hit rate at {TOP} {100 * hit_rate(name):.1f} %, "
            + ", ".join(f"{size} items {ms:.1f} ms" for size, ms in times.items())
        )


if __name__ == "__main__":
    main()
