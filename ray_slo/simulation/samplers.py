"""Random numbers of the child requests that a request makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Literal

import numpy as np

from ray_slo.core.trees import Tree

Sampler = Callable[[int], list[int]]  # from n to the numbers of child requests of n requests
Items = Literal["poisson", "fixed"]


def samplers(
    trees: Iterable[Tree],
    variants: Mapping[str, Iterable[str]],
    items: Items,
    rng: np.random.Generator,
) -> dict[tuple[str, str], list[tuple[str, Sampler]]]:
    """Return the child tasks by task and variant, with functions that draw the numbers of their
    requests.

    Args:
        variants: variants by model.
        items: distribution around the factor. "fixed" gives the nearest whole numbers whose running
            mean is the factor.
    """
    return {
        (task.name, variant): [
            (child, _sampler(items, task.factor(variant, child), rng))
            for child in tree.children(task.name)
        ]
        for tree in trees
        for task in tree.tasks
        for variant in variants[task.model]
    }


def _sampler(items: Items, mean: float, rng: np.random.Generator) -> Sampler:
    if items == "poisson":
        return lambda n: rng.poisson(mean, n).tolist()

    def fixed() -> Iterator[int]:
        for i in count():
            yield math.floor((i + 1) * mean + 1e-9) - math.floor(i * mean + 1e-9)

    numbers = fixed()
    return lambda n: [next(numbers) for _ in range(n)]
