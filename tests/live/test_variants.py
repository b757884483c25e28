"""Models with several networks: the policy chooses, answers say which."""

import httpx
import pytest
from apps import Greedy, Named, Network
from loads import Load
from ray import serve
from waiting import eventually, status_of

import ray_slo
from ray_slo import Variant
from ray_slo.serve.watch.status import is_frontend

TINY = {"num_cpus": 0.1}
QUICK = Variant("quick", accuracy=70, load=Network, args=("quick", 0.01))
DEEP = Variant("deep", accuracy=90, load="apps:Network", args=("deep",), kwargs={"base_s": 0.5})
App = ray_slo.deployment(
    latency_slo_ms=30_000,
    num_replicas=2,
    policy=Greedy,
    variants=[QUICK, DEEP],
    ray_actor_options=TINY,
    profile_seconds=1,
    name="named",
)(Named)


@pytest.fixture(scope="module")
def handle(ray_cluster):
    with ray_cluster.running(App.bind(), "named", "/named") as handle:
        yield handle


def test_policy_chooses_and_answers_say_which(ray_cluster, handle):
    deep = handle.remote(1, response_metadata=True).result()
    assert (deep.result, deep.variant, deep.accuracy, deep.model) == (
        *(["deep"], "deep", 90, "named"),
    )
    quick = handle.remote(1, latency_slo_ms=450, response_metadata=True).result()
    assert (quick.result, quick.variant, quick.accuracy) == (["quick"], "quick", 70)
    url = f"{ray_cluster.url}/named"
    headers = httpx.post(url, json=1, timeout=30).headers
    assert (headers["x-slo-variant"], headers["x-slo-accuracy"]) == ("deep", "90.00")
    described = httpx.get(url, timeout=30).json()["models"]["named"]
    assert described["variants"] == {"quick": {"accuracy": 70}, "deep": {"accuracy": 90}}
    seen = status_of(handle)
    assert 10 < seen["profiles"]["quick@default"]["latency_1_ms"] < 450
    assert seen["profiles"]["deep@default"]["latency_1_ms"] > 500
    assert seen["profiles"]["deep@default"]["samples"] == 2  # learned by variant
    assert [w["variants"] for w in seen["workers"].values()] == [["deep", "quick"]] * 2
    assert 70 <= seen["accuracy"]["named"] <= 90
    found = [is_frontend(n) for n in ("named", "named/named", "named/named-worker", "none")]
    assert found == [True, True, False, False]


# This test is the last, because it changes the application.
def test_rolling_update_of_variants_and_reconfigure_keep_serving(handle):
    def ask(n):
        return handle.remote(0, response_metadata=True)

    with Load(ask, 0.5) as load:  # half of what both workers make
        assert eventually(lambda: load.sent)
        changed = App.options(user_config={"power": 2})
        serve.run(changed.bind(), name="named", route_prefix="/named")
        deeper = Variant("deeper", accuracy=95, load=Network, args=("deeper", 0.15))
        changed = changed.options(variants=[QUICK, deeper])
        serve.run(changed.bind(), name="named", route_prefix="/named")
    assert set(load.outcomes) == {"ok"}
    found = [*load.answers, ask(0).result()]
    assert {"deep", "deeper"} <= {a.variant for a in found}
    assert found[0].result == ["deep"] and found[-1].result == ["deeper", "deeper"]
