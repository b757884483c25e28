"""A published file is downloaded once and completely, or the error comes soon."""

from __future__ import annotations

import hashlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ray_slo.models.fetching import fetch

pytest.importorskip("filelock", reason="filelock comes with torch, which is not installed")

CONTENT = bytes(range(256)) * 5000
NAME = f"net-{hashlib.sha256(CONTENT).hexdigest()[:8]}.pth"


class Shelf(BaseHTTPRequestHandler):
    """Serves the file under any name; the first part of the path says what goes wrong."""

    def do_GET(self):
        self.server.asked += 1
        how = self.path.split("/")[1]
        if how == "missing":
            self.send_error(404)
            return
        if how == "silent":
            self.server.over.wait(10)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        try:
            if how == "stalls":
                self.wfile.write(CONTENT[:100])
                self.wfile.flush()
                self.server.over.wait(10)
            elif how == "short":
                self.wfile.write(CONTENT[:100])
            else:
                self.wfile.write(CONTENT)
        except ConnectionError:
            pass  # the client has seen enough

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    server.asked, server.over = 0, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def left_in(folder):
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_the_file_is_there_whole(server, tmp_path):
    file = tmp_path / "hub" / "checkpoints" / NAME
    fetch(f"{server.url}/models/{NAME}", file)
    assert file.read_bytes() == CONTENT
    assert left_in(file.parent) == {NAME}


def test_many_at_once_fetch_it_once(server, tmp_path):
    file = tmp_path / NAME
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch(f"{server.url}/models/{NAME}", file), range(4)))
    assert file.read_bytes() == CONTENT
    assert server.asked == 4 + 1  # each asks whether the server is there, one goes on


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"missing/{NAME}", "HTTP Error 404"),
        (f"silent/{NAME}", "timed out"),
        (f"stalls/{NAME}", "timed out"),
        (f"short/{NAME}", rf"broke off after 100 of {len(CONTENT)} bytes"),
        ("models/net-0123abcd.pth", "its SHA-256 is .*, which does not begin with 0123abcd"),
    ],
)
def test_anything_else_leaves_no_file_and_is_said(server, tmp_path, path, says):
    with pytest.raises(OSError, match=says):
        timeout_s = 0.3 if says == "timed out" else 30.0
        fetch(f"{server.url}/{path}", tmp_path / "net.pth", timeout_s=timeout_s)
    assert left_in(tmp_path) == set()


def test_without_a_network_it_is_said_at_once(no_network, tmp_path):
    with pytest.raises(OSError, match="no network"):
        fetch("https://download.pytorch.org/models/x.pth", tmp_path / "new" / "x.pth")
    assert len(no_network) == 1
    assert not (tmp_path / "new").exists()


def test_what_is_no_http_is_an_os_error_too(server, tmp_path):
    with pytest.raises(OSError, match=re.escape("BadStatusLine")):
        # A server of another kind: it speaks first, and nothing that HTTP knows.
        server.RequestHandlerClass = Greeter
        fetch(f"{server.url}/x.pth", tmp_path / "x.pth")


class Greeter(Shelf):
    def handle(self):
        self.wfile.write(b"220 ready\r\n\r\n")
