"""`ray_slo.serve:build_app`: from the `args` of a `serve run` config to a running application."""

import httpx
from ray import serve
from ray.serve.schema import ServeApplicationSchema
from waiting import status_of

from ray_slo.serve import build_app

NAMED = {"callable": "apps:Named", "latency_slo_ms": 30_000}
DEEP = {"load": "apps:Network", "args": ["deep", 0.02], "accuracy": 80}
ARGS = {
    "models": {
        "square": {"callable": "apps:Tasks", "latency_slo_ms": 50_000, "accuracy": 90},
        "cube": {
            "callable": "apps:Tasks",
            "kwargs": {"power": 2},
            "user_config": {"power": 3},
            "latency_slo_ms": 40_000,
        },
        # Two networks with the same name.
        "a": {**NAMED, "variants": {"deep": DEEP}},
        "b": {**NAMED, "variants": {"deep": {**DEEP, "args": ["deeper", 0.02]}}},
        "echo": {"callable": "apps:Echo", "args": ["say "], "latency_slo_ms": 30_000},
    },
    "workers": {
        "small": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        "large": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.2}},
    },
    "policy": {"name": "deferred", "kwargs": {"objective": "responsive"}},
    "scheduler": "actor",
    "profile_seconds": 0.3,
    "name": "zoo",
}


def test_several_models_on_one_pool_of_two_kinds(ray_cluster):
    # As in a config file: the schema checks the form, `build_app` the content.
    schema = ServeApplicationSchema(
        name="zoo", route_prefix="/zoo", import_path="ray_slo.serve:build_app", args=ARGS
    )
    with ray_cluster.running(build_app(schema.args), "zoo", "/zoo") as handle:
        url = f"{ray_cluster.url}/zoo"
        for path, item, wanted in (
            ("square", 3, {"value": 9.0}),
            ("cube", 3, {"value": 27.0}),
            ("echo", "hi", "say hi"),
        ):
            answer = httpx.post(f"{url}/{path}", json=item, timeout=30)
            assert (answer.status_code, answer.json()) == (200, wanted)
            assert answer.headers["x-slo-model"] == path
            assert handle.remote(item, model=path).result() == wanted
        for model, says in (("a", ["deep"]), ("b", ["deeper"])):
            answer = handle.remote(1, model=model, response_metadata=True).result()
            assert (answer.result, answer.model, answer.variant) == (says, model, "deep")
        unnamed = httpx.post(url, json=3, timeout=30)
        assert unnamed.status_code == 404
        assert unnamed.json()["valid"] == ["a", "b", "cube", "echo", "square"]
        seen = status_of(handle)
        assert sorted(w["kind"] for w in seen["workers"].values()) == ["large", "small"]
        assert set(seen["models"]) == set(ARGS["models"])
        learned = {"square", "cube", "echo", "a/deep", "b/deep"}
        kinds = ("small", "large")
        assert set(seen["profiles"]) == {f"{name}@{kind}" for name in learned for kind in kinds}
        names = set(serve.status().applications["zoo"].deployments)
        assert names == {"zoo", "zoo-small-worker", "zoo-large-worker"}
