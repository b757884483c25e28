"""What `auto` may run: settings of the other policies, by the shape of the application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ray_slo.core.cluster import Cluster
from ray_slo.core.rehearsal import Setting
from ray_slo.core.trees import Tree

PLAIN = Setting("deferred", {})
CONSOLIDATE = Setting("deferred", {"objective": "consolidate"})
PREFIX = Setting("deferred", {"gathering": "prefix"})
EAGER = Setting("eager", {})
PRICE = Setting("price", {})
KAIROS = Setting("kairos", {"batch": True})
LARGEST = Setting("flex", {"preemption": False})
FLEX = Setting("flex", {})
DEFERRED_FLEX = Setting("deferred_flex", {})


class Shape(NamedTuple):
    """What decides which settings fit.

    Attributes:
        models: how many.
        variants: the largest number of a model's.
        kinds: kinds of hardware.
        sizes: requests of other sizes than 1 came.
    """

    models: int = 0
    variants: int = 0
    kinds: int = 0
    sizes: bool = False

    @classmethod
    def of(cls, cluster: Cluster, sizes: bool) -> Shape:
        """Of what the workers serve."""
        return cls(
            len(cluster.models),
            max((len(m.variants) for m in cluster.models.values()), default=0),
            len({worker.hardware for worker in cluster.workers.values()}),
            sizes,
        )


def candidates(shape: Shape, trees: Sequence[Tree], preempt: bool) -> list[Setting]:
    """Settings that fit; the first is the best guess."""
    tree = any(len(t.tasks) > 1 for t in trees)
    if shape.sizes:
        found = [KAIROS, PLAIN] if shape.kinds > 1 else [PLAIN, KAIROS]
    elif shape.variants > 1:
        found = [PRICE, PLAIN] if shape.models == 1 and not tree else [PLAIN, PRICE]
    else:
        found = [PLAIN]
    found += [EAGER, LARGEST, CONSOLIDATE, PREFIX]
    if shape.kinds > 1 and not shape.sizes and not tree:
        found.append(KAIROS)
    if preempt:
        found += [DEFERRED_FLEX, FLEX]
    return found
