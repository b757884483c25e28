"""Workers of different types under a budget. Their numbers follow it, and no request is lost."""

import contextlib
import json

import pytest
import rankers
from loads import Load
from ray import serve
from waiting import eventually, status_of

from ray_slo.cli import main
from ray_slo.errors import SLOError
from ray_slo.record import plans as plan_log
from ray_slo.serve import build_app

LARGE = 100  # items; only "strong" workers are fast enough


def app(budget, log):
    return build_app(
        {
            "models": {
                "rank": {
                    "callable": "rankers:Ranker",
                    "latency_slo_ms": 1000,
                    "max_batch_size": LARGE,
                }
            },
            "workers": {
                "strong": {**rankers.kind("strong", 0.001, price=1.0), "max_replicas": 3},
                "weak": {
                    **rankers.kind("weak", 0.015, price=0.25),
                    "num_replicas": 2,
                    "max_replicas": 2,
                },
            },
            "planner": {
                "name": "kairos",
                "interval_s": 2,
                "kwargs": {
                    "budget_per_hour": budget,
                    "follow_load": False,
                    "sizes": {5: 0.8, LARGE: 0.2},
                },
            },
            "profile_seconds": 1.0,
            "retries": 5,
            "decision_log": {"dir": str(log), "flush_s": 0.2},
            "name": "rank",
        }
    )


def plan(handle):
    return status_of(handle)["plan"]


def size_of(n):
    """Of request number n."""
    return LARGE if n % 5 == 0 else 5


def who_ranks_many(handle):
    """The kind of worker that answers a large request; None if the machine is too busy."""
    with contextlib.suppress(SLOError):
        return handle.remote(LARGE).result()[0]


def dry_run(capsys):
    """Check what `ray-slo plan --live` prints."""
    with pytest.raises(SystemExit) as exit:
        main(["plan", "--live", "rank", "--json"])
    assert exit.value.code == 0
    would = json.loads(capsys.readouterr().out)
    replicas = {kind: (n["running"], n["would"]) for kind, n in would["replicas"].items()}
    assert replicas == {"strong": (1, 1), "weak": (2, 2)}
    assert would["plan"]["budget_per_hour"] == 1.5
    assert would["why"].startswith("1 strong + 2 weak at 1.5 per hour")
    with pytest.raises(SystemExit) as exit:
        main(["plan", "--live", "nobody"])
    assert exit.value.code == 2
    message = "'nobody' is not a running ray-slo application; running: rank"
    assert message in capsys.readouterr().err


def cut(log):
    """The plan that was made when the budget was cut; None until it is in the log."""
    plans = [p for planner in plan_log.read(log) for p in planner.plans]
    return next((p for p in plans if "weak: 2 → 0 workers" in p.changes), None)


def test_replica_counts_follow_the_budget_and_no_request_is_lost(ray_cluster, capsys, tmp_path):
    log = tmp_path / "log"
    with ray_cluster.running(app(1.5, log), "rank", "/rank") as handle:
        assert eventually(lambda: plan(handle).get("running") == {"strong": 1, "weak": 2}), plan(
            handle
        )
        assert eventually(lambda: who_ranks_many(handle)) == "strong"
        dry_run(capsys)
        with Load(lambda n: handle.remote(size_of(n), latency_slo_ms=30_000), 0.1) as load:
            assert eventually(lambda: load.sent > 10)
            serve.run(app(1.0, log), name="rank", route_prefix="/rank")
            assert eventually(lambda: plan(handle)["running"] == {"strong": 1, "weak": 0}), plan(
                handle
            )
        assert set(load.outcomes) == {"ok"}
        answered = {(size_of(n), kind) for n, (kind, _) in enumerate(load.answers)}
        assert {(5, "weak"), (LARGE, "strong")} <= answered
        processes = {process for _, process in load.answers}
        assert len(processes) <= 3  # those that there were: nobody was restarted
        status = plan(handle)
        assert status["budget_per_hour"] == 1.0
        assert status["error"] is None
        assert status["cost_per_hour"] == 1.0
        assert eventually(lambda: cut(log))
    ((planner, first), *_) = ((p, p.plans[0]) for p in plan_log.read(log))
    assert (planner.start.policy, first.trigger, first.targets) == (
        "kairos",
        "first plan",
        {"strong": 1, "weak": 2},
    )
    planned = cut(log)
    assert planned.trigger == "arguments changed"
    assert planned.changes == ("weak: 2 → 0 workers",)
    assert planned.targets == {"strong": 1, "weak": 0}
    assert planned.inputs["budget_per_hour"] == 1.0
    assert planned.demand > 0
    assert planned.why.startswith("1 strong at 1 per hour, of 1:")
    page = tmp_path / "report.html"
    with pytest.raises(SystemExit) as exit:
        main(["report", str(log), "--out", str(page)])
    assert exit.value.code == 0
    html = page.read_text("utf-8")
    for words in ("Planner decisions", planned.trigger, *planned.changes, planned.why):
        assert words in html
