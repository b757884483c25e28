import math

import pytest

from ray_slo.policies.shared.fluid import Problem, solve
from tests.planning.examples.fluid import model


def test_with_room_everything_gets_the_best_variant_and_time_is_free():
    found = solve(Problem([model()], {"m": 20.0}, {"cpu": 2}))
    assert found.accuracy == pytest.approx(80.0)
    assert found.worker_price == {"cpu": pytest.approx(0.0)}
    assert found.request_price["m"] == pytest.approx(80.0)


def test_the_prices_are_what_another_worker_or_request_changes():
    # 100/s on 2 workers: 20 ms each. Good in pairs is 30 ms, quick in pairs 6 ms.
    problem = Problem([model()], {"m": 100.0}, {"cpu": 2})
    found = solve(problem)
    share = (0.020 - 0.006) / (0.030 - 0.006)
    assert found.accuracy == pytest.approx(60 + 20 * share)
    assert {(b.variant, b.size) for b in found.mix} == {("m-quick", 2), ("m-good", 2)}
    assert sum(b.busy for b in found.mix) == pytest.approx(2.0)

    def total(rate, workers):
        return solve(Problem([model()], {"m": rate}, {"cpu": workers})).accuracy * rate

    assert total(100.0, 2.01) - total(100.0, 2) == pytest.approx(0.01 * found.worker_price["cpu"])
    assert total(100.1, 2) - total(100.0, 2) == pytest.approx(0.1 * found.request_price["m"])
    # What runs costs exactly what it is worth.
    for b in found.mix:
        accuracy = {"m-quick": 60.0, "m-good": 80.0}[b.variant]
        worth = b.size * (accuracy - found.request_price["m"])
        assert worth == pytest.approx(found.worker_price["cpu"] * b.latency_s)


def test_what_cannot_be_served_is_said():
    found = solve(Problem([model()], {"m": 400.0}, {"cpu": 2}))
    assert not found.feasible
    assert found.unserved["m"] == pytest.approx(400 - 2 / 0.006)
    assert found.accuracy == pytest.approx(60.0)


def test_batches_keep_the_slo():
    found = solve(Problem([model(slo_s=0.05)], {"m": 20.0}, {"cpu": 2}))
    assert {(b.variant, b.size) for b in found.mix} == {("m-good", 1)}


def test_models_share_workers_and_unlike_workers_have_prices_of_their_own():
    kinds = {"cpu": 1.0, "gpu": 0.5}
    models = [model("a", **kinds), model("b", 0.05, **kinds)]
    found = solve(Problem(models, {"a": 100.0, "b": 50.0}, {"cpu": 1, "gpu": 1}))
    assert found.feasible
    # A second of a worker that is twice as quick is worth up to twice as much.
    cpu, gpu = found.worker_price["cpu"], found.worker_price["gpu"]
    assert 0 < cpu < gpu <= 2 * cpu * (1 + 1e-9)
    for kind in kinds:
        assert sum(b.busy for b in found.mix if b.workers == kind) <= 1 + 1e-9


def test_only_what_is_loaded_runs():
    loaded = {"x": frozenset({"m-quick"}), "y": frozenset({"m-good"})}
    found = solve(
        Problem([model()], {"m": 60.0}, {"x": 1, "y": 1}, loaded, {"x": "cpu", "y": "cpu"})
    )
    assert {(b.variant, b.workers) for b in found.mix} == {("m-quick", "x"), ("m-good", "y")}


def test_few_requests_have_an_accuracy_too():
    assert solve(Problem([model()], {"m": 0.5}, {"cpu": 2})).accuracy == pytest.approx(80.0)


def test_nothing_to_serve():
    found = solve(Problem([model()], {"m": 0.0}, {"cpu": 2}))
    assert math.isnan(found.accuracy)
    assert found.feasible
