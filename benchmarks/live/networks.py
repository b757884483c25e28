"""Networks for the nodes of one machine: each has a namespace of its own, and a cable to the rest.

A cable can be pulled out (`Network.cut`). The processes of that node then live on, and no packet
goes in or out, as if the switch of a rack had failed. Abstract Unix sockets belong to a namespace,
too, so nodes reach each other only through the cable, as machines do.

This process must be in a namespace of its own, too (`ALONE` starts one). Then nothing listens on an
address that another machine can reach. The namespaces and their cables end with their processes.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

ALONE = ("unshare", "--net")  # before a command: it runs in an empty network namespace
HEAD = "10.77.0.1"
_BRIDGE = "nodes"


@dataclass
class Network:
    """The network namespace of one node.

    Attributes:
        address: of the node.
        inside: before a command: it runs in this namespace.
    """

    address: str
    inside: tuple[str, ...]
    _cable: str

    def cut(self) -> None:
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self._cable, "up")


class Networks:
    """A bridge in the namespace of this process, and the networks that hang on it."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        self._ends = ends
        self._made = 0

    def add(self) -> Network:
        self._made += 1
        address, cable = f"10.77.0.{1 + self._made}", f"cable{self._made}"
        holder = self._ends.enter_context(_holder())
        inside = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        peer = ("peer", "name", "eth0", "netns", str(holder.pid))
        _ip("link", "add", "name", cable, "type", "veth", *peer)
        _ip("link", "set", cable, "master", _BRIDGE, "up")
        _ip("address", "add", f"{address}/24", "dev", "eth0", inside=inside)
        _ip("link", "set", "eth0", "up", inside=inside)
        return Network(address, inside, cable)


@contextlib.contextmanager
def networks() -> Iterator[Networks]:
    """Prepare the namespace of this process, which must be empty yet (`ALONE`)."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "name", _BRIDGE, "type", "bridge")
    _ip("address", "add", f"{HEAD}/24", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "up")
    try:
        with contextlib.ExitStack() as ends:
            yield Networks(ends)
    finally:
        _ip("link", "delete", _BRIDGE)


def why_not() -> str:
    """Return why this machine cannot make networks; empty if it can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no program {tool!r}"
    both = "ip link add name one type veth peer name other && ip link add name third type bridge"
    tried = subprocess.run([*ALONE, "sh", "-c", both], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen[str]]:
    """Keep a new namespace open. The process ends with its stdin, so also if this one is killed."""
    script = "ip link set lo up && echo ready && read line"
    with subprocess.Popen(
        [*ALONE, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError("a network namespace did not start")
        yield holder


def _ip(*order: str, inside: tuple[str, ...] = ()) -> None:
    subprocess.run([*inside, "ip", *order], check=True)
