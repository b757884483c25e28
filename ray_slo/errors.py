"""The errors that ray-slo raises, by one short path (imports Ray; `import ray_slo` does not)."""

from ray_slo.serve.errors import (
    BadHeader,
    BadInput,
    BatchResultError,
    BodyTooLarge,
    ConfigError,
    Expired,
    FrontendLost,
    NotReady,
    RefusedEarly,
    SLOError,
    SlowBody,
    UnknownModel,
    WorkerLost,
)

__all__ = [
    "BadHeader",
    "BadInput",
    "BatchResultError",
    "BodyTooLarge",
    "ConfigError",
    "Expired",
    "FrontendLost",
    "NotReady",
    "RefusedEarly",
    "SLOError",
    "SlowBody",
    "UnknownModel",
    "WorkerLost",
]
