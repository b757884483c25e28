"""Problems that several tests plan."""

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant


def linear(alpha_ms, beta_ms, most=64):
    return LatencyProfile.linear(alpha_ms / 1e3, beta_ms / 1e3, most)


def variant(name, accuracy, memory_mb=0.0, **profiles):
    memory = dict.fromkeys(profiles, memory_mb) if memory_mb else {}
    return Variant(name, accuracy, profiles, memory)


def photo(**kwargs):
    """A pipeline and a model that it shares, with two classes, on two kinds."""
    detector = Model(
        "detect",
        (
            variant("d-l", 90.0, gpu=linear(4, 6), cpu=linear(20, 20)),
            variant("d-s", 80.0, gpu=linear(1, 3), cpu=linear(5, 5)),
        ),
    )
    recogniser = Model(
        "name",
        (
            variant("n-l", 95.0, gpu=linear(3, 5), cpu=linear(15, 15)),
            variant("n-s", 85.0, gpu=linear(1, 2), cpu=linear(4, 4)),
        ),
    )
    found = {"d-l": {"name": 3.0}, "d-s": {"name": 2.0}}
    tasks = (TreeTask("detect", "detect", None, found), TreeTask("name", "name", "detect"))
    face = Tree("face", (TreeTask("face", "name"),), {"": 0.2, "gold": 0.08})
    given = {
        "models": (detector, recogniser),
        "trees": (Tree("photo", tasks, {"": 0.3}), face),
        "demand": {"photo": Demand(40.0), "face": Demand(60.0), "face@gold": Demand(20.0)},
        "kinds": (Kind("gpu", 0, 4, price_per_hour=2.0), Kind("cpu", 0, 8, price_per_hour=0.5)),
    }
    return Problem(**{**given, **kwargs})
