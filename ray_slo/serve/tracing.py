"""The exporter for `RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=ray_slo.serve.tracing:otlp`."""

from ray_slo.serve.watch.tracing import otlp

__all__ = ["otlp"]
