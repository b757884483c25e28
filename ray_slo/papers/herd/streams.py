"""The affinity of models, and sets of similar ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def affinity(alpha: ArrayLike, beta: ArrayLike) -> Array:
    """Return the affinity A(m_i, m_j) for ℓ(b) = α·b + β, shape (models, models) (SHEPHERD §5.2,
    Eq. 3)."""
    a, b = np.asarray(alpha, float), np.asarray(beta, float)
    if a.min() <= 0 or b.min() < 0:
        raise ValueError("alpha must be positive and beta at least 0")
    single = (a + b)[:, None] / a
    rest = a + b - b[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        paired = np.minimum(single, np.maximum(a[:, None] / rest, a[:, None] / a))
    return np.asarray(np.where(rest <= 0, single, paired))


def affinity_sets(alpha: ArrayLike, beta: ArrayLike, k: float) -> list[int]:
    """Return the number of each model's set. Any two models of a set have an affinity of at most
    `k` ≥ 1, in both directions. The method is complete linkage, because finding the fewest sets is
    NP-hard."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    matrix = affinity(alpha, beta)
    if len(matrix) == 1:
        return [0]
    # SciPy is imported late, because every replica imports this module.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distance = squareform(np.maximum(matrix, matrix.T), checks=False)  # without the diagonal
    labels: Array = fcluster(linkage(distance, "complete"), k, "distance")
    return [int(label) - 1 for label in labels]
