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
    from ray_slo.simulation.pipeline_report import PipelineReport as PipelineReport
    from ray_slo.simulation.report import Report as Report
    from ray_slo.simulation.search import GoodputResult as GoodputResult
    from ray_slo.simulation.search import goodput_search as goodput_search
    from ray_slo.simulation.simulator import simulate as simulate
    from ray_slo.simulation.workloads import Gaussian as Gaussian
    from ray_slo.simulation.workloads import LogNormal as LogNormal
    from ray_slo.simulation.workloads import SloShare as SloShare
    from ray_slo.simulation.workloads import Workload as Workload
    from ray_slo.simulation.workloads import Zipf as Zipf
    from ray_slo.simulation.workloads import changing_rates as changing_rates

_LAZY = {
    "ApplicationReport": "ray_slo.simulation.application_report",
    "Burst": "ray_slo.simulation.arrivals",
    "Constant": "ray_slo.simulation.arrivals",
    "Gamma": "ray_slo.simulation.arrivals",
    "Gaussian": "ray_slo.simulation.workloads",
    "GoodputResult": "ray_slo.simulation.search",
    "LogNormal": "ray_slo.simulation.workloads",
    "Mmpp": "ray_slo.simulation.arrivals",
    "PipelineReport": "ray_slo.simulation.pipeline_report",
    "Poisson": "ray_slo.simulation.arrivals",
    "PolicyError": "ray_slo.simulation.engine",
    "Population": "ray_slo.simulation.arrivals",
    "Report": "ray_slo.simulation.report",
    "SloShare": "ray_slo.simulation.workloads",
    "Times": "ray_slo.simulation.arrivals",
    "Trace": "ray_slo.simulation.arrivals",
    "WorkerEvent": "ray_slo.simulation.engine",
    "Workload": "ray_slo.simulation.workloads",
    "Zipf": "ray_slo.simulation.workloads",
    "changing_rates": "ray_slo.simulation.workloads",
    "goodput_search": "ray_slo.simulation.search",
    "simulate": "ray_slo.simulation.simulator",
    "simulate_application": "ray_slo.simulation.application",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ray_slo.simulation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
