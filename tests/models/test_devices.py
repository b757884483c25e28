"""How users name devices, what "auto" is, and what they hear if it is the CPU.

There is no GPU here, so torch and onnxruntime pretend one, or pretend to be built for one.
"""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ray_slo.models import devices
from ray_slo.models.devices import check_session_device, open_session, pick_device, session_device


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    devices._warn.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def torch(monkeypatch):
    """torch, built for GPUs or not, with a number of GPUs."""
    real = pytest.importorskip("torch")

    def built(for_gpus=False, gpus=0):
        monkeypatch.setattr(real.version, "cuda", "12.8" if for_gpus else None)
        monkeypatch.setattr(real.version, "hip", None)
        monkeypatch.setattr(real.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(real.cuda, "device_count", lambda: gpus)
        return real

    return built


def test_names_of_devices(torch):
    real = torch(for_gpus=True, gpus=2)
    assert pick_device("cpu") == real.device("cpu")
    assert pick_device() == real.device("cuda") and pick_device("cuda:1").index == 1
    with pytest.raises(ValueError, match=r"device: got 'gpu', wanted 'auto', 'cpu', 'cuda'"):
        pick_device("gpu")
    with pytest.raises(ValueError, match=r"device: got 'cuda:2', .* sees 2 CUDA devices here$"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    ("for_gpus", "says"),
    [
        (True, "was built for GPUs, but finds none to use .* {num_gpus: 1}"),
        (False, "was built without support for GPUs .* install its build for GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(torch, for_gpus, says):
    torch(for_gpus)
    with pytest.raises(ValueError, match=f"got 'cuda', .* sees 0 CUDA devices here. It {says}"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("for_gpus", "visible", "says"),
    [
        (True, None, r"finds none to use \(CUDA_VISIBLE_DEVICES is not set\); check that the"),
        (True, "", r"finds none to use \(CUDA_VISIBLE_DEVICES is ''\); check that the worker"),
        (True, "0", r"finds none to use \(CUDA_VISIBLE_DEVICES is '0'\); check that the worker"),
        (False, "0", r"without support for GPUs \(CUDA_VISIBLE_DEVICES is '0'\); install its"),
        (False, None, None),
        (False, "", None),
        (False, "-1", None),
    ],
)
def test_the_cpu_is_explained_once_where_a_gpu_could_be_expected(
    torch, caplog, monkeypatch, for_gpus, visible, says
):
    real = torch(for_gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for _ in range(2):
        assert pick_device() == real.device("cpu")
    if says is None:
        assert caplog.messages == []
        return
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    start = f"device 'auto' is the CPU, because torch {real.__version__} was built "
    assert record.message.startswith(start)
    assert record.message.endswith(". If the CPU is right, set device: cpu")
    assert re.search(says, record.message)


def test_who_names_the_cpu_hears_nothing(torch, caplog):
    torch(for_gpus=True)
    pick_device("cpu")
    assert caplog.messages == []


# --- onnxruntime ---------------------------------------------------------------------------------


@pytest.fixture
def onnxruntime(monkeypatch):
    """A pretended onnxruntime: its sessions run on the CPU if the GPU is not there."""

    def built(for_gpus, gpus=0):
        class Session:
            def __init__(self, path, options, providers):
                self.asked, self.options = providers, {}
                for provider in providers:
                    name, options = provider if isinstance(provider, tuple) else (provider, {})
                    if name.startswith("CPU") or int(options["device_id"]) < gpus:
                        self.options[name] = options

            def get_providers(self):
                return list(self.options)

            def get_provider_options(self):
                return self.options

        names = ["CPUExecutionProvider"]
        module = SimpleNamespace(
            __version__="1.30.0",
            get_available_providers=lambda: ["CUDAExecutionProvider"] * for_gpus + names,
            InferenceSession=Session,
        )
        monkeypatch.setitem(sys.modules, "onnxruntime", module)

    return built


def opened(device):
    return session_device(open_session("network.onnx", None, device))


def test_sessions_run_where_the_name_says(onnxruntime, caplog):
    onnxruntime(for_gpus=True, gpus=2)
    names = ("auto", "cpu", "cuda", "cuda:1")
    assert [opened(name) for name in names] == ["cuda:0", "cpu", "cuda:0", "cuda:1"]
    assert open_session("network.onnx", None, "cpu").asked == ["CPUExecutionProvider"]
    assert caplog.messages == []


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "CPU", "", None, 0])
def test_bad_names_of_devices_are_refused_with_the_choices(device):
    with pytest.raises(ValueError, match=r"^device: got .*, wanted 'auto', 'cpu', 'cuda' or"):
        check_session_device(device)
    with pytest.raises(ValueError, match=r"^device: got .*, wanted 'auto', 'cpu', 'cuda' or"):
        open_session("network.onnx", None, device)


@pytest.mark.parametrize(
    ("for_gpus", "says"),
    [(True, "was built for GPUs, but finds none"), (False, "was built without support for GPUs")],
)
def test_sessions_without_their_gpu_are_refused_or_explained(onnxruntime, caplog, for_gpus, says):
    onnxruntime(for_gpus)
    with pytest.raises(ValueError, match=rf"^device: got 'cuda', but onnxruntime 1.30.0 {says}"):
        opened("cuda")
    assert opened("cpu") == "cpu" and caplog.messages == []
    assert [opened("auto"), opened("auto")] == ["cpu", "cpu"]
    start = f"device 'auto' is the CPU, because onnxruntime 1.30.0 {says}"
    assert [message.startswith(start) for message in caplog.messages] == [True] * for_gpus


def test_the_installed_onnxruntime_opens_on_the_cpu(tmp_path):
    real, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    names = [value(name, onnx.TensorProto.FLOAT, [2]) for name in ("x", "y")]
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
    graph = onnx.helper.make_graph(nodes, "g", names[:1], names[1:])
    opsets = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "g")
    session = open_session(tmp_path / "g", real.SessionOptions(), "cpu")
    assert session_device(session) == "cpu"
    assert session.run(None, {"x": np.float32([-1, 2])})[0].tolist() == [0, 2]
