"""With Serve's tracing, spans of proxy, frontend and worker belong to the caller's trace. HAProxy
makes no spans. It uses Serve's proxy while an application starts, and that makes spans."""

import io
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pandas as pd
from waiting import eventually

from ray_slo.serve import build_app
from ray_slo.serve.proxy.modes import has_haproxy_of_ours

OUTERMOST = ("proxy_http_request", *["replica_handle_request"] * has_haproxy_of_ours())

ARGS = {
    "models": {"square": {"callable": "apps:Tasks", "latency_slo_ms": 30_000}},
    "workers": {"small": {"ray_actor_options": {"num_cpus": 0.1}}},
    "scheduler": "actor",
    "policy": "deferred",
    "profile_seconds": 0.3,
}


def caller():
    """Ids of a caller's trace and span."""
    return secrets.token_hex(16), secrets.token_hex(8)


def header(ids, sampled=True):
    return {"traceparent": "-".join(("00", *ids, "01" if sampled else "00"))}


def exported(folder):
    """All spans so far, by id. A file has one JSON object after the other."""
    spans, decoder = {}, json.JSONDecoder()
    for file in folder.glob("*_tracing.json"):
        text = file.read_text("utf-8").strip()
        while text:
            try:
                span, end = decoder.raw_decode(text)
            except json.JSONDecodeError:  # being written
                break
            spans[span["context"]["span_id"].removeprefix("0x")] = span
            text = text[end:].lstrip()
    return spans


def ours(spans):
    return [s for s in spans.values() if s["name"].startswith("slo.")]


def linked(span):
    return {link["context"]["span_id"].removeprefix("0x") for link in span["links"]}


def way_up(spans, span):
    """Names from a span up to the topmost known one, and the id of that one's parent."""
    names = []
    while span is not None:
        names.append(span["name"])
        parent = span["parent_id"].removeprefix("0x")
        span = spans.get(parent)
    return names, parent


def test_one_trace_from_the_caller_to_the_worker(ray_cluster, tmp_path):
    app = build_app({**ARGS, "decision_log": {"dir": str(tmp_path), "flush_s": 0.2}})
    with ray_cluster.running(app, "traced", "/traced"), ThreadPoolExecutor(4) as pool:
        url = f"{ray_cluster.url}/traced/square"
        # The scheduler may be told of the worker a moment after Serve.
        assert eventually(lambda: httpx.post(url, json=3, timeout=30).status_code == 200)
        callers = [caller() for _ in range(4)]
        declined = caller()
        headers = [*map(header, callers), header(declined, sampled=False), {}]
        answers = list(pool.map(lambda h: httpx.post(url, json=3, headers=h, timeout=30), headers))
        assert [a.json() for a in answers] == [{"value": 9}] * 6
        refused = caller()
        late = {**header(refused), "x-slo-latency-ms": "1"}
        assert httpx.post(url, json=3, headers=late, timeout=30).status_code == 503
        granted = {ids for ids, _ in callers}
        wanted = {OUTERMOST[-1]: granted | {refused[0]}, "slo.schedule": granted}
        spans = _until_whole(ray_cluster.spans, wanted, {s for _, s in (*callers, refused)})
        rows = _log(tmp_path)

    by_trace = {}
    for span in ours(spans):
        by_trace.setdefault(span["context"]["trace_id"].removeprefix("0x"), []).append(span)
    assert set(by_trace) == {ids for ids, _ in [*callers, refused]}  # no other traces
    batches = {i: s for i, s in spans.items() if s["name"] == "slo.batch"}
    for (trace, above), answer in zip(callers, answers, strict=False):
        request, queue = (
            next(s for s in by_trace[trace] if s["name"] == name)
            for name in ("slo.request", "slo.queue")
        )
        names, top = way_up(spans, request)
        assert names[0] == "slo.request"
        assert names[1].startswith("replica_handle_request square")
        assert names[-1].startswith(OUTERMOST)
        assert top == above
        assert way_up(spans, queue) == (["slo.queue", *names], above)
        # A span of the scheduler, which is another process.
        (span,) = (s for s in by_trace[trace] if s["name"] == "slo.schedule")
        assert way_up(spans, span) == (["slo.schedule", "slo.queue", *names], above)
        told = {k: v for k, v in queue["attributes"].items() if k != "slo.budget_ms"}
        assert span["attributes"] == told
        # The spans of a request and of its batch are linked in both directions.
        own = request["context"]["span_id"].removeprefix("0x")
        (batch,) = (batches[i] for i in linked(request))
        assert own in linked(batch)
        said = request["attributes"]
        assert said["slo.batch_size"] == int(answer.headers["x-slo-batch-size"])
        assert said["slo.outcome"] == "ok"
        # The decision is in the scheduler's log.
        decision = queue["attributes"]["slo.decision"]
        assert decision == batch["attributes"]["slo.decision"]
        _, _, number = decision.split("-")
        (arrived,) = rows[rows["client_request"] == said["slo.request_id"]]["request"]
        (chosen,) = rows[(rows["what"] == "dispatch") & (rows["batch"] == int(number))]["requests"]
        assert arrived in chosen
    for batch in batches.values():
        names, top = way_up(spans, batch)
        assert names[1].startswith("replica_handle_request square-small-worker execute")
        assert names[2].startswith("route_to_replica square-small-worker execute")
        assert names[3] == "slo.request"
        assert top in {above for _, above in callers}
    (request,) = (s for s in by_trace[refused[0]] if s["name"] == "slo.request")
    assert request["attributes"]["slo.outcome"] == "refused"
    assert request["status"]["status_code"] == "ERROR"


def _until_whole(folder, wanted, above, seconds=60):
    """Spans, when each of the traces has one of each of these names, and all of ours lead up to a
    caller's."""
    deadline = time.monotonic() + seconds
    while True:
        spans = exported(folder)
        if all(
            traces
            <= {
                s["context"]["trace_id"].removeprefix("0x")
                for s in spans.values()
                if s["name"].startswith(name)
            }
            for name, traces in wanted.items()
        ) and all(way_up(spans, span)[1] in above for span in ours(spans)):
            return spans
        assert time.monotonic() < deadline, sorted(s["name"] for s in spans.values())
        time.sleep(0.1)


def _log(folder, seconds=60):
    """Rows of the decision log, when all is written."""
    deadline = time.monotonic() + seconds
    while True:
        files = sorted(folder.glob("*.parquet"))
        # Each is opened once, because a longer file may take its place.
        parts = [pd.read_parquet(io.BytesIO(file.read_bytes())) for file in files]
        rows = pd.concat(parts) if parts else pd.DataFrame({"request": []})
        if rows["request"].nunique() >= 7:
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)
