"""For all tests: hypothesis examples are the same in every run and have no time limit, and
environment variables that choose weights are not set."""

from __future__ import annotations

import gc
import logging
import os
import socket

import pytest
from hypothesis import HealthCheck, settings

from ray_slo.core.seldom import Seldom

settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")


os.environ.pop("RAY_SLO_WEIGHTS", None)


def pytest_collection_finish():
    """What is imported stays. A worker collects garbage whenever it loads or frees a variant, which
    would walk through all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _every_line_is_new():
    """Or a line that an earlier test caused would be held back."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        for held in getattr(logger, "filters", ()):
            if isinstance(held, Seldom):
                held.forget()


@pytest.fixture
def no_network(monkeypatch):
    """Nothing can be connected to. The list holds what was tried."""
    tried = []

    def refuse(*args, **_):
        tried.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


@pytest.fixture
def one_thread():
    """So that other processes on the machine do not hold up torch's threads at every step."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
