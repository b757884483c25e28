"""The demo's load generator, against a server that begins to answer late."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ray_slo.demo import client
from ray_slo.demo.client import Client
from ray_slo.load.workload import Payloads, Recorded

PAYLOADS = Payloads([b"x"], ["1"])


@pytest.fixture
def server():
    """A server that answers 404 to the first two requests; `heard` has the headers of all."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(dict(self.headers))
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"label": 1}'
            self.send_response(404 if len(heard) <= 2 else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.heard, made.url = heard, f"http://127.0.0.1:{made.server_port}/"
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_from_one_process_wait_send_and_keep_in_flight(server):
    stream = Recorded.record([0.0, 0.01], PAYLOADS, duration_s=0.1)
    with Client() as made:
        made.wait_until_answered(server.url, PAYLOADS)
        assert len(server.heard) == 3
        result, began_s = made.send(server.url, stream, PAYLOADS, 60.0, 60.0, {"x-way": "a"})
        assert made.closed_loop(server.url, PAYLOADS, 2, 0.05, {"x-way": "b"}) > 0
    assert result.summary["status"]["ok"] == 2 and began_s > 0
    assert [headers.get("x-way") for headers in server.heard[3:5]] == ["a", "a"]
    assert {headers.get("x-way") for headers in server.heard[5:]} == {"b"}


def test_who_never_answers_is_named(server):
    with pytest.raises(ConnectionError, match="answers 404 after 0 s"):
        client._wait_until_answered(server.url, PAYLOADS, within_s=0.0)
    server.heard.clear()
    with pytest.raises(RuntimeError, match="answered 404"):
        client._closed_loop(server.url, PAYLOADS, 1, 0.01, {})
