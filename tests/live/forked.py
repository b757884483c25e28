"""Ray's workers as forks of a process that has imported Ray, Serve and ray-slo.

A worker of Ray imports Ray twice, then Serve and ray-slo. That takes 4 s of CPU time, and the live
tests start hundreds. Ray's raylet runs this script in place of its `setup_worker.py` (`conftest`).
The script asks a server for a fork, waits until the fork has ended, and ends like it. The first
worker of a raylet starts the server. Frontends have another server than workers, as Serve reads
their variable when it is imported. A worker with other variables, with another interpreter or in
another folder is no fork: Ray's own script starts it.
"""

import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

SERVER = "--ray-slo-fork-server"
RAYLET = "RAY_RAYLET_PID"
OF_FRONTENDS = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
IMPORTED = (
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "ray_slo.serve.frontend.frontend",
    "ray_slo.serve.planner.actor",
    "ray_slo.serve.scheduler",
    "ray_slo.serve.worker",
)
OF_SETUP = ("--serialized-runtime-env-context", "--language")  # not for the worker itself


def main():
    if sys.argv[1] == SERVER:
        serve(socket.socket(fileno=int(sys.argv[2])))
        return
    context = json.loads(option(OF_SETUP[0]) or "{}")
    variables = context.get("env_vars") or {}
    usual = not context.get("command_prefix") and variables in ({}, OF_FRONTENDS)
    if not usual or context.get("py_executable") not in (None, sys.executable):
        own = next(arg for arg in sys.argv if arg.endswith("default_worker.py"))
        os.execv(
            sys.executable,
            [sys.executable, str(Path(own).with_name("setup_worker.py")), *sys.argv[1:]],
        )
    os.environ.update(variables)
    with connected("frontends" if variables else "workers") as server:
        ask = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": str(Path.cwd())}
        server.sendall(json.dumps(ask).encode() + b"\n")
        os._exit(int(server.makefile().readline() or 1))


def option(name):
    """The value of an argument of this script."""
    return next((a.partition("=")[2] for a in sys.argv if a.startswith(f"{name}=")), None)


def connected(whose):
    """Return a connection to the server of this raylet. Start it, if this is the first one."""
    address = f"\0ray-slo-fork-{os.environ[RAYLET]}-{whose}"  # it leaves no file behind
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(address)
        except ConnectionRefusedError:
            server.close()
        else:
            return server
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(address)
            except OSError:
                continue  # another worker was first
            listening.listen(256)
            number = listening.fileno()
            order = [sys.executable, __file__, SERVER, str(number)]
            subprocess.Popen(order, pass_fds=[number], start_new_session=True)


def serve(listening):
    """Fork for each client, until the raylet has ended. A fork ends with its client."""
    # Ray's generator of IDs must not begin before a fork, or all forks have the same IDs.
    actor = importlib.import_module("ray.actor")
    made = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: made(os.urandom(made.size())))
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    raylet, clients = Path("/proc", os.environ[RAYLET]), {}
    ready = selectors.DefaultSelector()
    ready.register(listening, selectors.EVENT_READ)
    while raylet.exists():
        for key, _ in ready.select(0.05):
            if key.fileobj is listening:
                client, _ = listening.accept()
                ask = json.loads(client.makefile().readline())
                if (pid := os.fork()) == 0:
                    ready.close()
                    for other in (listening, client, *clients.values()):
                        other.close()
                    become(ask)
                    return
                clients[pid] = client
                ready.register(client, selectors.EVENT_READ, pid)
            elif key.data in clients:  # the client was killed
                ready.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
        while clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with clients.pop(pid) as client:
                code = os.waitstatus_to_exitcode(status)
                try:
                    ready.unregister(client)
                    client.sendall(b"%d\n" % (code if code >= 0 else 128 - code))
                except (KeyError, OSError):
                    continue  # nobody waits for it


def become(ask):
    """Be the worker that a client was started for."""
    os.setpgid(0, 0)  # a raylet ends a worker with its process group
    os.environ.clear()
    os.environ.update(ask["env"])
    os.chdir(ask["cwd"])
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.argv = [arg for arg in ask["argv"] if not arg.startswith(OF_SETUP)]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
