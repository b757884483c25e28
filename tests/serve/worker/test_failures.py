"""When a worker whose batches fail asks to be replaced, and when that would not help."""

import time
from types import SimpleNamespace

import pytest

from ray_slo.errors import BadInput
from ray_slo.serve.suspects import note_sick, sick_lately
from ray_slo.serve.worker import failures
from tests.serve.fakes import piece
from tests.serve.loops import in_loop

CUDA = RuntimeError("CUDA error: device-side assert triggered")


class Refused(Exception):
    status_code = 401


class Model:
    """Raises what the item is; the error given as `broken` for every item from then on."""

    def __init__(self):
        self.broken = None

    def __call__(self, items):
        time.sleep(0.001)
        if self.broken is not None:
            raise self.broken
        for item in items:
            if isinstance(item, Exception):
                raise item
        return items


class Exemplary(Model):
    @staticmethod
    def example_input():
        return 1


@pytest.fixture
def passes(monkeypatch):
    """Lets seconds pass, for the rule."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: now.s))

    def passing(seconds):
        now.s += seconds

    return passing


async def run(worker, *batches):
    for item in batches:
        run.count += 1
        await worker.execute(piece(f"b{run.count}", item), "w0")


run.count = 0


async def fails_for_long(worker, passes, item, times=5):
    for _ in range(times):
        await run(worker, item)
        passes(2.5)


@in_loop
@pytest.mark.parametrize("cls", [Model, Exemplary])
async def test_a_worker_that_fails_since_an_error_is_unhealthy(app, passes, cls):
    options = {} if cls is Model else {"profile_seconds": 0.01}
    async with app(cls, **options) as (_, worker):
        if cls is Model:
            await run(worker, 1)
        worker.models.instances["m"].broken = CUDA
        await run(worker, 2, 3)
        passes(60)
        await worker.check_health()  # twice is not every batch
        await fails_for_long(worker, passes, 4, times=1)
        for _ in range(3):
            with pytest.raises(RuntimeError) as unhealthy:
                await worker.check_health()
        assert str(unhealthy.value) == (
            "the last 3 batches of m, over 60 s, failed with RuntimeError: "
            "CUDA error: device-side assert triggered"
        )
        worker.models.instances["m"].broken = None
        await run(worker, 5)  # one that works ends it
        await worker.check_health()


@in_loop
async def test_items_that_fail_replace_no_worker_with_an_example(app, passes):
    async with app(Exemplary, profile_seconds=0.01) as (_, worker):
        await fails_for_long(worker, passes, CUDA)
        await worker.check_health()


@in_loop
async def test_good_items_beside_bad_ones_replace_no_worker(app, passes):
    async with app(Model, isolate_errors=True) as (_, worker):
        for _ in range(5):
            await worker.execute(piece(f"p{time.monotonic()}", 1, CUDA, 2), "w0")
            passes(5)
        await worker.check_health()


@pytest.mark.slow
@in_loop
@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("x"), KeyError("pixels"), Refused("no"), BadInput("x"), MemoryError("m")),
        *(ConnectionResetError("db"), TimeoutError("db")),
    ],
)
async def test_what_items_or_other_services_cause_replaces_no_worker(app, passes, error):
    async with app(Model) as (_, worker):
        await run(worker, 1)
        await fails_for_long(worker, passes, error)
        await worker.check_health()


@in_loop
async def test_a_method_that_never_worked_replaces_no_worker(app, passes):
    async with app(Model) as (_, worker):
        await fails_for_long(worker, passes, CUDA)
        await worker.check_health()


@in_loop
async def test_other_errors_and_failures_at_once_replace_no_worker(app, passes):
    async with app(Model) as (_, worker):
        await run(worker, 1, CUDA, CUDA, CUDA, CUDA)
        await worker.check_health()
        await run(worker, 1)
        for i in range(9):
            await run(worker, RuntimeError(f"item {i}"))
            passes(5)
        await worker.check_health()


def test_each_replacement_makes_the_next_one_later(tmp_path, monkeypatch):
    monkeypatch.setattr("ray_slo.serve.suspects._folder", lambda: tmp_path)
    assert failures.Failures("app#m/x")._span_s == 5
    note_sick("app#m/x")
    (noted,) = tmp_path.iterdir()
    assert (sick_lately("app#m/x", 60), sick_lately("app#m", 60)) == (1, 0)
    assert failures.Failures("app#m/x")._span_s == 20
    for pid in range(9):
        other = tmp_path / f"{pid}-{noted.name.partition('-')[2]}"
        other.write_text(noted.read_text())
    assert failures.Failures("app#m/x")._span_s == 300
    assert sick_lately("app#m/x", -1) == 0
