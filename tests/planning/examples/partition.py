"""Problems of `papers.partition` that several tests solve."""

from ray_slo.papers.partition import Model, Problem


def problem(rates, static=None, dynamic=None, **kwargs):
    static = static or [10.0] * len(rates)
    dynamic = dynamic or [0.0] * len(rates)
    rows = zip(rates, static, dynamic, strict=True)
    models = tuple(Model(f"m{i}", *row) for i, row in enumerate(rows))
    return Problem(models, **({"sub_clusters": 2, "backend": "highs"} | kwargs))
