"""The policies that choose variants, `ramsis` and `price`, as a config names them."""

import httpx
import pytest
import yaml
from waiting import eventually, status_of

from ray_slo.serve import build_app

APP = """
name: picked
models:
  picked:
    callable: apps:Mortal
    latency_slo_ms: 20000
    max_batch_size: 4
    variants:
      quick: {load: "apps:Network", args: [quick, 0.01], accuracy: 70}
      deep: {load: "apps:Network", args: [deep, 0.1], accuracy: 90}
workers: {cpu: {num_replicas: 2, ray_actor_options: {num_cpus: 0.1}}}
profile_seconds: 0.5
"""
POLICIES = {
    "ramsis": """
policy:
  name: ramsis
  kwargs:
    arrivals: {kind: gamma, shape: 0.5}
    load_step: 4
    options: {max_queue: 4}
""",
    "price": "policy: price",
}
ACCURACIES = {"quick": "70.00", "deep": "90.00"}


@pytest.fixture(scope="module", params=POLICIES, ids=str)
def policy(request):
    return request.param


@pytest.fixture(scope="module")
def app(ray_cluster, policy):
    config = yaml.safe_load(APP + POLICIES[policy])
    name = f"picked-{policy}"  # a name that no application has
    with ray_cluster.running(build_app(config), name, f"/{name}") as handle:
        yield handle, f"{ray_cluster.url}/{name}"


def test_variants_and_their_accuracy_are_said(app):
    _, url = app
    seen = set()

    def is_deep():  # with tables; before, the quickest variant serves
        answer = httpx.post(url, json=1, timeout=60)
        assert answer.status_code == 200
        variant = answer.headers["x-slo-variant"]
        assert answer.json() == [variant]
        assert answer.headers["x-slo-accuracy"] == ACCURACIES[variant]
        seen.add(variant)
        return variant == "deep"

    assert eventually(is_deep)  # an idle system uses it
    assert seen <= set(ACCURACIES)


def test_the_tables_in_force_are_in_the_status(app, policy):
    handle, _ = app
    seen = status_of(handle)
    if policy == "price":
        assert "tables" not in seen
        assert seen["expected"] == {}
        return
    keys = ("model", "slo_ms", "kind", "workers", "arrivals")

    def tables():
        return [{key: table[key] for key in keys} for table in status_of(handle)["tables"]]

    for_both = {
        "model": "picked",
        "slo_ms": pytest.approx(20_000, abs=100),
        "kind": "cpu",
        "workers": 2,
        "arrivals": "gamma 0.5",
    }
    assert eventually(lambda: tables() == [for_both]), tables()  # both workers are up
    seen = status_of(handle)
    (table,) = seen["tables"]
    assert 70 <= table["expected_accuracy"] <= 90
    assert 0 <= table["violation_rate"] < 0.1
    assert seen["tables_failed"] == 0

    def expects_what_its_table_does():
        seen = status_of(handle)
        (table,) = seen["tables"]
        known = {"accuracy": table["expected_accuracy"], "bad_rate": table["violation_rate"]}
        return seen["expected"] == {"picked": pytest.approx(known)}

    assert eventually(expects_what_its_table_does)
