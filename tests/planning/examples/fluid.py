"""Problems of `policies.shared.fluid` that several tests solve."""

from ray_slo.core import LatencyProfile, Model, Variant


def variant(name, accuracy, *latency_ms, **scale):
    scale = scale or {"cpu": 1.0}
    return Variant(
        name,
        {k: LatencyProfile([t * f / 1e3 for t in latency_ms]) for k, f in scale.items()},
        accuracy,
    )


def model(name="m", slo_s=0.1, **scale):
    return Model(
        name,
        slo_s,
        (
            variant(f"{name}-quick", 60.0, 10, 12, **scale),
            variant(f"{name}-good", 80.0, 40, 60, **scale),
        ),
    )
