"""The memory of variants: on a fake device, in this process, and in errors."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ray_slo.models import memory
from ray_slo.models.memory import Footprint, Gpu, Host, Meter, is_out_of_memory
from tests.models.pretended import NOTHING, Pretended

MB = 2**20


def metered(host, gpu=NOTHING, **kwargs):
    return Meter(host, gpu, release=lambda: None, **kwargs)


def test_what_loading_adds_is_the_variants():
    host = Pretended(100, total_mb=1000)
    meter = metered(host)
    for variant, mb in (("a", 300), ("b", 50)):
        with meter.loading(variant):
            host.take(mb)
    assert meter.variants == {"a": Footprint(300), "b": Footprint(50)}
    assert meter.room_mb == 900  # the process has 100 beside them
    host.take(-50)
    meter.forget(["b"])
    assert meter.variants == {"a": Footprint(300)}
    assert meter.room_mb == 900


def test_the_largest_batch_is_measured_and_smaller_ones_are_not():
    host = Pretended(0, total_mb=1000)
    meter = metered(host)
    with meter.loading("a"):
        host.take(100)
    for size, mb in ((4, 40), (8, 60), (2, 500), (8, 500)):
        with meter.running("a", size):
            host.take_for_a_moment(mb)
    assert meter.variants["a"] == Footprint(100, 60, 8)
    assert meter.variants["a"].mb == 160
    with pytest.raises(ValueError), meter.running("a", 16):
        host.take_for_a_moment(900)
        raise ValueError("of the user's")
    assert meter.variants["a"].batch_size == 8


def test_a_batch_beside_a_variant_that_is_being_loaded_tells_nothing():
    host = Pretended(0)
    meter = metered(host)
    with meter.loading("a"):
        host.take(100)
    with meter.loading("b"), meter.running("a", 8):
        host.take_for_a_moment(70)
    assert meter.variants["a"] == Footprint(100)
    with meter.running("a", 8):
        host.take_for_a_moment(30)
        with meter.loading("c"):
            host.take_for_a_moment(400)
    assert meter.variants["a"].batch_size == 8  # over before the batch was


def test_variants_on_a_gpu_share_that_and_others_the_process():
    host, gpu = Pretended(500, 4000), Pretended(None, None)
    meter = metered(host, gpu)
    with meter.loading("small"):
        host.take(10)
    assert (meter.device, meter.room_mb) == ("host", 3500)
    with meter.loading("large"):
        host.take(20)
        gpu.used_mb, gpu.total_mb = 200.0, 1000.0
    assert (meter.device, meter.room_mb) == ("gpu", 1000)
    assert meter.variants["large"] == Footprint(200)
    with meter.running("large", 32):
        gpu.take_for_a_moment(300)
    assert meter.variants["large"] == Footprint(200, 300, 32)
    meter.forget(["large"])
    assert meter.device == "host"


def test_what_is_said_of_a_worker_comes_first_and_is_kept_to():
    host = Pretended(100, total_mb=1000)
    meter = metered(host, limit_mb=150)
    with meter.loading("a"):
        host.take(80)
    meter.check_fits("a")
    with meter.running("a", 2, check=True):
        host.take_for_a_moment(60)
    with (
        pytest.raises(MemoryError, match=r"with a batch of 4 of a, .* take 200 MB; .* for 150 MB"),
        meter.running("a", 4, check=True),
    ):
        host.take_for_a_moment(120)
    assert meter.variants["a"] == Footprint(80, 60, 2)
    with meter.loading("b"):
        host.take(90)
    with pytest.raises(MemoryError, match="with b, the variants of this worker take 170 MB"):
        meter.check_fits("b")


def test_where_nothing_is_known():
    meter = metered(Pretended(None), Pretended(None))
    with meter.loading("a"), meter.running("a", 4):
        pass
    assert (meter.variants, meter.room_mb, meter.device) == ({}, None, "host")
    meter.check_fits("a")


def test_of_this_process():
    meter = Meter(Host())
    kept = {}
    with meter.loading("a"):
        kept["a"] = bytearray(64 * MB)
    with meter.running("a", 4):
        batch = bytearray(32 * MB)
        del batch
    found = meter.variants["a"]
    assert 60 < found.load_mb < 80
    assert 28 < found.batch_mb < 45
    assert meter.room_mb > found.mb


class Cuda:
    """torch.cuda with two devices."""

    def __init__(self, initialized=True):
        self.initialized, self.reset, self.emptied = initialized, [], 0

    def is_initialized(self):
        return self.initialized

    def device_count(self):
        assert self.initialized
        return 2

    def memory_allocated(self, i):
        return (10 + i) * MB

    def max_memory_allocated(self, i):
        return (100 + i) * MB

    def memory_reserved(self, i):
        return 50 * MB

    def mem_get_info(self, i):
        return 400 * MB, 1000 * MB

    def get_device_properties(self, i):
        return SimpleNamespace(total_memory=1000 * MB)

    def reset_peak_memory_stats(self, i):
        self.reset.append(i)

    def empty_cache(self):
        self.emptied += 1


def test_a_gpu_through_torch(monkeypatch):
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    gpu = Gpu()
    assert (gpu.used_mb, gpu.peak_mb, gpu.total_mb) == (21, 201, 900)
    assert Gpu(share=0.25).total_mb == 500  # of two devices
    gpu.begin_peak()
    assert cuda.reset == [0, 1]
    memory.release()
    assert cuda.emptied == 1


def test_a_gpu_that_is_not_in_use_is_left_alone(monkeypatch):
    cuda = Cuda(initialized=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu = Gpu()
    assert (gpu.used_mb, gpu.peak_mb, gpu.total_mb) == (None, None, None)
    gpu.begin_peak()
    memory.release()
    assert not cuda.reset and not cuda.emptied


def test_a_gpu_through_nvml(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    of_gpu = {0: [(1, 7)], 1: [(memory.os.getpid(), 300), (2, 9)]}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=pid, usedGpuMemory=mb * MB) for pid, mb in of_gpu[gpu]
        ],
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=(8000 + gpu) * MB),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert (Gpu().used_mb, Gpu().total_mb) == (300, 8001)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpu().used_mb is None


class OutOfMemoryError(RuntimeError):
    """As torch's, which no test here has a GPU for."""


class XlaRuntimeError(Exception):
    pass


def raised_from(error):
    try:
        raise ValueError("the model failed") from error
    except ValueError as found:
        return found


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("cublas: CUBLAS_STATUS_ALLOC_FAILED"),
        XlaRuntimeError("RESOURCE_EXHAUSTED: 3 bytes"),
        raised_from(MemoryError()),
    ],
)
def test_errors_that_say_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [None, ValueError("out of memory"), RuntimeError("no"), KeyError("out of memory")]
)
def test_errors_that_do_not(error):
    assert not is_out_of_memory(error)


def test_an_error_raised_from_itself():
    error = ValueError("x")
    error.__cause__ = error
    assert not is_out_of_memory(error)
    memory.let_go(error)


def test_frames_of_an_error_let_go_of_what_they_hold():
    import weakref

    class Tensor:
        pass

    found = []

    def batch():
        tensor = Tensor()
        found.append(weakref.ref(tensor))
        raise MemoryError

    try:
        batch()
    except MemoryError as error:
        kept = error
    assert found[0]() is not None
    memory.let_go(kept)
    assert found[0]() is None
