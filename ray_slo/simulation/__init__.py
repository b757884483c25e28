"""Policies in virtual time: workloads, the discrete-event host, reports, goodput search."""

from ray_slo.simulation.report import Report
from ray_slo.simulation.search import GoodputResult, goodput_search
from ray_slo.simulation.simulator import PolicyError, WorkerEvent, simulate
from ray_slo.simulation.workloads import (
    Constant,
    Gamma,
    Poisson,
    SloShare,
    Times,
    Trace,
    Workload,
    Zipf,
)

__all__ = [
    "Constant",
    "Gamma",
    "GoodputResult",
    "Poisson",
    "PolicyError",
    "Report",
    "SloShare",
    "Times",
    "Trace",
    "WorkerEvent",
    "Workload",
    "Zipf",
    "goodput_search",
    "simulate",
]
