"""Policies in virtual time: workloads, the discrete-event host, reports, goodput search."""

from ray_slo.simulation.pipeline_report import PipelineReport
from ray_slo.simulation.pipelines import simulate_pipeline
from ray_slo.simulation.report import Report
from ray_slo.simulation.search import GoodputResult, goodput_search
from ray_slo.simulation.simulator import PolicyError, WorkerEvent, simulate
from ray_slo.simulation.workloads import (
    Burst,
    Constant,
    Gamma,
    Gaussian,
    LogNormal,
    Mmpp,
    Poisson,
    Population,
    SloShare,
    Times,
    Trace,
    Workload,
    Zipf,
    changing_rates,
)

__all__ = [
    "Burst",
    "Constant",
    "Gamma",
    "Gaussian",
    "GoodputResult",
    "LogNormal",
    "Mmpp",
    "PipelineReport",
    "Poisson",
    "PolicyError",
    "Population",
    "Report",
    "SloShare",
    "Times",
    "Trace",
    "WorkerEvent",
    "Workload",
    "Zipf",
    "changing_rates",
    "goodput_search",
    "simulate",
    "simulate_pipeline",
]
