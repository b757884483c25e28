"""Requests, batches, latency profiles, deadline queues, the cluster view, decisions.

Pure Python and NumPy: no ray, no clock, no sleep, no unseeded randomness. Each name is imported on
first use, so that what needs no NumPy goes without.
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
    from ray_slo.core.policy import Policy as Policy
    from ray_slo.core.profiles import LatencyProfile as LatencyProfile
    from ray_slo.core.profiles import OnlineProfile as OnlineProfile
    from ray_slo.core.queues import DeadlineQueue as DeadlineQueue
    from ray_slo.core.requests import BatchOutcome as BatchOutcome
    from ray_slo.core.requests import BatchStatus as BatchStatus
    from ray_slo.core.requests import Request as Request
    from ray_slo.core.requests import RequestId as RequestId
    from ray_slo.core.requests import Upstream as Upstream
    from ray_slo.core.requests import WorkerId as WorkerId

_LAZY = {
    "Action": "ray_slo.core.decisions",
    "Assigned": "ray_slo.core.cluster",
    "BatchOutcome": "ray_slo.core.requests",
    "BatchStatus": "ray_slo.core.requests",
    "Cluster": "ray_slo.core.cluster",
    "DeadlineQueue": "ray_slo.core.queues",
    "Decision": "ray_slo.core.decisions",
    "Dispatch": "ray_slo.core.decisions",
    "DispatchDelay": "ray_slo.core.cluster",
    "Drop": "ray_slo.core.decisions",
    "DropReason": "ray_slo.core.decisions",
    "LatencyProfile": "ray_slo.core.profiles",
    "Model": "ray_slo.core.cluster",
    "OnlineProfile": "ray_slo.core.profiles",
    "Policy": "ray_slo.core.policy",
    "Preempt": "ray_slo.core.decisions",
    "Request": "ray_slo.core.requests",
    "RequestId": "ray_slo.core.requests",
    "Upstream": "ray_slo.core.requests",
    "Variant": "ray_slo.core.cluster",
    "Worker": "ray_slo.core.cluster",
    "WorkerId": "ray_slo.core.requests",
}
__all__ = [
    "Action",
    "Assigned",
    "BatchOutcome",
    "BatchStatus",
    "Cluster",
    "DeadlineQueue",
    "Decision",
    "Dispatch",
    "DispatchDelay",
    "Drop",
    "DropReason",
    "LatencyProfile",
    "Model",
    "OnlineProfile",
    "Policy",
    "Preempt",
    "Request",
    "RequestId",
    "Upstream",
    "Variant",
    "Worker",
    "WorkerId",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ray_slo.core' has no attribute {name!r}")
