from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from ray_slo.cli import app
from ray_slo.cli.bench import make_workload

run = CliRunner()


@pytest.fixture(scope="module")
def url():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"label": 1}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of 5, a busy machine may turn one away

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_bench_prints_saves_and_replays(url: str, tmp_path) -> None:
    for label in ("0", "1"):
        (tmp_path / "data" / label).mkdir(parents=True)
        (tmp_path / "data" / label / "x.png").write_bytes(b"x")
    common = ["bench", url, "--payload", str(tmp_path / "data"), "--json", "--slo-ms", "60000"]
    first = run.invoke(
        app,
        [
            *common,
            "--rate",
            "40",
            "--duration-s",
            "1",
            "--warmup-s",
            "0.1",
            "--record",
            str(tmp_path / "w.npz"),
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert first.exit_code == 0, first.output
    summary = json.loads(first.stdout)
    assert summary["status"]["ok"] == summary["requests"] > 10
    assert 0.2 < summary["accuracy"] < 0.8  # every answer is 1, half of the labels are
    assert (tmp_path / "out" / "requests.csv").exists()
    again = json.loads(run.invoke(app, [*common, "--replay", str(tmp_path / "w.npz")]).stdout)
    assert again["requests"] == summary["requests"]
    assert again["accuracy"] == summary["accuracy"]  # the same payloads


def test_bench_table(url: str, tmp_path) -> None:
    (tmp_path / "x.txt").write_text("x")
    result = run.invoke(
        app,
        [
            "bench",
            url,
            "--payload",
            str(tmp_path / "x.txt"),
            "--arrivals",
            "constant",
            "--rate",
            "20",
            "--duration-s",
            "0.5",
            "--warmup-s",
            "0",
            "--slo-ms",
            "60000",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "goodput" in result.stdout
    assert "10 ok" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either a URL or --handle"),
        (["http://127.0.0.1:9/", "--duration-s", "0.1", "--warmup-s", "0"], "is the application"),
        (["http://x/", "--rate", "0"], "--rate must be positive"),
        (["http://x/", "--warmup-s", "99"], "--warmup-s must be at least 0"),
        (["http://x/", "--arrivals", "weekly"], "--arrivals must be poisson, gamma, constant"),
        (["http://x/", "--shape", "1"], "--shape goes with --arrivals gamma"),
        (["http://x/", "--interval-s", "60"], "--interval-s goes with a file of arrivals"),
        (["http://x/", "--arrivals", __file__, "--rate", "3"], "--rate cannot be used with a file"),
        (["http://x/", "--replay", "w.npz", "--rate", "3"], "--rate cannot be used with --replay"),
        (["http://x/", "--header", "nonsense"], "--header wants NAME:VALUE"),
        (["http://x/", "--payload", "/nowhere"], "nothing at '/nowhere'"),
        (["--handle", "app"], "--handle needs --payload"),
    ],
)
def test_helpful_errors(args: list[str], message: str) -> None:
    result = run.invoke(app, ["bench", *args])
    assert result.exit_code == 2
    assert message in result.output


def test_arrivals_are_seeded_and_traces_have_their_rates(tmp_path) -> None:
    one, two = (make_workload("gamma", 50, 10, shape=0.3, seed=5) for _ in range(2))
    assert one.times_s.tolist() == two.times_s.tolist()
    trace = tmp_path / "trace.csv"
    trace.write_text("# second, rate\n0,0\n1,200\n")
    workload = make_workload(str(trace), duration_s=60)
    assert workload.duration_s == 2
    assert workload.times_s.min() >= 1
    assert 150 < len(workload) < 250
    assert workload.about["read"].endswith("(from 'second' and 'rate'); the run takes all of it")


def test_a_file_longer_than_the_run_is_said(url: str, tmp_path) -> None:
    trace = tmp_path / "day.csv"
    lines = [f"2024-05-10 {i // 60:02}:{i % 60:02},{60 * 8.3}" for i in range(600)]
    trace.write_text("\n".join(["timestamp,requests", *lines]))
    args = ["bench", url, "--arrivals", str(trace), "--duration-s", "1", "--json"]
    result = run.invoke(app, args)
    assert result.exit_code == 0, result.output
    assert (
        f"{trace}: 600 intervals of 60 s, 8.3 requests/s on average (from 'timestamp' and "
        "'requests'); the run takes the first 1 s of 36000 s\n"
    ) in result.stderr
    assert json.loads(result.stdout)["requests"] < 30


def test_a_run_without_a_request_is_refused(tmp_path) -> None:
    late = tmp_path / "late.csv"
    late.write_text("time_s\n30\n31.5\n")
    with pytest.raises(ValueError, match=r"no request in the first 20 s; give a longer"):
        make_workload(str(late))
