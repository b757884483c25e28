"""ray-slo on Ray Serve. The only package that imports ray.

`build_app` is the import path that a `serve run` config names.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_slo.serve.app.build import build_app as build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the light modules of this package (spec, host) can be used without ray.
    if name == "build_app":
        from ray_slo.serve.app.build import build_app

        return build_app
    raise AttributeError(f"module 'ray_slo.serve' has no attribute {name!r}")
