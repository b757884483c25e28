"""The errors that ray-slo raises, by one short path (imports Ray; `import ray_slo` does not)."""

from ray_slo.serve.errors import (
    BadInput,
    BatchResultError,
    ConfigError,
    Expired,
    RefusedEarly,
    SLOError,
    UnknownModel,
    WorkerLost,
)

__all__ = [
    "BadInput",
    "BatchResultError",
    "ConfigError",
    "Expired",
    "RefusedEarly",
    "SLOError",
    "UnknownModel",
    "WorkerLost",
]
