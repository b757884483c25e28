"""Requests, batches, latency profiles, deadline queues, the cluster view, decisions.

Pure Python and NumPy: no ray, no clock, no sleep, no unseeded randomness. Each name is imported on
first use, so code that does not need NumPy does not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_slo.core.cluster import Assigned as Assigned
    from ray_slo.core.cluster import Cluster as Cluster
    from ray_slo.core.cluster import DispatchDelay as DispatchDelay
    from ray_slo.core.cluster import Model as Model
    from ray_slo.core.cluster import Variant as Variant
    from ray_slo.core.cluster import Worker as Worker
    from ray_slo.core.decisions import Action as Action
    from ray_slo.core.decisions import Decision as Decision
    from ray_slo.core.decisions import Dispatch as Dispatch
    from ray_slo.core.decisions import Drop as Drop
    from ray_slo.core.decisions import DropReason as DropReason
    from ray_slo.core.decisions import Preempt as Preempt
    from ray_slo.core.online import OnlineProfile as OnlineProfile
    from ray_slo.core.policy import Policy as Policy
    from ray_slo.core.profiles import LatencyProfile as LatencyProfile
    from ray_slo.core.queues import DeadlineQueue as DeadlineQueue
    from ray_slo.core.requests import BatchOutcome as BatchOutcome
    from ray_slo.core.requests import BatchStatus as BatchStatus
    from ray_slo.core.requests import Request as Request
    from ray_slo.core.requests import RequestId as RequestId
    from ray_slo.core.requests import Upstream as Upstream
    from ray_slo.core.requests import WorkerId as WorkerId
    from ray_slo.core.trees import Tree as Tree
    from ray_slo.core.trees import TreeTask as TreeTask

_LAZY = {
    name: f"ray_slo.core.{room}"
    for room, names in {
        "online": "OnlineProfile",
        "cluster": "Assigned Cluster DispatchDelay Model Variant Worker",
        "decisions": "Action Decision Dispatch Drop DropReason Preempt",
        "policy": "Policy",
        "profiles": "LatencyProfile",
        "queues": "DeadlineQueue",
        "requests": "BatchOutcome BatchStatus Request RequestId Upstream WorkerId",
        "trees": "Tree TreeTask",
    }.items()
    for name in names.split()
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ray_slo.core' has no attribute {name!r}")
