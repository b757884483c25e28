"""Results of `Frontend.slo_status`, for tests of the screens that show them."""

EVIL = "</script><b>\x1b[31m[red]x"


def state(**others):
    """Of two models and a pipeline, with variants, a plan and a refusal; EVIL is a user's text."""
    batch = {"variant": "f", "batch_size": 8, "for_ms": 3.0, "expected_ms": 22.0}
    worker = {"kind": "gpu", "variants": ["f", "s"], "batches_in_flight": 1, "running": [batch]}
    assigned = [{"variant": "f", "batch_size": 8, "load": 1.0}]
    served = {"answers": 900, "batches": 100.0, "batch_size": 9.0, "exec_ms": 20.0}
    served |= {"predicted_ms": 22.0, "measured_ms": 23.5}
    refused = {"ago_s": 3.2, "model": "find", "slo_class": "gold", "outcome": "refused"}
    return {
        "models": {
            "find": {"latency_slo_ms": 100.0, "variants": {"f": {}, "s": {}}},
            "spell": {"latency_slo_ms": 50.0, "accuracy": None},
            "join": {"latency_slo_ms": 300.0, "accuracy": None},
        },
        "pipelines": {"read": {"latency_slo_ms": 300.0, "parents": {"find": None, "join": "find"}}},
        "frontends": 1,
        "num_frontends": 2,
        "pending": 4,
        "goodput": {"find": 90.0, "spell": 120.0},
        "accuracy": {"find": 88.2},
        "bad_rate": {"find": 0.25, "spell": 0.0},
        "expected": {"find": {"accuracy": 90.0, "bad_rate": 0.01}},
        "scheduler": "embedded",
        "policy": EVIL,
        "queued": {"find": 7, "spell": 0, "join": 0},
        "counts": {"granted": 100, "refused": 12, "on_node": 40},
        "lately": {
            "window_s": 10,
            "models": {"find": {"requests": 1250, "latency_ms": {"p50": 33.0, "p99": 97.0}}},
            "variants": {
                "find": {"f": served, "s": {**served, "answers": 300}},
                "read": {"f/join": {**served, "batches": 0.0, "batch_size": None}},
            },
            "refused": [{**refused, "reason": EVIL, "count": 4}],
        },
        "workers": {
            "w0": {**worker, "assigned": assigned, "last_heartbeat_s": 0.1, "memory": {}},
            "w1": {
                **{"kind": "cpu", "variants": ["spell"], "batches_in_flight": 0, "running": []},
                **{"assigned": [], "last_heartbeat_s": 9.0, "memory": {}},
            },
        },
        "plan": {
            **{"planner": "auto", "state": "planned", "plan_age_s": 2.0, "why": f"Enough {EVIL}"},
            **{"targets": {"gpu": 2, "cpu": 1}, "load_errors": {"s on gpu": EVIL}},
        },
        "profiles": {},
        **others,
    }
