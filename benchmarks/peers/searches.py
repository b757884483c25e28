"""Searches for the best configuration that Kairos+ is compared with (Kairos §8.3).

Each is a generator of (index, value) pairs in the order of evaluation. The space has configurations
(rows of instance counts). As in the paper, all searches skip sub-configurations of those already
evaluated, because fewer instances cannot serve more. A space can turn this off (`prune=False`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Evaluate = Callable[[int], float]
Steps = Iterator[tuple[int, float]]


class Space:
    """Configurations, and which of them are still candidates."""

    def __init__(self, counts: Ints, evaluate: Evaluate, prune: bool = True) -> None:
        self.counts = counts
        self._prune = prune
        self.live = np.ones(len(counts), dtype=bool)
        self.known: dict[int, float] = {}
        self._evaluate = evaluate
        self._index = {tuple(row): i for i, row in enumerate(counts.tolist())}

    def evaluate(self, i: int) -> float:
        self.known[i] = self._evaluate(i)
        self.live[i] = False
        if self._prune:
            self.live &= ~(self.counts <= self.counts[i]).all(axis=1)
        return self.known[i]

    def find(self, row: Ints) -> int | None:
        return self._index.get(tuple(row.tolist()))


def random_search(space: Space, rng: np.random.Generator) -> Steps:
    """Evaluate remaining configurations at random."""
    while space.live.any():
        i = int(rng.choice(np.flatnonzero(space.live)))
        yield i, space.evaluate(i)


def annealing(space: Space, rng: np.random.Generator, cooling: float = 0.95) -> Steps:
    """Simulated annealing from a random start: steps add, remove or exchange an instance.

    A neighbour that is not a candidate any more is skipped without an evaluation.
    """
    at = int(rng.integers(len(space.counts)))
    value = space.evaluate(at)
    yield at, value
    temperature = 0.2
    while space.live.any():
        row = space.counts[at].copy()
        for _ in range(int(rng.integers(1, 3))):
            row[rng.integers(len(row))] += rng.choice([-1, 1])
        temperature = max(temperature * cooling, 0.01)
        i = space.find(row)
        if i is None or not space.live[i]:
            if rng.random() < 0.05:  # no candidates near here: start elsewhere
                at = int(rng.choice(np.flatnonzero(space.live)))
                value = space.evaluate(at)
                yield at, value
            continue
        new = space.evaluate(i)
        yield i, new
        gain = (new - value) / max(value, new, 1e-9)
        if gain >= 0 or rng.random() < math.exp(gain / temperature):
            at, value = i, new


def genetic(space: Space, rng: np.random.Generator, population: int = 10) -> Steps:
    """Cross two good configurations and sometimes mutate; a random one if no child is left."""
    for i in rng.permutation(len(space.counts))[:population].tolist():
        if space.live[i]:
            yield i, space.evaluate(i)
    while space.live.any():
        best = sorted(space.known, key=space.known.__getitem__)[-population:]
        child: int | None = None
        for _ in range(20):
            one, two = (space.counts[i] for i in rng.choice(best, 2))
            row = np.where(rng.random(len(one)) < 0.5, one, two)
            if rng.random() < 0.5:
                row[rng.integers(len(row))] += rng.choice([-1, 1])
            child = space.find(row)
            if child is not None and space.live[child]:
                break
            child = None
        i = int(rng.choice(np.flatnonzero(space.live))) if child is None else child
        yield i, space.evaluate(i)


def bayesian(space: Space, rng: np.random.Generator, first: int = 5) -> Steps:
    """Ribbon's Bayesian optimisation: Gaussian process (Matérn 5/2) and expected improvement."""
    from scipy.stats import norm
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern, WhiteKernel

    scaled = space.counts / space.counts.max(axis=0)
    for i in rng.permutation(len(space.counts))[:first].tolist():
        if space.live[i]:
            yield i, space.evaluate(i)
    kernel = Matern(length_scale=0.4, nu=2.5) + WhiteKernel(1e-3)
    while space.live.any():
        model = GaussianProcessRegressor(kernel, normalize_y=True, optimizer=None)
        known = list(space.known)
        model.fit(scaled[known], [space.known[i] for i in known])
        left = np.flatnonzero(space.live)
        mean, std = model.predict(scaled[left], return_std=True)
        best = max(space.known.values())
        z = (mean - best) / np.maximum(std, 1e-9)
        gain = (mean - best) * norm.cdf(z) + std * norm.pdf(z)
        i = int(left[gain.argmax()])
        yield i, space.evaluate(i)


SEARCHES: dict[str, Callable[[Space, np.random.Generator], Steps]] = {
    "random": random_search,
    "genetic": genetic,
    "annealing": annealing,
    "Bayesian (Ribbon)": bayesian,
}
