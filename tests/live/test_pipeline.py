"""A pipeline on a local Ray: answers joined, errors named, nothing lost."""

import httpx
import pytest
import stages
from waiting import eventually, posted, status_of

import ray_slo
from ray_slo.errors import BatchResultError
from ray_slo.serve import build_app

TINY = {"num_cpus": 0.1}
SLO_MS = 120_000  # time for Serve to start another replica on a busy machine
SPELLED = {"by": "f1", "words": ["t-o", "b-e"]}
Speller = ray_slo.Pipeline(
    stages.tasks(),
    latency_slo_ms=SLO_MS,
    join=stages.joined,
    path_accuracies={"f1/s1": 88.0},
    num_replicas=3,
    ray_actor_options=TINY,
    planner={"name": "loki", "interval_s": 2, "rates": {"find": 2}},
    name="speller",
    num_frontends=2,
    profile_seconds=0.4,
)


@pytest.fixture(scope="module")
def app(ray_cluster):
    with ray_cluster.running(Speller.bind(), "speller", "/speller") as handle:
        assert eventually(lambda: status_of(handle)["plan"].get("step") == "hardware")
        yield handle


def test_answers_are_joined_and_name_every_stage(app, ray_cluster):
    answer = app.remote(" to be ", response_metadata=True).result()
    assert answer.result == SPELLED
    assert (answer.model, answer.variant, answer.accuracy) == ("speller", "f1/s1", 88.0)
    assert answer.deadline_met
    find, spell = answer.stages
    assert (find.task, find.requests, find.variants) == ("find", 1, {"f1": 1})
    assert (spell.task, spell.requests, spell.variants) == ("spell", 2, {"s1": 2})
    assert find.exec_ms > 30 and spell.exec_ms > 20
    assert app.remote("").result() == "empty"
    assert app.remote("to be", model="speller").result() == SPELLED

    url = f"{ray_cluster.url}/speller"
    response = httpx.post(url, json="to be", timeout=30)
    assert response.json() == SPELLED
    assert response.headers["x-slo-variant"] == "f1/s1"
    assert response.headers["x-slo-stages"].startswith('find;requests=1;variants="f1*1";batch')
    assert httpx.get(url, timeout=30).json()["pipelines"]["speller"]["parents"] == {
        "find": None,
        "spell": "find",
    }
    seen = status_of(app)
    assert {"find", "spell", "speller"} >= set(seen["goodput"])
    kinds = {a["variant"] for w in seen["workers"].values() for a in w["assigned"]}
    assert kinds == {"f1", "s1"}


def test_errors_are_answered_once_and_name_the_task(app, ray_cluster):
    url = f"{ray_cluster.url}/speller"
    for item, code, says in (
        (3, 422, "preprocess refused the item: a text is wanted, not 3 (in task 'find')"),
        ("to fail", 500, "in task 'find'"),
        ("a poison pill", 500, "this word cannot be spelled; in task 'spell'"),
        ("nonsense", 500, "must return per request a result, or ray_slo.Outputs(result, {'spell'"),
    ):
        response = httpx.post(url, json=item, timeout=30)
        assert response.status_code == code
        assert says in response.json()["message"]
    with pytest.raises(ValueError, match="cannot be spelled"):
        app.remote("poison ivy").result()
    with pytest.raises(BatchResultError, match="in task 'find'"):
        app.remote("nonsense").result()


# After the others: the scheduler learns that a page may have 500 slow words, and then refuses more.
@pytest.mark.parametrize("way", ["handle", "http"])
def test_who_leaves_cancels_what_it_made(app, ray_cluster, way):
    before = status_of(app)["counts"]["granted"]
    page = " ".join(["slow"] * 500)
    if way == "handle":
        asked = app.remote(page)
        assert eventually(lambda: status_of(app)["queued"]["spell"] > 100)
        asked.cancel()
    else:
        with posted(f"{ray_cluster.url}/speller", page):
            assert eventually(lambda: status_of(app)["queued"]["spell"] > 100)
    assert eventually(lambda: status_of(app)["queued"]["spell"] == 0)
    assert status_of(app)["counts"]["granted"] - before < 400
    assert app.remote("to be").result() == SPELLED


def test_yaml_with_neither_planner_nor_join(ray_cluster):
    net = {"load": "stages:Net", "args": ["net", 0.01]}
    args = {
        "pipeline": {
            "latency_slo_ms": SLO_MS,
            "tasks": {
                "find": {
                    "callable": "stages:Find",
                    "variants": {"f": {**net, "accuracy": 90}},
                },
                "spell": {
                    "callable": "stages:Spell",
                    "parent": "find",
                    "variants": {"s": {**net, "accuracy": 50}},
                },
            },
        },
        "planner": None,
        "policy": "eager",
        "workers": {"cpu": {"ray_actor_options": TINY}},
        "profile_seconds": 0.3,
        "name": "plain",
    }
    with ray_cluster.running(build_app(args), "plain", "/plain") as handle:
        answer = handle.remote("to be", response_metadata=True).result()
        assert answer.result == {"result": {"by": "net"}, "outputs": {"spell": ["t-o", "b-e"]}}
        assert (answer.variant, answer.accuracy) == ("f/s", pytest.approx(45))
