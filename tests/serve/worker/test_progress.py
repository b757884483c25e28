"""What a starting worker tells all frontends."""

import asyncio
from types import SimpleNamespace

import pytest

from ray_slo.serve.messages import SERVING
from ray_slo.serve.worker import progress
from ray_slo.serve.worker.progress import Starting
from tests.serve.loops import in_loop


class Frontends:
    """A handle to all frontends that keeps what they are told."""

    def __init__(self):
        self.told = []

    def broadcast(self, method, said):
        assert method == "slo_progress"
        self.told.append(said)

        async def results_async(**kwargs):
            return []

        return SimpleNamespace(results_async=results_async)


@pytest.fixture
def frontends(monkeypatch):
    monkeypatch.setattr(progress, "_REPEAT_S", 0.01)
    monkeypatch.setattr(progress, "_LAST_WORDS_S", 0.02)
    return Frontends()


@in_loop
async def test_it_reports_its_start_again_and_again_until_it_serves(frontends):
    starting = Starting("w", "gpu", lambda: frontends, 2)
    async with starting.told():
        await asyncio.sleep(0.05)
        starting.doing("loading", "resnet50", 1)
        await asyncio.sleep(0.05)
    assert len(frontends.told) > 3
    assert (frontends.told[-2].doing, frontends.told[-2].of) == ("loading", 2)
    assert frontends.told[-1].doing == SERVING
    told = len(frontends.told)
    await asyncio.sleep(0.05)
    assert len(frontends.told) == told


@in_loop
async def test_it_reports_why_its_start_failed(frontends):
    starting = Starting("w", "gpu", lambda: frontends, 2)
    with pytest.raises(RuntimeError):
        async with starting.told():
            raise RuntimeError("no weights")
    assert frontends.told[-1].failed == "RuntimeError: no weights"
    told = len(frontends.told)
    await asyncio.sleep(0.05)
    assert len(frontends.told) == told


@in_loop
async def test_a_worker_starts_even_if_no_frontend_hears_it(monkeypatch):
    monkeypatch.setattr(progress, "_REPEAT_S", 0.01)

    def nobody():
        raise LookupError("no frontend")

    async with Starting("w", "gpu", nobody, 1).told():
        await asyncio.sleep(0.02)
