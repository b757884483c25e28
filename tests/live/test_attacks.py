"""A short form of `benchmarks live-attack`: attackers get a reason, and the service continues.
No assertion depends on time."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from benchmarks.live import attack as attacks
from benchmarks.live.attack import alias, at_once, calls_at_once, infer, ordered, post
from ray_slo.serve import build_app
from ray_slo.serve.proxy import modes
from tests.live.waiting import eventually, status_of

TINY = {"num_cpus": 0.1}
SLO_MS = 15_000
# What a client may get instead of an answer: one of our reasons.
REASONS = {"would_miss", "shed", "queue_full", "expired", "slow_body", "no_worker"}


@pytest.fixture(scope="module")
def attacked(ray_cluster):
    model = {"callable": "benchmarks.live.attack:Attacked", "latency_slo_ms": SLO_MS}
    app = {
        "models": {"m": model},
        "workers": {"default": {"num_replicas": 2, "ray_actor_options": TINY}},
        "num_frontends": 2,
        "profile_seconds": 0.3,
        "name": attacks.APP,
    }
    with ray_cluster.running(build_app(app), attacks.APP, "/") as handle:
        yield handle


@pytest.fixture
def ports(ray_cluster, attacked):
    """The ports of HTTP and of gRPC. The service is checked before and after the test."""
    url = ray_cluster.url + "/"
    assert eventually(lambda: _is_well(url, attacked))
    yield int(ray_cluster.url.rpartition(":")[2]), int(ray_cluster.grpc.rpartition(":")[2]) - 1
    assert eventually(lambda: _is_well(url, attacked))


def _is_well(url, handle):
    """Whether ten requests are answered, both workers are up, and no request is unfinished."""
    try:
        if any(requests.post(url, json=1, timeout=30).status_code != 200 for _ in range(10)):
            return False
        status = handle.slo_status.remote().result(timeout_s=30)
    except Exception:
        return False
    busy = [w for w in status["workers"].values() if w["batches_in_flight"]]
    return len(status["workers"]) == 2 and not busy


def said(replies):
    return {(reply.status, reply.reason) for reply in replies}


def is_told(replies):
    """Whether each request got an answer or a reason, and at least one an answer."""
    assert {r.status for r in replies} <= {200, 408, 503, 504}
    assert {r.reason for r in replies if r.status != 200} <= REASONS
    assert any(r.status == 200 for r in replies)


def test_a_burst(ports):
    replies = at_once(ports[0], [post(1)] * 400)
    is_told(replies)


@pytest.mark.parametrize("kind", ["ways to write the path", "paths", "classes"])
def test_a_burst_of_names_that_clients_make_up(ports, kind):
    """Good clients beside it are answered, everybody hears a reason, and then all is well."""
    written = {
        "ways to write the path": [post(1, path=alias(i)) for i in range(400)],
        "paths": [post(1, path=f"/made-up-{i}") for i in range(400)],
        "classes": [post(1, f"x-slo-class: made-up-{i}") for i in range(400)],
    }[kind]
    url = f"http://127.0.0.1:{ports[0]}/"
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(at_once, ports[0], written)
        good = [requests.post(url, json=1, timeout=30) for _ in range(30)]
        replies = attack.result()
    assert {response.status_code for response in good} == {200}
    assert requests.post(url, json=1, timeout=30).status_code == 200
    if kind == "ways to write the path":
        is_told(replies)
        return
    told = {"paths": (404, "unknown_model"), "classes": (422, "bad_input")}[kind]
    assert told in said(replies)
    assert said(replies) <= {told, (503, "queue_full"), (503, "would_miss")}


def test_other_ways_to_write_a_request(ports):
    """Each is the same place, or is not found."""
    same = ["/?x=1", "//", "/%2f", "http://127.0.0.1/", "http://127.0.0.1//?x=1"]
    replies = at_once(ports[0], [post(1, path=path) for path in same])
    assert said(replies) == {(200, "")}
    others = ["/;v=1", "/../", "/./", "/%00", "/M", "/" + "a" * 6000, "/%zz", "/%ff"]
    replies = at_once(ports[0], [post(1, path=path) for path in others])
    assert said(replies) == {(404, "unknown_model")}
    for header in ("x-slo-class: a\r\nx-slo-class: b", "X-SLO-Class: a\r\nx-slo-CLASS: a"):
        assert said(at_once(ports[0], [post(1, header)])) == {(400, "bad_header")}
    replies = at_once(ports[0], [post(1, "x-slo-class: " + "a" * n) for n in (101, 256)])
    assert said(replies) == {(422, "bad_input")}


def test_a_burst_over_grpc(ports):
    replies = calls_at_once(ports[1], [infer()] * 300)
    is_told(replies)
    replies = calls_at_once(ports[1], [infer(model=f"made-up-{i}") for i in range(300)])
    assert said(replies) <= {(503, "unknown_model"), (503, "queue_full"), (503, "would_miss")}
    assert said(calls_at_once(ports[1], [infer()])) == {(200, "")}


@pytest.mark.parametrize("attack", ["deep", "garbage"])
def test_what_is_no_request(ports, attack):
    replies = attacks.ATTACKS[attack].run(ports[0], 1)
    if attack == "deep":
        assert said(replies) == {(422, "bad_input"), (413, "body_too_large")}
    else:
        assert {r.status for r in replies} <= {0, 400}


def test_what_is_too_large(ports):
    bomb = b"[" + b"[]," * 2_000_000 + b"[]]"
    heads = [post(None, body=b"1" * n) for n in (9 * 2**20, 17 * 2**20)]
    replies = at_once(ports[0], [post(None, body=bomb), *heads])
    assert said(replies) <= {(413, "body_too_large"), (0, "")}  # 0: it closed the connection early
    assert (413, "body_too_large") in said(replies)
    replies = calls_at_once(ports[1], [infer(json=bomb.decode()), infer(json="1" * 17 * 2**20)])
    assert said(replies) == {(503, "body_too_large")}


@pytest.mark.parametrize("place", ["preprocess", "batch", "postprocess"])
@pytest.mark.parametrize("what", ["panic", "exit"])
def test_code_that_raises_what_nobody_catches(ports, attacked, place, what):
    before = _pids(attacked)
    replies = ordered(place, what, 6)(ports[0], 1)
    assert said(replies) == {(500, "failed")}
    replies = calls_at_once(ports[1], [infer({"in": place, "do": what})] * 3)
    assert said(replies) == {(503, "failed")}
    assert _pids(attacked) & before  # a frontend from before is left


def _pids(handle):
    return {handle.slo_status.remote().result()["process"]["pid"] for _ in range(20)}


def test_hooks_that_block_cost_their_callers_only(ports, ray_cluster):
    blocked = [post({"in": "preprocess", "do": "sleep"}, "x-slo-latency-ms: 2000")] * 4
    replies = at_once(ports[0], blocked)
    assert said(replies) == {(504, "expired")}


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_what_ends_a_frontend_is_not_sent_to_another(ports, attacked, over):
    before = _pids(attacked)
    fatal = {"in": "preprocess", "do": "die"}
    if over == "http":
        replies = at_once(ports[0], [post(fatal)])
    else:
        replies = calls_at_once(ports[1], [infer(fatal)])
    assert said(replies) == {(503, "frontend_lost")}
    assert len(before - _pids(attacked)) <= 1  # at most one of the two has ended


def test_what_ends_a_worker_does_not_end_the_last_one(ports, attacked):
    fatal = post({"in": "batch", "do": "die"}, "x-slo-latency-ms: 1900")
    replies = at_once(ports[0], [fatal])
    assert said(replies) == {(503, "worker_lost")}
    assert status_of(attacked)["workers"]  # the other one answers


@pytest.mark.skipif(not modes.has_haproxy_of_ours(), reason="`test_fast_mode` has it")
def test_http_of_the_program_itself_with_haproxy_in_place_of_the_proxies(ports):
    rows = attacks.strike("haproxy", "panic", ports[0], 1, True).rows()
    found = {row.metric: row.ours for row in rows}
    assert (found["sent"], found["refused"], found["other"]) == (10, 10, 0)  # all with a reason


def test_clients_that_leave_and_connections_without_requests(ports):
    """The service is well afterwards: nothing of theirs is in progress."""
    port, grpc_port = ports
    at_once(port, [b""] * 300 + [post(1)] * 200, heard_s=0.05)
    calls_at_once(grpc_port, [infer()] * 200, leave_s=[0.01, 0.03, 0.1])


def test_odd_metadata_of_grpc(ports):
    def ask(*metadata):
        (reply,) = calls_at_once(ports[1], [infer()], metadata=[metadata])
        return reply.status, reply.reason

    ours = ("application", attacks.APP)
    assert ask(ours, ("k-bin", bytes(range(256))), *[("k", "v")] * 50) == (200, "")
    # Serve passes it to the only application. If there are several, it says NOT_FOUND itself.
    assert ask(("application", "nobody")) in {(503, "unknown_model"), (905, "")}
    for name, value in (("x-request-timeout-seconds", "-1"), ("x-slo-latency-ms", "9" * 400)):
        assert ask(ours, (name, value)) == (503, "bad_header")


def test_slow_clients(ports):
    bodies = [post(1, "x-slo-latency-ms: 300", body=b"1" * 99)[:-9]] * 30
    heads = [post(1)[:40]] * 30
    replies = at_once(ports[0], bodies + heads, heard_s=6.0)
    assert said(replies) == {(408, "slow_body"), (0, "")}
    assert json.loads(requests.post(f"http://127.0.0.1:{ports[0]}/", json=1, timeout=30).text) == 0
