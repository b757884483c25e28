"""An error in a problem is reported with its field."""

import re
from dataclasses import replace

import pytest

from ray_slo.core.trees import Tree
from ray_slo.planning.auto import Demand, Hosted, Kind, Model, Variant
from tests.planning.auto.cases import linear, photo


def test_streams_are_those_of_the_trees():
    problem = photo()
    assert problem.streams == ("photo", "face", "face@gold")
    assert problem.slo_s("face@gold") == 0.08
    assert problem.rate("face") == 60.0
    assert replace(problem, demand={}).rate("face") == 0.0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("models", (), "models must name at least one"),
        ("kinds", (Kind("gpu", 0, 1),) * 2, "kinds: two are named 'gpu'"),
        ("kinds", (Kind("gpu", 0, 1),), "profiles of variant 'd-l': 'cpu' is none of the kinds"),
        ("demand", {"faces": Demand(1.0)}, "demand: 'faces' is none of the streams photo, face"),
        ("trees", (Tree.of_model("scene", {"": 0.1}),), "model of task 'scene': 'scene' is none"),
        ("group_of", {"detect": "a"}, "group_of: 'a' is none of the groups (none)"),
        ("group_of", {"det": "a"}, "group_of: 'det' is none of the models detect, name"),
        ("present", {"tpu": 1}, "present: 'tpu' is none of the kinds gpu, cpu"),
        ("present", {"gpu": -1}, "present must count at least 0 workers"),
        ("current", (Hosted("w0", "tpu"),), "current: 'tpu' is none of the kinds"),
        ("current", (Hosted("w0", "gpu"),) * 2, "current must name every worker once"),
        ("batch_sizes", (0, 1), "batch_sizes must be at least 1"),
        ("waiting_factor", 0.5, "waiting_factor must be at least 1"),
        ("objective", "speed", "objective must be one of accuracy, cost"),
        ("budget_per_hour", -1.0, "budget_per_hour must be at least 0"),
        ("accuracy_floor", 101.0, "accuracy_floor must be from 0 to 100"),
    ],
)
def test_a_wrong_field_is_named(field, value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        photo(**{field: value})


def test_wrong_parts_are_named():
    with pytest.raises(ValueError, match="accuracy of variant 'v' must be from 0 to"):
        Variant("v", 101.0, {"gpu": linear(1, 1)})
    with pytest.raises(ValueError, match=r"memory_mb.gpu of variant 'v' must be at least 0"):
        Variant("v", 100.0, {"gpu": linear(1, 1)}, {"gpu": -1.0})
    with pytest.raises(ValueError, match="variants of model 'm' must name at least one"):
        Model("m", ())
    with pytest.raises(ValueError, match="items of model 'm' must be at least 1"):
        Model("m", (Variant("v", 100.0, {}),), items=0.5)
    with pytest.raises(ValueError, match="min_workers of kind 'gpu' must be at most max_workers 1"):
        Kind("gpu", 2, 1)
    with pytest.raises(ValueError, match="rate of a demand must be at least 0"):
        Demand(-1.0)
    v = Variant("v", 100.0, {})
    with pytest.raises(ValueError, match="variants must have names of their own, got 'v' twice"):
        photo(models=(*photo().models, Model("a", (v,)), Model("b", (v,))))
