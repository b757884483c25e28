"""One pool for everything, `configs/showcase.yaml`: a pipeline, a model with two SLO classes and a
sized one, on two kinds of workers in two groups, scaling, under a budget."""

import math
import time
from unittest.mock import Mock

import httpx
import pytest
import ray
from loads import MAY_BE, Load
from ray import serve
from waiting import eventually, status_of

from examples import one_pool
from ray_slo.errors import BadHeader, RefusedEarly, UnknownModel
from ray_slo.serve.planner.links import find_planner

pytestmark = pytest.mark.timeout(400)

ASKS = {  # item, options of the call, and the check of its answer
    "sheets": (one_pool.SHEETS, {"model": "sheet"}, lambda got: sum(map(len, got)) == 6),
    "digits": (one_pool.DIGITS, {"model": "digit"}, lambda got: got in range(10)),
    "gold": (
        one_pool.DIGITS,
        {"model": "digit", "slo_class": "gold"},
        lambda got: got in range(10),
    ),
    "lists": (one_pool.LISTS, {"model": "rank"}, lambda got: sorted(got) == [*range(len(got))]),
}
PATIENT = {"latency_slo_ms": 30_000}


@pytest.fixture(scope="module")
def showcase(ray_cluster):
    with ray_cluster.running(one_pool.application(), "showcase", "/showcase") as handle:
        yield handle


def plan(handle):
    return status_of(handle)["plan"]


def running(handle):
    return plan(handle).get("running", {})


def patiently(handle, what):
    """Try until each kind of request was answered once, even on a busy machine."""
    items, asked, _ = ASKS[what]
    return handle.remote(items[0], **{**asked, **PATIENT}).result(timeout_s=60)


def asking(handle, gap_s=0.1, what=tuple(ASKS), **changes):
    """A load of all that is named, in turn."""

    def ask(n):
        items, asked, _ = ASKS[what[n % len(what)]]
        return handle.remote(items[n % len(items)], **{**asked, **changes})

    return Load(ask, gap_s, lambda n, answer: ASKS[what[n % len(what)]][2](answer))


def is_planned(handle):
    told = plan(handle)
    return told.get("error") is None and math.isfinite(told.get("cost_per_hour") or math.nan)


def is_steady(handle):
    """Whether no worker is starting or stopping."""
    told = status_of(handle)
    wanted, there = told["plan"].get("targets"), told["plan"].get("running")
    return is_planned(handle) and wanted == there and len(told["workers"]) == sum(there.values())


def test_everything_is_answered(ray_cluster, showcase):
    for what, (_, _, is_answer) in ASKS.items():
        assert is_answer(patiently(showcase, what)), what
    with httpx.Client(base_url=f"{ray_cluster.url}/showcase", timeout=60) as client:
        patient = {"x-slo-latency-ms": "30000"}
        for path, item in (("sheet", one_pool.SHEETS[1]), ("rank", one_pool.LISTS[1])):
            assert client.post(f"/{path}", json=item, headers=patient).status_code == 200
        told = client.post("/digit", json=one_pool.DIGITS[0], headers={"x-slo-class": "gold"})
        assert told.status_code == 200 or told.json()["reason"] in MAY_BE


def test_the_example_says_what_came_of_its_requests(showcase, monkeypatch, capsys):
    assert eventually(lambda: is_planned(showcase)), plan(showcase)
    for module, name in ((ray, "init"), (serve, "start"), (serve, "shutdown"), (ray, "shutdown")):
        monkeypatch.setattr(module, name, Mock())
    monkeypatch.setattr(serve, "run", lambda *_, **__: showcase)
    monkeypatch.setattr(one_pool, "SECONDS", 2)
    one_pool.main()
    said = capsys.readouterr().out
    assert all(f"{what}: {{" in said for what in (*one_pool.RATES, "workers")), said


def test_groups_have_their_models_kinds_and_policies(showcase):
    groups = status_of(showcase)["groups"]
    assert {name: group["models"] for name, group in groups.items()} == {
        "reading": ["digit", "find"],
        "ranking": ["rank"],
    }
    assert groups["ranking"]["policy"] == "kairos"
    assert groups["reading"]["policy"] != "kairos"
    deployments = set(serve.status().applications["showcase"].deployments)
    kinds = {f"showcase-{g}-{k}-worker" for g in ("reading", "ranking") for k in ("small", "large")}
    assert deployments == {"showcase", *kinds}


def test_what_cannot_be_is_refused_with_the_reason(showcase):
    for what, (items, asked, _) in ASKS.items():
        with pytest.raises(RefusedEarly) as refused:
            showcase.remote(items[0], **{"model": asked["model"], "latency_slo_ms": 1}).result()
        assert refused.value.reason == "would_miss", what
    with pytest.raises(UnknownModel, match="digit, rank, sheet"):
        showcase.remote(one_pool.DIGITS[0], model="find").result()
    with pytest.raises((BadHeader, ValueError), match="gold"):
        showcase.remote(one_pool.DIGITS[0], model="digit", slo_class="silver").result()
    with asking(showcase, 0.002) as load:  # far more than the budget pays for
        assert eventually(lambda: load.sent > 400)
    assert set(load.outcomes) <= {"ok", *MAY_BE}, load.outcomes
    assert "ok" in load.outcomes
    assert set(load.outcomes) > {"ok"}, "it could do all of that"


def test_replicas_follow_the_load_within_the_budget(showcase):
    assert eventually(lambda: sum(running(showcase).values()) == 2, 120), plan(showcase)
    with asking(showcase, 0.03, ("sheets", "digits"), **PATIENT) as load:
        assert eventually(lambda: sum(running(showcase).values()) > 2, 90), plan(showcase)
        assert plan(showcase)["cost_per_hour"] <= 0.8 + 1e-9
    # On a busy machine it takes long to start a worker, and requests queue up.
    assert set(load.outcomes) <= {"ok", *MAY_BE}, load.outcomes
    assert "ok" in load.outcomes
    assert eventually(lambda: sum(running(showcase).values()) == 2, 120), plan(showcase)


def test_a_dead_planner_stops_nothing_and_its_successor_takes_over(showcase):
    """`test_groups` and `test_plan` also have a planner that Ray restarts."""
    assert eventually(lambda: is_steady(showcase)), plan(showcase)
    killed_at = time.monotonic()
    with asking(showcase, **PATIENT) as load:
        ray.kill(find_planner("showcase#showcase"), no_restart=True)
        time.sleep(1.0)
        sent = load.sent

        def is_there():
            age_s = plan(showcase).get("plan_age_s")
            return (
                age_s is not None and age_s < time.monotonic() - killed_at and is_planned(showcase)
            )

        assert eventually(is_there), plan(showcase)
        assert eventually(lambda: load.sent > sent + 20)
    assert set(load.outcomes) == {"ok"}, load.outcomes


def test_a_dead_worker_loses_no_request(showcase):
    assert eventually(lambda: is_steady(showcase)), plan(showcase)
    with asking(showcase, **PATIENT) as load:
        assert eventually(lambda: load.sent > 10)
        worker = next(iter(status_of(showcase)["groups"]["reading"]["workers"]))
        kind = next(k for k in ("small", "large") if _kill(f"reading-{k}", worker))
        sent = load.sent
        assert eventually(lambda: load.sent > sent + 20)
        assert eventually(lambda: worker not in status_of(showcase)["workers"]), kind
        assert eventually(lambda: is_steady(showcase)), plan(showcase)
    # The worker may have been its group's only one. Then requests are refused until the next is up.
    assert set(load.outcomes) <= {"ok", "no_worker"}, load.outcomes
    for what, (_, _, is_answer) in ASKS.items():
        assert is_answer(patiently(showcase, what)), what


def _kill(kind, worker):
    try:
        replica = ray.get_actor(
            f"SERVE_REPLICA::showcase#showcase-{kind}-worker#{worker}", namespace="serve"
        )
    except ValueError:
        return False
    ray.kill(replica)
    return True


def test_another_budget_holds_at_once_and_nobody_is_restarted(showcase):
    assert eventually(lambda: is_planned(showcase))
    before = set(status_of(showcase)["workers"])
    with asking(showcase, **PATIENT) as load:
        serve.run(one_pool.application(0.2), name="showcase", route_prefix="/showcase")
        assert eventually(lambda: plan(showcase).get("budget_per_hour") == 0.2), plan(showcase)
        assert eventually(lambda: plan(showcase)["cost_per_hour"] <= 0.2 + 1e-9), plan(showcase)
        sent = load.sent
        assert eventually(lambda: load.sent > sent + 20)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert before & set(status_of(showcase)["workers"]), "all workers were replaced"
