"""Models that need more memory than there is are left out."""

import time

import pytest
from waiting import status_of

from ray_slo.serve import build_app

MB = 2**20


class Network:
    def __init__(self, mb):
        if mb > 1000:
            raise MemoryError(f"no room for {mb} MB")
        self.weights = bytearray(mb * MB)


class Named:
    @staticmethod
    def example_input():
        return "x"

    def __call__(self, network, items):
        scratch = bytearray(4 * MB * len(items))
        time.sleep(0.01)
        return [len(network.weights) // MB for _ in items if scratch]


def variant(mb, accuracy):
    return {"load": Network, "args": [mb], "accuracy": accuracy}


@pytest.fixture(scope="module")
def app(ray_cluster):
    slow = {"latency_slo_ms": 30_000}
    variants = {"huge": variant(2000, 99), "large": variant(96, 90), "small": variant(16, 80)}
    spec = {
        "models": {
            "named": {"callable": Named, "max_batch_size": 8, "variants": variants, **slow},
        },
        "workers": {"default": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}},
        "profile_seconds": 0.5,
        "name": "memory",
    }
    with ray_cluster.running(build_app(spec), "memory", "/memory") as handle:
        yield handle


def worker_of(handle):
    (worker,) = status_of(handle)["workers"].values()
    return worker


def test_a_variant_without_room_is_left_out_and_the_others_are_measured(app):
    worker = worker_of(app)
    assert worker["variants"] == ["large", "small"]
    memory = worker["memory"]
    assert memory["left_out"].keys() == {"huge"}
    assert "no room for 2000 MB" in memory["left_out"]["huge"]
    large, small = memory["variants"]["large"], memory["variants"]["small"]
    assert 80 < large["load_mb"] < 140
    assert small["load_mb"] < 60
    assert large["batch_size"] == 8
    assert large["batch_mb"] > 20  # 4 MB per item
    assert memory["room_mb"] > 112
    assert app.remote("x", model="named").result() in (96, 16)
