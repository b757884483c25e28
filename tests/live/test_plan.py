"""A planned pipeline: replicas follow the demand, variants switch, and no failure of the planner
stops anything."""

import contextlib
import time

import pytest
import ray
import stages
from loads import Load
from waiting import eventually, status_of

import ray_slo
from ray_slo.record import decode as decision_log
from ray_slo.record import plans as plan_log
from ray_slo.serve.planner.links import find_planner
from ray_slo.serve.watch.status import read_dry_run
from ray_slo.simulation.replay import replay

SLO_MS = 20_000
FIND = ["f0"]
ACCURATE, QUICK = "s1", "s0"  # they take 0.25 s and 0.03 s per word


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def words(ray_cluster, log):
    app = ray_slo.Pipeline(
        [
            ray_slo.Task("find", stages.Find, variants=stages.variants("f", (90, 0.01))),
            ray_slo.Task(
                "spell",
                stages.Spell,
                parent="find",
                variants=stages.variants("s", (70, 0.03), (95, 0.25)),
            ),
        ],
        latency_slo_ms=SLO_MS,
        num_replicas=2,
        max_replicas=3,
        ray_actor_options={"num_cpus": 0.1},
        planner={
            "name": "loki",
            "interval_s": 2,
            "kwargs": {"batch_sizes": [1], "headroom_quantile": None},
        },
        profile_seconds=0.6,
        decision_log={"dir": str(log), "flush_s": 0.2},
        name="words",
    )
    with ray_cluster.running(app.bind(), "words", "/words") as handle:
        yield handle


def letters(handle, rate):
    """A load of the same word, `rate` times per second."""
    spelt = {"spell": ["w-o-r-d"]}
    return Load(lambda n: handle.remote("word"), 1 / rate, lambda n, got: got["outputs"] == spelt)


def plan(handle):
    return status_of(handle)["plan"]


def does(status):
    return sorted(v for w in status.get("workers", {}).values() for v in w["assigned"])


def loaded(handle):
    return sorted(w["loaded"] for w in plan(handle)["workers"].values())


def settled(handle, wanted):
    status = plan(handle)
    return status["state"] == "planned" and does(status) == sorted(wanted)


def shown(handle):
    status = plan(handle)
    keys = ("state", "demand", "why", "error", "targets", "running", "workers")
    return {key: status.get(key) for key in keys}


def has_fallen(log):
    """Whether the log has the plan after which there is a worker less."""
    plans = (plan for planner in plan_log.read(log) for plan in planner.plans)
    return any("default: 3 → 2 workers" in plan.changes for plan in plans)


def test_replicas_and_variants_follow_the_demand(words, log):
    assert eventually(lambda: settled(words, ["f0", ACCURATE])), shown(words)
    would = read_dry_run("auto", "words")
    assert would["replicas"] == {"default": {"running": 2, "target": 2, "would": 2}}
    for w in would["workers"].values():
        assert [a["variant"] for a in w["would"]] == [a["variant"] for a in w["does"]] != []
    with letters(words, 10) as load:  # the accurate one makes four a second
        assert eventually(lambda: settled(words, ["f0", QUICK, ACCURATE])), shown(words)
        status = plan(words)
        assert status["targets"] == status["running"] == {"default": 3}
        assert status["step"] == "accuracy"
        # Variants that are no longer needed are unloaded.
        assert eventually(lambda: loaded(words) == [["f0"], [QUICK], [ACCURATE]]), shown(words)
    # A rise by a factor of ten may cost something before replicas are there; then it does not.
    assert "ok" in load.outcomes, load.outcomes
    assert set(load.outcomes) <= {"ok", "would_miss", "shed", "expired"}, load.outcomes
    with letters(words, 1) as load:
        assert eventually(lambda: settled(words, ["f0", ACCURATE])), shown(words)
        assert eventually(lambda: plan(words)["running"] == {"default": 2}), shown(words)
        # The planner dies below; what it did not write by then is lost.
        assert eventually(lambda: has_fallen(log)), shown(words)
    assert set(load.outcomes) == {"ok"}, load.outcomes


def test_a_solver_error_holds_the_plan(words):
    @contextlib.contextmanager
    def broken_solver(actor):
        def break_it(planner):
            async def fail(function, problem):
                raise RuntimeError("no licence")

            planner.kept, planner.aside = planner.aside, fail

        def mend_it(planner):
            planner.aside = planner.kept

        ray.get(actor.__ray_call__.remote(break_it))
        try:
            yield
        finally:
            ray.get(actor.__ray_call__.remote(mend_it))

    before = does(plan(words))
    with broken_solver(find_planner("words#words")):
        words.slo_replan.remote().result(timeout_s=60)
        status = plan(words)
        assert status["error"] == "planning failed: RuntimeError: no licence"
        assert (does(status), status["targets"]) == (before, {"default": 2})
        assert words.remote("word").result()["outputs"] == {"spell": ["w-o-r-d"]}
    words.slo_replan.remote().result(timeout_s=60)
    assert plan(words)["error"] is None


@pytest.mark.parametrize("restarted", [True, False], ids=["restarted by Ray", "made anew"])
def test_a_dead_planner_stops_nothing_and_its_successor_takes_over(words, log, restarted):
    status = plan(words)
    lives = len(plan_log.read(log))
    before, epoch = does(status), status["epoch"]

    def is_taken_over():
        status = plan(words)
        return status.get("plans", 0) > 0 and status["epoch"] != epoch

    with letters(words, 2) as load:
        ray.kill(find_planner("words#words"), no_restart=not restarted)
        time.sleep(0.5)
        assert words.remote("word").result()["outputs"] == {"spell": ["w-o-r-d"]}
        assert eventually(is_taken_over), shown(words)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert eventually(lambda: settled(words, before)), shown(words)
    assert plan(words)["running"] == {"default": 2}
    # The next one dies at once, and what it did not write by then is lost.
    assert eventually(lambda: len(plan_log.read(log)) == lives + 1), shown(words)


def test_all_of_it_is_logged_and_the_scheduler_decides_the_same_again(words, log):
    first, restarted, anew = plan_log.read(log)
    assert first.plans[0].trigger == "first plan"
    rise = next(p for p in first.plans if "default: 2 → 3 workers" in p.changes)
    assert rise.trigger in ("demand changed", "period")  # one that was due anyhow may come first
    assert rise.demand > 2 * first.plans[0].demand  # the first reports of ten per second
    assert f"{QUICK}: 0 → 1 workers" in rise.changes
    assert rise.took_s > 0
    assert "Accuracy scaling" in rise.why, rise.why  # at least with the workers that are up
    fall = next(p for p in first.plans if "default: 3 → 2 workers" in p.changes)
    assert fall.at > rise.at
    failed = next(p for p in first.plans if p.error)
    assert failed.error == "planning failed: RuntimeError: no licence"
    for planner in (restarted, anew):
        if planner.plans:
            assert planner.plans[0].trigger == "planner restarted"
    (life,) = decision_log.read(log)
    assert life.whole
    assert life.start.about["clock"] == first.start.about["clock"]  # so times can be compared
    replayed = replay(life)
    assert replayed.identical, replayed.difference
    assert replayed.actions > 50
    # The policy was told what was planned, after the plan was made.
    told = [
        (args[0], a.variant)
        for r in life.rounds()
        for name, args in r.events
        if name == "cluster_changed"
        for w in args[1].workers.values()
        for a in w.assigned
    ]
    quick_at = min(at for at, variant in told if variant == QUICK)
    assert rise.at < quick_at < fall.at
