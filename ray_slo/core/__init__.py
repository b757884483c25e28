"""Requests, batches, latency profiles, deadline queues, the cluster view, decisions.

Pure Python and NumPy: no ray, no clock, no sleep, no unseeded randomness.
"""

from ray_slo.core.cluster import Assigned, Cluster, DispatchDelay, Model, Variant, Worker
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason, Preempt
from ray_slo.core.policy import Policy
from ray_slo.core.profiles import LatencyProfile, OnlineProfile
from ray_slo.core.queues import DeadlineQueue
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, RequestId, Upstream, WorkerId

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
