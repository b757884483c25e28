"""Trains the family on first use and keeps it: ``python -m ray_slo.demo.digits.train``.

One training run per trunk: warm-up and cosine, then one more epoch per further snapshot; networks
that share a run share its snapshots. Seeds are fixed. The accuracy is the one measured on the
held-out half with the very weights that are stored beside it. The recipes were chosen by looking at
that half, so the figures are slightly kind.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ray_slo.core.files import whole
from ray_slo.demo.digits import data
from ray_slo.demo.digits.family import FAMILY, Spec, spec

if TYPE_CHECKING:
    import torch

    from ray_slo.demo.digits.networks import Network, Trunk

T = TypeVar("T")

BATCH = 32
LEARNING_RATE = 3e-3
SNAPSHOT_RATE = 0.5  # of LEARNING_RATE: each snapshot epoch starts there and falls to zero
SEED = 0
THREADS = 1  # the tensors are small, and several threads stall each other where cores are busy


@dataclass(frozen=True)
class Trained:
    """A network ready to run (eval mode) and its accuracy on the held-out half, in 0..1."""

    module: Network
    accuracy: float


@cache
def _version() -> str:
    """A hash of everything the weights depend on: code and recipe."""
    digest = hashlib.sha256()
    for name in ("family.py", "data.py", "networks.py", "train.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:12]


def cache_folder() -> Path:
    """``$RAY_SLO_CACHE`` (default ``~/.cache/ray-slo``) / digits / version of the recipe."""
    root = os.environ.get("RAY_SLO_CACHE") or Path.home() / ".cache" / "ray-slo"
    return Path(root) / "digits" / _version()


def _names(names: Iterable[str] | None) -> list[str]:
    return list(FAMILY) if names is None else [spec(name).name for name in names]


def _path(name: str) -> Path:
    return cache_folder() / f"{name}.npz"


def _stored(name: str, keys: Iterable[str] | None = None) -> dict[str, np.ndarray] | None:
    """Arrays of a cached network (all, or some), None where there is no readable file."""
    try:
        with _path(name).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {key: file[key] for key in (file.files if keys is None else keys)}
    except (FileNotFoundError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None  # absent, or cut short by a full disk: train again


def _store(name: str, module: Network, accuracy: float) -> None:
    """Store a network. A reader sees a whole file or none."""
    arrays = {key: value.numpy() for key, value in module.state_dict().items()}
    with whole(_path(name)) as half, half.open("wb") as file:
        np.savez(file, accuracy=np.float64(accuracy), **arrays)


def _assemble(recipe: Spec, state: dict[str, torch.Tensor]) -> Network:
    import torch

    from ray_slo.demo.digits.networks import Network

    with torch.random.fork_rng(devices=[]):  # the weights drawn here are overwritten at once
        module = Network(recipe)
    module.load_state_dict(state)
    return module.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def _load(name: str) -> Trained | None:
    arrays = _stored(name)
    if arrays is None:
        return None
    import torch

    accuracy = float(arrays.pop("accuracy"))
    state = {key: torch.from_numpy(value) for key, value in arrays.items()}
    return Trained(_assemble(spec(name), state), accuracy)


def _distort(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random affine maps (count, 2, 3): rotation, scale, shear and shift, as between hands."""
    import torch

    def spread(width: float) -> torch.Tensor:
        return (torch.rand(count, generator=generator) - 0.5) * width

    angle, scale, shear = spread(0.35), 1 + spread(0.2), spread(0.3)
    top = torch.stack([scale * angle.cos(), scale * (shear - angle.sin()), spread(0.35)], 1)
    bottom = torch.stack([scale * angle.sin(), scale * angle.cos(), spread(0.35)], 1)
    return torch.stack([top, bottom], 1)


def _snapshots(recipe: Spec, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """The first ``count`` snapshots of the recipe's run; a longer run begins with the same ones."""
    import torch
    from torch.nn import functional

    from ray_slo.demo.digits.networks import Trunk, look

    images, labels = (torch.from_numpy(part.copy()) for part in data.train_set())
    torch.manual_seed(SEED)
    trunk: Trunk = Trunk(recipe.width, recipe.blocks).to(memory_format=torch.channels_last).train()
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(trunk.parameters(), weight_decay=0.02)
    steps = math.ceil(len(images) / BATCH)

    def epochs(number: int, rate: float, warm: int) -> None:
        total, step = steps * number, 0
        for _ in range(number):
            for batch in torch.randperm(len(images), generator=generator).split(BATCH):
                rise = min(1.0, (step + 1) / warm)
                fall = 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / (total - warm)))
                optimizer.param_groups[0]["lr"] = rate * rise * fall
                seen = look(images[batch], _distort(len(batch), generator), recipe.side)
                loss = functional.cross_entropy(trunk(seen), labels[batch], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1

    epochs(recipe.epochs, LEARNING_RATE, warm=2 * steps)
    for index in range(count):
        if index:
            epochs(1, LEARNING_RATE * SNAPSHOT_RATE, warm=1)
        yield {key: value.clone() for key, value in trunk.state_dict().items()}


def _accuracy(module: Network) -> float:
    import torch

    images, labels = (torch.from_numpy(part.copy()) for part in data.test_set())
    with torch.inference_mode():
        # in pieces: one batch of all would leave the caches, and take half as long again
        guesses = torch.cat([module(piece).argmax(1) for piece in images.split(64)])
        return float((guesses == labels).double().mean())


def _train(names: list[str]) -> None:
    """Trains and stores these networks, one run per trunk; the caller's torch settings are kept."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for run in {spec(name).run: None for name in names}:
                group = [FAMILY[name] for name in names if FAMILY[name].run == run]
                longest = max(group, key=lambda recipe: recipe.members)
                snapshots = list(_snapshots(longest, longest.members))
                for recipe in group:
                    state = {
                        f"members.{index}.{key}": value
                        for index, snapshot in enumerate(snapshots[: recipe.members])
                        for key, value in snapshot.items()
                    }
                    module = _assemble(recipe, state)
                    _store(recipe.name, module, _accuracy(module))
    finally:
        torch.set_num_threads(threads)


def _complete(names: list[str], read: Callable[[str], T | None]) -> dict[str, T]:
    """``read`` of every name, after training those it has nothing for.

    One process trains, the others wait for it and read what it wrote.
    """
    found = {name: read(name) for name in names}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        from filelock import FileLock  # comes with torch

        cache_folder().mkdir(parents=True, exist_ok=True)
        with FileLock(cache_folder() / "train.lock"):
            absent = [name for name in missing if read(name) is None]
            if absent:
                _train(absent)
        found |= {name: read(name) for name in missing}
    result = {name: value for name, value in found.items() if value is not None}
    if len(result) < len(found):
        raise OSError(f"cannot read back the networks just written to {cache_folder()}")
    return result


def load_or_train(names: Iterable[str] | None = None) -> dict[str, Trained]:
    """The networks of these names (default: the family), from the cache where they are there.

    ValueError names the valid variants; OSError if the cache folder cannot be written.
    """
    return _complete(_names(names), _load)


def accuracies(names: Iterable[str] | None = None) -> dict[str, float]:
    """Measured accuracy per name; reads only that, and imports torch only if it must train."""

    def read(name: str) -> float | None:
        arrays = _stored(name, ["accuracy"])
        return None if arrays is None else float(arrays["accuracy"])

    return _complete(_names(names), read)


def measure(module: Network, sizes: Iterable[int] = range(1, 17), repeats: int = 15) -> np.ndarray:
    """Median seconds per call for each batch size, with torch's current threads."""
    import torch

    images = torch.from_numpy(data.test_set()[0].copy())
    medians = []
    with torch.inference_mode():
        for size in sizes:
            times = []
            for _ in range(repeats + 2):
                start = time.perf_counter()
                module(images[:size])
                times.append(time.perf_counter() - start)
            medians.append(float(np.median(times[2:])))
    return np.array(medians)


def main() -> None:
    """Trains what is missing and prints the family: size, cost on one core, accuracy."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from ray_slo.demo.digits.networks import macs

    console = Console()
    start = time.perf_counter()
    with console.status("training the digits family"):
        family = load_or_train()
    console.print(f"loaded or trained in {time.perf_counter() - start:.1f} s: {cache_folder()}")
    torch.set_num_threads(1)
    sizes = np.arange(1, 17)
    table = Table(title="l(b) = alpha * b + beta, one CPU thread, batch 1 to 16")
    for column in ("variant", "params", "Mmac", "l(1) ms", "alpha ms", "beta ms", "accuracy %"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, trained in family.items():
        times = measure(trained.module, sizes) * 1e3
        alpha, beta = np.polyfit(sizes, times, 1)
        table.add_row(
            name,
            f"{sum(p.numel() for p in trained.module.parameters()):,}",
            f"{macs(trained.module) / 1e6:.1f}",
            *(f"{value:.2f}" for value in (times[0], alpha, beta)),
            f"{100 * trained.accuracy:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
