"""The number of replicas follows the load of a plain deployment; no request is lost."""

import time

import pytest
from loads import Load
from waiting import eventually, status_of

import ray_slo
from ray_slo.errors import RefusedEarly

TINY = {"num_cpus": 0.1}
PER_ITEM_S = 0.05  # a worker serves 20 a second, in batches of any size


class Sleeper:
    """Sleeps for each item, so that workers do not take each other's processor."""

    @staticmethod
    def example_input():
        return 0

    def __call__(self, items):
        time.sleep(PER_ITEM_S * len(items))
        return [item + 1 for item in items]


class SlowToStart(Sleeper):
    """Its start takes longer than an application without a request keeps a worker."""

    def __init__(self):
        time.sleep(3)


def scaling(model=Sleeper, **bounds):
    made = ray_slo.deployment(
        latency_slo_ms=60_000,
        name="sleeper",
        max_batch_size=4,
        ray_actor_options=TINY,
        profile_seconds=0.5,
        planner={"name": "auto", "interval_s": 2},
        autoscaling_config=bounds,
    )
    return made(model).bind()


def plan(handle):
    return status_of(handle)["plan"]


def running(handle, wanted):
    """Whether exactly this number of workers exists, and all of them serve."""
    workers = plan(handle).get("workers", {})
    return len(workers) == wanted and all(worker["ready"] for worker in workers.values())


def test_up_with_the_load_and_down_again_with_nothing_lost(ray_cluster):
    app = scaling(min_replicas=1, max_replicas=3, downscale_delay_s=2)
    with ray_cluster.running(app, "scaling", "/scaling") as handle:
        assert handle.remote(1).result(timeout_s=60) == 2
        assert eventually(lambda: running(handle, 1))
        # More than two workers serve.
        with Load(handle.remote, 1 / 45, lambda n, answer: answer == n + 1) as load:
            assert eventually(lambda: running(handle, 3))
        assert set(load.outcomes) == {"ok"}
        assert eventually(lambda: running(handle, 1))
        assert handle.remote(1).result(timeout_s=60) == 2
        told = plan(handle)
        assert told["targets"] == {"default": 1}
        assert told["start_s"]["default"] > 0


def test_up_from_nothing_down_and_back_at_the_first_request(ray_cluster):
    bounds = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 2}
    app = scaling(SlowToStart, **bounds, downscale_to_zero_delay_s=2)
    with ray_cluster.running(app, "sleeps", "/sleeps") as handle:
        assert handle.remote(1).result(timeout_s=60) == 2
        assert eventually(lambda: running(handle, 0))
        starts = plan(handle)["start_s"]["default"]

        # A request that cannot wait for a worker is told how long a start takes. It starts one.
        def is_woken():
            with pytest.raises(RefusedEarly) as refused:
                handle.remote(1, latency_slo_ms=1e3 * starts / 4).result(timeout_s=60)
            assert refused.value.reason == "no_worker"
            assert refused.value.retry_after_s == pytest.approx(starts)
            return plan(handle)["targets"] == {"default": 1}

        assert eventually(is_woken)
        # A request that can wait is answered.
        assert handle.remote(1).result(timeout_s=60) == 2
