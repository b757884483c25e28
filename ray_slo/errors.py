"""The errors that ray-slo raises, by one short path (imports Ray; `import ray_slo` does not)."""

from ray_slo.serve.errors import *  # noqa: F403
from ray_slo.serve.errors import __all__ as __all__
