"""Models that need more memory than there is: smaller batches, fewer variants, nothing lost."""

import time

import pytest
from waiting import eventually, status_of

from ray_slo.errors import OutOfMemory
from ray_slo.serve import build_app

FITS = 6  # items per batch that fit into memory
MB = 2**20


class Large:
    """A model with memory for a few items at a time, which is not measured at its start."""

    def __call__(self, items):
        if len(items) > FITS or "huge" in items:
            raise MemoryError(f"{len(items)} items")
        time.sleep(0.02)
        return [item.upper() for item in items]


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
            "batches": {"callable": Large, "max_batch_size": 64, **slow},
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


def test_batches_become_smaller_and_nothing_is_lost(app):
    items = [f"item {i}" for i in range(100)]
    answers = [app.remote(item, model="batches", response_metadata=True) for item in items]
    assert [a.result().result for a in answers] == [item.upper() for item in items]

    def learned():
        return worker_of(app)["memory"]["largest_batch"].get("batches", 64) <= FITS

    assert eventually(learned)
    answers = [app.remote(item, model="batches", response_metadata=True) for item in items]
    found = [a.result() for a in answers]
    assert [a.result for a in found] == [item.upper() for item in items]
    assert 1 < max(a.batch_size for a in found) <= FITS


def test_an_item_that_does_not_fit_alone_fails_alone(app):
    items = ["a", "huge", "b"]
    answers = [app.remote(item, model="batches") for item in items]
    assert answers[0].result() == "A"
    assert answers[2].result() == "B"
    with pytest.raises(OutOfMemory) as failed:
        answers[1].result()
    assert failed.value.reason == "out_of_memory"


def test_a_variant_without_room_is_left_out_and_the_others_are_measured(app):
    worker = worker_of(app)
    assert worker["variants"] == ["batches", "large", "small"]
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
