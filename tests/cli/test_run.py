"""`ray-slo run` hands everything to `serve run`, in the fast mode where that is possible."""

import os
import socket

import pytest
from typer.testing import CliRunner

from ray_slo.cli import app
from ray_slo.cli import run as run_module
from ray_slo.core.environment import FAST
from ray_slo.core.processes import NICENESS_ENV
from ray_slo.serve.deadlines import PROXY_CALLBACK_ENV
from ray_slo.serve.proxy import modes

USED = (modes.HAPROXY_ENV, modes.BINARY_ENV, modes.BUFFER_ENV, modes.DRAIN_ENV, *modes.PORT_ENVS)
USED += (*modes.FILE_ENVS, "RAY_ADDRESS")


@pytest.fixture
def environ(monkeypatch):
    """The environment that `serve run` gets, and its arguments."""
    found = {}

    def execute(path, argv):
        found.update(os.environ, path=path, argv=argv)

    for name in (*USED, NICENESS_ENV, PROXY_CALLBACK_ENV, FAST.name, "RAY_SLO_MARK"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")  # no Ray of this machine counts
    monkeypatch.setattr(run_module, "_PORT", 0)  # is free
    return found


def said(*args):
    result = CliRunner().invoke(app, ["run", *args])
    assert result.exit_code == 0
    return result.output


def test_all_arguments_are_those_of_serve_run(environ):
    output = said("config.yaml", "--name", "x", "-r", "--app-dir=.", "key=value")
    assert environ["argv"][:3] == ["serve", "run", "config.yaml"]
    assert environ["argv"][3:] == ["--name", "x", "-r", "--app-dir=.", "key=value"]
    assert environ[NICENESS_ENV] == "0"
    assert environ[PROXY_CALLBACK_ENV]
    fast = modes.is_possible()
    assert ("mode: fast" in output) == fast
    assert (environ.get(modes.HAPROXY_ENV) == "1") == fast


def test_the_ordinary_mode_can_be_chosen(environ, monkeypatch):
    monkeypatch.setenv(FAST.name, "0")
    assert "mode: ordinary" in said("words:app")
    assert modes.HAPROXY_ENV not in environ
    assert environ[PROXY_CALLBACK_ENV]  # the door in Serve's proxy


def test_without_serve_it_says_so(environ, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["run", "config.yaml"])
    assert result.exit_code == 2
    assert "no `serve` beside" in result.output
    assert not environ


@pytest.mark.parametrize("port_of", ["config", "default"])
def test_another_program_on_the_port_is_named_before_ray_starts(
    environ, monkeypatch, tmp_path, port_of
):
    config = tmp_path / "app.yaml"
    with socket.socket() as other:
        # As Serve's proxies do.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.listen()
        if port_of == "config":
            config.write_text(f"http_options: {{port: {port}}}\napplications: []")
        else:
            monkeypatch.setattr(run_module, "_PORT", port)
            config.write_text("applications: []")
        result = CliRunner().invoke(app, ["run", str(config)])
        assert result.exit_code == 2
        assert f"another program listens on 127.0.0.1:{port}" in " ".join(result.output.split())
        assert not environ
        without = config.with_name("without.yaml")
        without.write_text("proxy_location: Disabled\napplications: []")
        said(str(without))
        said(str(config), "--address", "10.0.0.1:6379")  # a Ray that runs already
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        said(str(config))
