"""Policies in virtual time: workloads, the discrete-event host, reports, goodput search.

Modules are imported on first use, because replicas need only the form of the decision log.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_slo.simulation.application import simulate_application as simulate_application
    from ray_slo.simulation.application_report import ApplicationReport as ApplicationReport
    from ray_slo.simulation.arrivals import Burst as Burst
    from ray_slo.simulation.arrivals import Constant as Constant
    from ray_slo.simulation.arrivals import Gamma as Gamma
    from ray_slo.simulation.arrivals import Mmpp as Mmpp
    from ray_slo.simulation.arrivals import Poisson as Poisson
    from ray_slo.simulation.arrivals import Population as Population
    from ray_slo.simulation.arrivals import Times as Times
    from ray_slo.simulation.arrivals import Trace as Trace
    from ray_slo.simulation.books import PolicyError as PolicyError
    from ray_slo.simulation.engine import WorkerEvent as WorkerEvent
    from ray_slo.simulation.report import Report as Report
    from ray_slo.simulation.search import GoodputResult as GoodputResult
    from ray_slo.simulation.search import goodput_search as goodput_search
    from ray_slo.simulation.simulator import simulate as simulate
    from ray_slo.simulation.workloads import Gaussian as Gaussian
    from ray_slo.simulation.workloads import LogNormal as LogNormal
    from ray_slo.simulation.workloads import SloShare as SloShare
    from ray_slo.simulation.workloads import Workload as Workload
    from ray_slo.simulation.workloads import Zipf as Zipf

_LAZY = {
    name: f"ray_slo.simulation.{room}"
    for room, names in {
        "application": "simulate_application",
        "application_report": "ApplicationReport",
        "arrivals": "Burst Constant Gamma Mmpp Poisson Population Times Trace",
        "books": "PolicyError",
        "engine": "WorkerEvent",
        "report": "Report",
        "search": "GoodputResult goodput_search",
        "simulator": "simulate",
        "workloads": "Gaussian LogNormal SloShare Workload Zipf",
    }.items()
    for name in names.split()
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ray_slo.simulation' has no attribute {name!r}")
