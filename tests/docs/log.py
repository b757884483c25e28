"""A decision log for the pages whose commands read one, from a simulated run with overload."""

from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.policies import make_policy
from ray_slo.record.encode import Lines
from ray_slo.record.rows import Recording, Start
from ray_slo.simulation import Workload, simulate


def write(folder):
    profile = LatencyProfile.linear(0.012, 0.1, 16)
    model = Model("sleeper", 0.45, (Variant("sleeper", {"default": profile}),))
    lines = Lines(
        folder, "20261121T101259-sleeper-f4bc19b2", Start.of("deferred", {}, wall_at=1.8e9)
    )
    recording = Recording(make_policy("deferred"), lines)
    simulate(recording, Cluster.uniform([model], 2), Workload.poisson(100), duration_s=5, seed=1)
    lines.close()
    return folder
