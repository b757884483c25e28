"""SLO-aware serving for Ray Serve.

Say how fast to answer; ray-slo decides when to dispatch a batch, how large, and on which replica.
Importing this package is light: what needs Ray is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_slo.models.checkpoint import checkpoint as checkpoint
    from ray_slo.serve.app.application import application as application
    from ray_slo.serve.app.decorator import deployment as deployment
    from ray_slo.serve.app.pipeline import Pipeline as Pipeline
    from ray_slo.serve.app.pipeline import Task as Task
    from ray_slo.serve.batch.decorator import batch as batch
    from ray_slo.serve.config.models import Variant as Variant
    from ray_slo.serve.frontend.answer import Answer as Answer
    from ray_slo.serve.frontend.tree import Outputs as Outputs

__version__ = "0.1.0"

_LAZY = {
    "Answer": "ray_slo.serve.frontend.answer",
    "application": "ray_slo.serve.app.application",
    "batch": "ray_slo.serve.batch.decorator",
    "checkpoint": "ray_slo.models.checkpoint",
    "deployment": "ray_slo.serve.app.decorator",
    "Outputs": "ray_slo.serve.frontend.tree",
    "Pipeline": "ray_slo.serve.app.pipeline",
    "Task": "ray_slo.serve.app.pipeline",
    "Variant": "ray_slo.serve.config.models",
}
__all__ = [
    "Answer",
    "Outputs",
    "Pipeline",
    "Task",
    "Variant",
    "__version__",
    "application",
    "batch",
    "checkpoint",
    "deployment",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ray_slo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
