"""Facts about a measurement that a profile file has."""

from types import SimpleNamespace

import pytest

from ray_slo.models.memory import Footprint
from ray_slo.models.profiling import _about


@pytest.mark.parametrize("device, gpu", [("gpu", {"gpu": "NVIDIA X"}), ("host", {})])
def test_a_profile_names_the_gpu_that_the_network_used(monkeypatch, device, gpu):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    meter = SimpleNamespace(device=device, variants={"it": Footprint(12.34)})
    network = SimpleNamespace(runs="float32, graph")
    wanted = {"memory_of": device, "memory_mb": 12.3, "runs": "float32, graph"}
    assert _about(network, meter) == wanted | gpu
