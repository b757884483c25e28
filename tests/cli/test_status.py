"""What `ray-slo status` prints of an application's state."""

import io
import socket
import subprocess
import sys

import pytest
from rich.console import Console

from ray_slo.cli import main
from ray_slo.cli.top_text import print_screen
from ray_slo.serve.watch.screen import screen


def printed(**state):
    worker = {"kind": "gpu", "variants": ["f", "s"], "batches_in_flight": 2}
    base = {
        "models": {"find": {"latency_slo_ms": 100}, "spell": {"latency_slo_ms": 100}},
        "goodput": {"words": 3.25, "find": 4},
        "scheduler": "embedded",
        "pending": 0,
        "queued": {"find": 7},
        "workers": {"w": {**worker, "last_heartbeat_s": 0.1, "assigned": []}},
        **state,
    }
    file = io.StringIO()
    print_screen(Console(file=file, width=140), screen("app", base))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return {line.split()[1]: line for line in lines if line.startswith("│")}, lines


def test_models_and_workers():
    rows, lines = printed()
    assert "7" in rows["find"]
    assert "?" in rows["spell"]
    assert "f, s" in rows["w"]
    assert "words" not in rows
    assert not any(line.startswith("plan by") for line in lines)


def test_the_mode_of_the_cluster():
    _, lines = printed(mode="fast (HAProxy)")
    assert "mode fast (HAProxy)" in lines[0]


def test_what_is_expected_is_beside_what_is_measured():
    rows, _ = printed(
        accuracy={"find": 91.234},
        bad_rate={"find": 0.0123, "spell": 0.0},
        expected={
            "find": {"accuracy": 92.0, "bad_rate": 0.005},
            "spell": {"accuracy": None, "bad_rate": 0.25},
        },
    )
    assert "│ 91.23 (expected 92.00) │" in rows["find"]
    assert "│  1.2 (expected 0.5) │" in rows["find"]
    assert "│ 0.0 (expected 25.0) │" in rows["spell"]
    rows, _ = printed(accuracy={"find": 91.234})
    assert "91.23 │" in rows["find"]
    assert "expected" not in rows["find"]


def test_memory_of_a_worker():
    variants = {
        "f": {"load_mb": 300.0, "batch_mb": 40.0, "batch_size": 8},
        "s": {"load_mb": 50.0, "batch_mb": 90.4, "batch_size": 16},
    }
    memory = {
        "device": "gpu",
        "room_mb": 1000.0,
        "variants": variants,
        "largest_batch": {"f": 8},
        "left_out": {"l": "MemoryError: no"},
    }
    worker = {"kind": "gpu", "variants": ["f"], "batches_in_flight": 0, "last_heartbeat_s": 0.1}
    rows, lines = printed(workers={"w": {**worker, "assigned": [], "memory": memory}})
    assert "440 of 1000 (gpu)" in rows["w"]
    assert "w: no memory for batches of f of more than 8" in lines
    assert "w: l is left out: MemoryError: no" in lines


def test_a_pipeline_its_plan_and_who_does_what():
    worker = {"kind": "gpu", "variants": ["f"], "batches_in_flight": 0, "last_heartbeat_s": 0.1}
    rows, lines = printed(
        pipelines={"words": {"latency_slo_ms": 100, "parents": {}}},
        workers={"w": {**worker, "assigned": [{"variant": "f", "batch_size": 8, "load": 3.0}]}},
        plan={"planner": "loki", "state": "planned", "plan_age_s": 2, "why": "Enough."},
    )
    assert "3.2" in rows["words"]
    assert "f, batches of 8" in rows["w"]
    assert "plan by loki: planned, 2 s old. Enough." in lines


def test_groups():
    rows, lines = printed(
        groups={"a": {"models": ["find"], "wanted_models": ["find", "spell"]}},
        plan={"planner": None, "state": "moving", "error": "no room", "load_errors": {"m": "why"}},
    )
    assert "+spell" in rows["a"]
    assert "plan by the configuration: moving, none yet." in "\n".join(lines)
    assert "no room" in lines
    assert "m: why" in lines


@pytest.mark.parametrize(
    "command",
    [
        ["status", "--address"],
        ["plan", "--live", "app", "--address"],
        ["bench", "--handle", "app", "--payload", "os:sep", "--ray-address"],
    ],
)
def test_an_address_where_nothing_listens_is_an_error_at_once(command, capsys):
    for address, says in (
        ("127.0.0.1:1", "no Ray cluster found at address '127.0.0.1:1'"),
        ("there", "must be auto, HOST:PORT or ray://HOST:PORT, got 'there'"),
    ):
        with pytest.raises(SystemExit) as exit:
            main([*command, address])
        assert exit.value.code == 2
        err = capsys.readouterr().err
        assert says in err
        assert f"{command[-1]}" in err


def test_auto_says_what_it_runs_why_and_what_it_tried():
    tried = {
        "eager": {"value": 0.991, "bad": 0.009, "p50_ms": 12.34, "whole": True},
        "deferred": {"value": 0.5, "bad": 0.5, "p50_ms": None, "whole": False},
        "flex": {"error": "ValueError: no"},
    }
    rehearsal = {
        **{"ago_s": 4.2, "requests": 300, "rate": 60.0, "before": "deferred", "setting": "eager"},
        **{"why": "most value in time", "tried": tried},
    }
    before = {**rehearsal, "ago_s": 9.0, "predicted_bad": 0.01, "measured_bad": 0.012}
    last = {**rehearsal, "predicted_bad": 0.009, "measured_bad": None}
    auto = {
        **{"setting": "eager", "why": "most value in time", "for_s": 4.0, "held": 2, "failed": 1},
        **{"took_s": 0.3, "error": "ValueError: no core", "rehearsals": [before, last]},
    }
    rows, lines = printed(groups={"a": {"models": ["find"], "auto": auto}})
    text = " ".join(lines)
    assert "group a: auto runs 'eager', for 4 s: most value in time. 2 rehearsals held" in text
    assert "the last rehearsal failed: ValueError: no core" in lines
    assert "Policy auto of group a: rehearsed 4 s ago with 300 requests" in lines
    assert rows["eager"].split()[2:] == ["│", "0.9910", "│", "0.90", "│", "12.3", "│"]
    assert "0.5000 (given up)" in rows["deferred"]
    assert "flex could not be tried: ValueError: no" in lines
    assert "9 s ago: eager: not in time 1.00 % predicted, 1.20 % measured until the next" in text
    rows, lines = printed(auto={**auto, "rehearsals": [], "error": None, "failed": 0})
    assert not {"eager", "deferred"} & rows.keys()
    assert lines[-2].startswith("auto runs 'eager'") or "auto runs 'eager'" in " ".join(lines)


@pytest.mark.slow
def test_handles_work_where_throughput_is_optimized(monkeypatch):
    """Serve makes them for event loops only then, and a command has none."""
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    monkeypatch.delenv("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", raising=False)
    with pytest.raises(SystemExit):
        main(["--version"])
    said = (
        "import ray.serve._private.constants as c; print(c.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP)"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Python: 3.11.7\n"),
            "--address: the cluster at address 'auto' has another version of Ray or Python: run "
            "this command with the cluster's, or name another cluster (Version mismatch: The "
            "cluster was started with: Python: 3.11.7)",
        ),
        (
            ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:1"),
            "if it asks for a token, set RAY_AUTH_MODE=token",
        ),
        (AssertionError(), "or name it (it went away)"),
    ],
)
def test_a_cluster_that_cannot_be_used(raised, said, monkeypatch):
    from ray_slo.serve.watch import status

    def init(**_):
        raise raised

    monkeypatch.setattr(status.ray, "init", init)
    monkeypatch.setattr(status, "_check_listens", lambda *_: None)
    with pytest.raises(ValueError) as refused:
        status.connect("auto")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (None, "no Ray cluster found at address 'auto': start one"),
        ("127.0.0.1:1", "'auto', which is '127.0.0.1:1' (from RAY_ADDRESS, or the last"),
        ("local", "must be auto, HOST:PORT or ray://HOST:PORT, got 'auto', which is 'local'"),
    ],
)
def test_auto_without_a_cluster_asks_ray_for_nothing(behind, said, monkeypatch, capsys):
    """Ray would try a dead cluster's address for minutes, or start a cluster of its own."""
    from ray_slo.serve.watch import status

    def address_of_auto():
        if behind is None:
            raise ConnectionError("none")
        return behind

    monkeypatch.setattr(status, "address_of_auto", address_of_auto)
    monkeypatch.setattr(status, "clusters_of_auto", list)
    monkeypatch.setattr(status.ray, "init", lambda **_: pytest.fail("asked Ray"))
    with pytest.raises(SystemExit) as exit:
        main(["status"])
    assert exit.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_one_of_several_clusters_is_never_taken_at_random(monkeypatch, capsys):
    from ray_slo.serve.watch import status

    monkeypatch.setattr(status, "address_of_auto", lambda: "127.0.0.1:2")
    monkeypatch.setattr(status, "clusters_of_auto", lambda: ["127.0.0.1:2", "127.0.0.1:3"])
    monkeypatch.setattr(status.ray, "init", lambda **_: pytest.fail("asked Ray"))
    with pytest.raises(SystemExit) as exit:
        main(["status"])
    assert exit.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "several Ray clusters run on this machine, name one of them: 127.0.0.1:2, 127" in said


@pytest.mark.parametrize("behind", ["a listener", "ray://127.0.0.1:1"])
def test_auto_with_a_cluster_is_left_to_ray(behind, monkeypatch):
    from ray_slo.serve.watch import status

    asked = []
    monkeypatch.setattr(status.ray, "init", lambda address, **_: asked.append(address))
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}" if behind == "a listener" else behind
        monkeypatch.setattr(status, "address_of_auto", lambda: where)
        monkeypatch.setattr(status, "clusters_of_auto", list)
        status.connect("auto")
    assert asked == ["auto"]
