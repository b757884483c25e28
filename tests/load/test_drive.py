"""The load generator against a tiny HTTP server: no Ray."""

from __future__ import annotations

import asyncio
import functools
import json

import aiohttp
import numpy as np
import pytest

from ray_slo.load import drive as loadgen
from ray_slo.load.drive import run_handle, run_http, run_http_process
from ray_slo.load.report import parse_label
from ray_slo.load.workload import Payloads, Recorded, load_payloads
from ray_slo.serve.errors import Expired, RefusedEarly
from tests.load.server import Answers, serving
from tests.serve import clock


@pytest.fixture
def beside(monkeypatch, tmp_path):
    """`run_http` in a time of its own, with the `Answers` given on its loop and a Unix socket."""

    def begin(respond) -> Answers:
        answers = Answers(respond)
        drive = loadgen.drive

        async def drive_it(*args):
            server = await asyncio.start_unix_server(answers.connection, "socket")
            try:
                return await drive(*args)
            finally:
                server.close()

        monkeypatch.setattr(loadgen, "drive", drive_it)
        return answers

    monkeypatch.setattr(loadgen, "_probe", lambda *_: asyncio.sleep(0))
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    connector = functools.partial(aiohttp.UnixConnector, "socket")
    monkeypatch.setattr(aiohttp, "TCPConnector", connector)
    monkeypatch.setattr(asyncio.events, "new_event_loop", clock.Loop)
    return begin


def constant(count: int, gap_s: float, payloads: Payloads, **kwargs) -> Recorded:
    times = np.arange(count) * gap_s
    return Recorded.record(times, payloads, duration_s=count * gap_s, **kwargs)


def test_statuses_labels_and_headers(beside) -> None:
    answers = {
        b"right": (0, 200, {"x-slo-batch-size": "4", "x-slo-queue-ms": "12"}, b'{"label": 1}'),
        b"wrong": (0, 200, {"x-slo-batch-size": "1", "x-slo-variant": "small"}, b'{"label": 7}'),
        b"slow": (3.1, 200, {}, b'{"label": 3}'),
        b"refused": (0, 503, {}, b"full"),
        b"expired": (0, 504, {}, b""),
        b"broken": (0, 500, {}, b"no such luck"),
        b"never": (30, 200, {}, b""),
    }
    payloads = Payloads(list(answers), [str(i + 1) for i in range(len(answers))])
    workload = constant(7, 0.01, payloads)
    server = beside(lambda body: answers[body])
    result = run_http(
        server.url, workload, payloads, slo_s=3, timeout_s=8, headers={"x-client": "me"}
    )
    assert all("x-client: me" in head.lower() for head, _ in server.requests)
    by_body = result.requests.set_index(
        result.requests["payload"].map(lambda i: payloads.items[i].decode())
    )
    assert by_body["status"].to_dict() == {
        "right": "ok",
        "wrong": "ok",
        "slow": "late",
        "refused": "refused",
        "expired": "expired",
        "broken": "error",
        "never": "timeout",
    }
    assert by_body.loc["broken", "error"] == "no such luck"
    assert by_body.loc["right", "queue_s"] == 0.012
    assert by_body.loc["wrong", "variant"] == "small"
    summary = result.summary
    assert summary["accuracy"] == 0.5
    assert summary["goodput"] == pytest.approx(2 / 0.07)
    assert summary["bad_rate"] == pytest.approx(5 / 7)
    # A request in a batch of 4 is a quarter of it: 2 requests, 1.25 batches.
    assert summary["mean_batch"] == pytest.approx(2 / 1.25)
    assert summary["status"]["timeout"] == 1
    json.dumps(summary)


def test_latency_counts_from_the_intended_time_and_sends_do_not_wait(beside) -> None:
    """A server that stalls until all are there: every request still leaves, no wait is hidden."""
    last_came = asyncio.Event()

    async def stall() -> None:
        await last_came.wait()
        await asyncio.sleep(0.01)

    def respond(_body: bytes):
        if len(server.requests) == 20:
            last_came.set()
        return stall(), 200, {}, b"1"

    payloads = Payloads([b"x"])
    workload = constant(20, 0.02, payloads)
    server = beside(respond)
    result = run_http(server.url, workload, payloads, slo_s=5, timeout_s=10)
    requests = result.requests
    assert requests["sent_s"].to_numpy() == pytest.approx(requests["intended_s"].to_numpy())
    assert requests["sent_s"].max() < requests["done_s"].min()  # all sent before any answer
    assert (requests["latency_s"] == requests["done_s"] - requests["intended_s"]).all()


def test_same_workload_from_a_file_is_the_same_requests(tmp_path) -> None:
    payloads = Payloads([b"a", b"b", b"c"])
    workload = constant(10, 0.001, payloads, seed=3, arrivals="constant")
    workload.save(tmp_path / "w.npz")
    loaded = Recorded.load(tmp_path / "w.npz")
    assert loaded.times_s.tolist() == workload.times_s.tolist()
    assert loaded.payload.tolist() == workload.payload.tolist()
    assert loaded.about == {"arrivals": "constant", "seed": 3}
    # Shuffled rounds: no payload is sent twice more than another.
    assert np.ptp(np.bincount(loaded.payload, minlength=3)) <= 1
    with pytest.raises(ValueError, match="other payloads"):
        loaded.check(Payloads([b"a", b"b", b"d"]))


def test_a_file_that_is_no_workload_is_refused(tmp_path) -> None:
    path = tmp_path / "w.npz"
    path.write_text("hello")
    with pytest.raises(ValueError, match="not a workload file"):
        Recorded.load(path)
    with pytest.raises(FileNotFoundError):
        Recorded.load(tmp_path / "absent.npz")


def test_warm_up_is_sent_but_not_counted() -> None:
    payloads = Payloads([b"x"])
    workload = constant(20, 0.01, payloads, warmup_s=0.1)
    with serving(lambda _: (0, 200, {}, b"1")) as server:
        result = run_http(server.url, workload, payloads, slo_s=30)
        assert len(server.requests) == 20
    assert result.summary["requests"] == 10
    assert result.summary["offered_rate"] == pytest.approx(100)


@pytest.mark.slow
def test_own_process_gives_the_same_result_and_saves_it(tmp_path) -> None:
    payloads = Payloads([b"x"], ["1"])
    with serving(lambda _: (0, 200, {}, b"1")) as server:
        result = run_http_process(
            server.url, constant(5, 0.01, payloads), payloads, slo_s=60, timeout_s=60
        ).result(120)
    assert result.summary["status"]["ok"] == 5
    assert result.summary["accuracy"] == 1.0
    names = {path.name for path in result.save(tmp_path / "out")}
    assert names == {"requests.csv", "summary.json", "latency.svg"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["accuracy"] == 1.0
    assert len((tmp_path / "out" / "requests.csv").read_text().splitlines()) == 6


@pytest.mark.slow
def test_get_requests_without_payloads() -> None:
    with serving(lambda _: (0, 200, {}, b"hi")) as server:
        result = run_http(server.url, constant(3, 0.01, Payloads([b""])), slo_s=5)
        assert {head.split()[0] for head, _ in server.requests} == {"GET"}
    assert result.summary["accuracy"] is None


def test_nothing_listens() -> None:
    payloads = Payloads([b"x"])
    with pytest.raises(ConnectionError, match="is the application running"):
        run_http("http://127.0.0.1:9/", constant(1, 0.01, payloads), payloads, slo_s=1)
    with pytest.raises(ValueError, match="http://host:port"):
        run_http("localhost:8000", constant(1, 0.01, payloads), payloads, slo_s=1)


def test_handles_and_their_errors() -> None:
    class Handle:
        async def remote(self, item: str, shout: bool = False):
            if item == "refused":
                raise RefusedEarly("no")
            if item == "expired":
                raise Expired("too late")
            if item == "broken":
                raise RuntimeError("boom")
            if item == "hangs":
                await asyncio.sleep(60)
            return {"label": item.upper() if shout else item}

    items = ["fine", "refused", "expired", "broken", "hangs"]
    payloads = Payloads(items, ["FINE", *items[1:]])
    result = clock.run(
        run_handle(
            Handle(),
            constant(5, 0.01, payloads),
            payloads,
            slo_s=1,
            timeout_s=1.5,
            call_kwargs={"shout": True},
        )
    )
    rows = result.requests.sort_values("payload")
    assert rows["status"].tolist() == ["ok", "refused", "expired", "error", "timeout"]
    assert result.summary["accuracy"] == 1.0
    assert result.sample_errors == {"RuntimeError: boom": 1}


def test_payloads_from_folders_files_and_names(tmp_path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.png").write_bytes(label.encode())
    nested = load_payloads(str(tmp_path))
    assert nested.labels == ["cat", "dog"]
    assert nested.body(1) == (b"dog", "image/png")
    assert load_payloads(str(tmp_path / "*" / "*.png")).labels is None
    lines = tmp_path / "requests.jsonl"
    lines.write_text('{"x": 1}\n[2]\n')
    assert load_payloads(str(lines)).body(1) == (b"[2]", "application/json")
    assert load_payloads("string:digits").items == list("0123456789")
    assert Payloads([np.ones(2)]).body(0) == (b"[1.0, 1.0]", "application/json")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/at/all", "nothing at 'nowhere/at/all'"),
        ("no_such_module:x", "no_such_module"),
        ("string:nothing_of_this_name", "nothing_of_this_name"),
    ],
)
def test_bad_payload_sources_say_what_is_wrong(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_payloads(source)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (b'{"label": 3, "confidence": 1}', "3"),
        (b"3", "3"),
        (b"three", "three"),
        ({"label": np.int64(3)}, "3"),
        (np.int64(3), "3"),
        ({"other": 3}, None),
    ],
)
def test_labels_of_answers(answer: object, label: str | None) -> None:
    assert parse_label(answer, "label") == label
