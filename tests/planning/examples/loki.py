"""Problems of `benchmarks.loki.terms` that several tests solve."""

from dataclasses import replace

from benchmarks.loki.terms import Problem, Task, Variant
from ray_slo.core.profiles import LatencyProfile


def linear(alpha_ms, beta_ms, most=8):
    return LatencyProfile.linear(alpha_ms / 1e3, beta_ms / 1e3, most)


def chain(**options):
    """Detector (2 variants, the accurate one finds more) → classifier (3 variants)."""
    detect = Task(
        "detect",
        (
            Variant("d-large", 95.0, linear(12, 10), {"classify": 3.0}),
            Variant("d-small", 80.0, linear(4, 6), {"classify": 2.0}),
        ),
    )
    classify = Task(
        "classify",
        (
            Variant("c-large", 98.0, linear(5, 8)),
            Variant("c-middle", 93.0, linear(3, 5)),
            Variant("c-small", 85.0, linear(1, 3)),
        ),
        parent="detect",
    )
    options = {"demand": 40.0, "workers": 4, "slo_s": 0.2, "batch_sizes": (1, 2, 4)} | options
    return Problem((detect, classify), **options)


def tree(**options):
    """Two children of one detector, as in the traffic pipeline."""
    one = chain(**options)
    detect = replace(
        one.tasks[0],
        variants=tuple(
            replace(v, factors={"classify": 2.0 * f, "face": f})
            for v, f in zip(one.tasks[0].variants, (1.0, 0.5), strict=True)
        ),
    )
    faces = Variant("f-large", 97.0, linear(6, 6)), Variant("f-small", 88.0, linear(2, 2))
    return replace(one, tasks=(detect, one.tasks[1], Task("face", faces, "detect")))
