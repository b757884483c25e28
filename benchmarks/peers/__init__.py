"""Systems to compare with, as policies: name one as in "benchmarks.peers:Nexus"."""

from benchmarks.peers.clockwork import Clockwork
from benchmarks.peers.nexus import Nexus, Node, Session, squishy_bin_packing
from benchmarks.peers.window import WindowEager

__all__ = ["Clockwork", "Nexus", "Node", "Session", "WindowEager", "squishy_bin_packing"]
