"""Groups, each with its scheduler and workers. Models move between groups under load."""

import time

import pytest
import ray
from loads import Load
from ray import serve
from waiting import eventually, status_of

from ray_slo.cli import main
from ray_slo.errors import ConfigError
from ray_slo.record import plans as plan_log
from ray_slo.serve import build_app
from ray_slo.serve.planner.links import find_planner
from ray_slo.serve.ray_private.actors import find_actor

TINY = {"ray_actor_options": {"num_cpus": 0.1}}
POWERS = {"square": 2, "cube": 3, "fourth": 4}
MODELS = {
    name: {"callable": "apps:Tasks", "kwargs": {"power": power}, "latency_slo_ms": 30_000}
    for name, power in POWERS.items()
}
EXPLICIT = {
    "models": MODELS,
    "groups": {
        "a": {"workers": {"default": TINY}, "models": ["square", "cube"]},
        "b": {"workers": {"default": TINY}, "models": ["fourth"]},
    },
    "num_frontends": 2,
    "profile_seconds": 0.2,
    "name": "grouped",
}
POOL = {
    "models": MODELS,
    "workers": {"default": {"num_replicas": 3, **TINY}},
    "planner": {
        "name": "herd",
        "interval_s": 3600,
        "min_gain": 0.02,
        "memory_mb": {"square": 10, "cube": 10, "fourth": 10},
        "kwargs": {"memory_mb": 20, "group_worker_limit": 2},
        "rates": {"fourth": 100},
    },
    "profile_seconds": 0.2,
    "name": "pool",
}

CHOSEN = {
    "models": MODELS,
    "groups": {name: {"workers": {"default": TINY}} for name in ("a", "b")},
    "planner": {
        "name": "auto",
        "interval_s": 3600,
        "kwargs": {"move_cost": 0.0},
        "rates": {"square": 5, "cube": 0.5, "fourth": 0.5},
    },
    "num_frontends": 2,
    "profile_seconds": 0.2,
    "name": "chosen",
}


def is_settled(handle):
    return status_of(handle)["plan"].get("state") == "settled"


def numbers(handle, gap_s=0.02):
    """A load of numbers, for every model in turn."""
    turns = list(POWERS.items())

    def send(n):
        return handle.remote(n % 7, model=turns[n % 3][0])

    return Load(send, gap_s, lambda n, got: got == {"value": float((n % 7) ** turns[n % 3][1])})


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def explicit(ray_cluster, log):
    app = build_app({**EXPLICIT, "decision_log": {"dir": str(log), "flush_s": 0.2}})
    with ray_cluster.running(app, "grouped", "/grouped") as handle:
        yield handle


def all_planned(folder):
    return [p for planner in plan_log.read(folder) for p in planner.plans]


def planned(folder, trigger):
    """The plan for this reason, once it is in the log."""

    def found():
        return [p for p in all_planned(folder) if p.trigger == trigger]

    assert eventually(found)
    return found()


def report(folder):
    """The page that `ray-slo report` makes of a log."""
    page = folder / "report.html"
    with pytest.raises(SystemExit) as exit:
        main(["report", str(folder), "--out", str(page)])
    assert exit.value.code == 0
    return page.read_text("utf-8")


def served_by(handle):
    return {name: group["models"] for name, group in status_of(handle)["groups"].items()}


def loaded(handle):
    """The variants that each group's workers have loaded, if its scheduler answers in time."""
    now = status_of(handle)
    workers = {w: set(s["variants"]) for w, s in now.get("workers", {}).items()}
    return {
        g: set().union(*(workers.get(w, set()) for w in s["workers"]))
        for g, s in now["groups"].items()
        if "workers" in s
    }


def workers_for(handle):
    groups = status_of(handle)["groups"].values()
    return {model: len(group["workers"]) for group in groups for model in group["models"]}


def test_two_groups_serve_their_models(explicit):
    for model, power in POWERS.items():
        assert explicit.remote(3, model=model).result() == {"value": float(3**power)}
    served = {"a": ["cube", "square"], "b": ["fourth"]}
    assert eventually(lambda: served_by(explicit) == served)  # from every frontend
    assert eventually(lambda: loaded(explicit) == {g: set(its) for g, its in served.items()})
    seen = status_of(explicit)
    assert [g["policy"] for g in seen["groups"].values()] == ["auto"] * 2
    assert seen["counts"]["granted"] == sum(g["counts"]["granted"] for g in seen["groups"].values())
    names = set(serve.status().applications["grouped"].deployments)
    assert names == {"grouped", "grouped-a-worker", "grouped-b-worker"}
    # Ray keeps no record of each call.
    actors = [find_planner("grouped#grouped"), find_actor("grouped#grouped#a")]
    assert [actor._ray_enable_task_events for actor in actors] == [False, False]


def test_a_model_moves_under_load_and_no_request_fails(explicit):
    assert eventually(lambda: is_settled(explicit))
    with numbers(explicit) as load:
        assert eventually(lambda: load.sent > 20)
        explicit.slo_move.remote("cube", "b").result(timeout_s=60)
        assert eventually(lambda: is_settled(explicit))
        sent = load.sent
        assert eventually(lambda: load.sent > sent + 20)
    assert set(load.outcomes) == {"ok"}
    assert served_by(explicit) == {"a": ["square"], "b": ["cube", "fourth"]}
    assert eventually(lambda: loaded(explicit) == {"a": {"square"}, "b": {"cube", "fourth"}})
    assert status_of(explicit)["plan"]["moves"] == 1


def test_the_move_and_its_reason_are_logged_and_reported(explicit, log):
    (first,), (moved,) = planned(log, "first plan"), planned(log, "moved by hand")
    assert first.changes == ("cube: – → a", "fourth: – → b", "square: – → a")
    assert moved.at > first.at
    assert moved.changes == ("cube: a → b",)
    assert moved.why == "cube was moved to b by hand"
    html = report(log)
    for words in ("Planner decisions", moved.trigger, *moved.changes, moved.why):
        assert words in html


def test_a_dead_planner_stops_nothing_and_its_successor_takes_over(explicit):
    """Ray restarts it. Below, it is made anew."""
    before, epoch = served_by(explicit), status_of(explicit)["plan"]["epoch"]
    with numbers(explicit) as load:
        ray.kill(find_planner("grouped#grouped"), no_restart=False)
        time.sleep(1.0)
        assert explicit.remote(2, model="cube").result() == {"value": 8.0}

        def is_taken_over():
            plan = status_of(explicit)["plan"]
            return plan["epoch"] != epoch and plan["plan_age_s"] is not None

        assert eventually(is_taken_over)
        assert eventually(lambda: is_settled(explicit))
    assert set(load.outcomes) == {"ok"}
    assert served_by(explicit) == before


def test_moves_that_cannot_be_are_refused(explicit):
    with pytest.raises(ConfigError, match="no group 'c'; the groups are a, b"):
        explicit.slo_move.remote("cube", "c").result()
    with pytest.raises(ConfigError, match="has no planner"):
        explicit.slo_replan.remote().result()


def test_herd_makes_groups_of_a_pool_and_changes_them_with_the_demand(ray_cluster, tmp_path):
    app = build_app({**POOL, "decision_log": {"dir": str(tmp_path), "flush_s": 0.2}})
    with ray_cluster.running(app, "pool", "/pool") as handle:
        # A worker's memory holds two of the three models. The busy one gets two workers alone.
        expected = [["cube", "square"], ["fourth"]]
        assert eventually(lambda: sorted(served_by(handle).values()) == expected)
        assert eventually(lambda: is_settled(handle))
        expected = {"square": 1, "cube": 1, "fourth": 2}
        assert eventually(lambda: workers_for(handle) == expected), workers_for(handle)
        with numbers(handle, 0.15) as load:
            # Most of the demand is for "square", however slow the machine.
            [r.result(timeout_s=60) for r in [handle.remote(1, model="square") for _ in range(300)]]
            handle.slo_replan.remote().result(timeout_s=60)
            assert eventually(lambda: is_settled(handle))
        assert set(load.outcomes) == {"ok"}
        plan = status_of(handle)["plan"]
        # If no large batch was measured yet, "cube" may stay with "square".
        assert eventually(lambda: workers_for(handle)["square"] == 2), repr(plan)  # one has moved
        workers = workers_for(handle)
        assert workers["fourth"] == 1, repr(plan)
        alone = workers["cube"] == 1
        expected = [["cube", "fourth"], ["square"]] if alone else [["cube", "square"], ["fourth"]]
        assert sorted(served_by(handle).values()) == expected, repr(plan)
        assert plan["error"] is None
        assert plan["rates"]["square"] > plan["rates"]["cube"]
        layout = {model: group for group, models in served_by(handle).items() for model in models}
        (asked,) = planned(tmp_path, "asked for")
    assert asked.demand == pytest.approx(sum(asked.inputs["rates"].values()))
    assert asked.inputs["rates"]["square"] > asked.inputs["rates"]["cube"]
    assert any(line.startswith("cube: ") for line in asked.changes) == alone
    assert (asked.why, asked.plan["groups"]) == (plan["why"], layout)
    html = report(tmp_path)
    for words in ("Planner decisions", "asked for", *asked.changes):
        assert words in html


def test_auto_chooses_groups_and_moves_a_model_and_nothing_is_lost(ray_cluster, tmp_path):
    app = build_app({**CHOSEN, "decision_log": {"dir": str(tmp_path), "flush_s": 0.2}})

    def serves(*groups):
        return (
            sorted(served_by(handle).values())
            == sorted(groups)
            == sorted(sorted(models) for models in loaded(handle).values())
        )

    with ray_cluster.running(app, "chosen", "/chosen") as handle:
        assert eventually(lambda: serves(["cube", "fourth"], ["square"])), str(
            status_of(handle)["plan"]
        )
        with numbers(handle, 0.15) as load:
            # Most of the demand is for "fourth": "cube" leaves it.
            [r.result(timeout_s=60) for r in [handle.remote(1, model="fourth") for _ in range(300)]]
            assert eventually(lambda: serves(["cube", "square"], ["fourth"])), str(
                status_of(handle)["plan"]
            )
            # A new planner starts from the present groups.
            layout, epoch = served_by(handle), status_of(handle)["plan"]["epoch"]
            ray.kill(find_planner("chosen#chosen"), no_restart=True)
            assert eventually(lambda: status_of(handle)["plan"].get("epoch", epoch) != epoch)
            sent = load.sent
            assert eventually(lambda: load.sent > sent + 20)
        assert set(load.outcomes) == {"ok"}
        assert served_by(handle) == layout
        plan = status_of(handle)["plan"]
        assert plan["error"] is None, repr(plan)
        with pytest.raises(ConfigError, match="'auto' leaves models in the groups that list them"):
            handle.slo_move.remote("cube", "a").result(timeout_s=60)

    def moves():  # for any reason: on a busy machine, slow workers may look lost
        lines = [line for p in all_planned(tmp_path) for line in p.changes]
        return [line for line in lines if line.endswith((": a → b", ": b → a"))]

    assert eventually(moves)
