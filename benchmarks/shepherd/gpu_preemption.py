"""Profiles, exit points and FLEX on a real GPU (skipped where there is none).

Needs CUDA. Where torch has no CUDA device nothing is measured, and the one row says so.

* Table 4: α and β of ℓ(b) = α·b + β (median, float32, TF32 as torch has it by default), and the
  number of exit points chosen, for the networks of torchvision with random weights. Without
  torchvision, for the ResNets of `benchmarks.shepherd.networks`.
* Figure 12: p95 of the preemption delay and slowdown at that number, the worst of the batch sizes.
* §7.2: FLEX against itself without preemption, one GPU, one process (`two_streams.py`),
  with ResNet18 and ResNet269; times are stretched so that a batch of one of the latter takes the
  79 ms of the paper, and printed rates are shrunk likewise. The paper's 6.2 is that of the first
  burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.rows import Row
from benchmarks.shepherd.networks import resnet
from benchmarks.shepherd.two_streams import Result, serve, streams
from benchmarks.zoos import load
from ray_slo.core import LatencyProfile
from ray_slo.models.preemption import Preemptible
from ray_slo.models.preemption_profile import PreemptionProfile, profile_preemption
from ray_slo.models.profiling import doubling_sizes, profile_callable, to_profile
from ray_slo.policies import make_policy

NAME = "gpu-preemption"
SOURCE = "SHEPHERD Table 4, Figure 12, §7.2"
DEPTHS_OF_TABLE_4 = (18, 34, 50, 101, 152)
OTHERS = {  # names in the paper: in torchvision, and the side of its pictures
    "DenseNet121": ("densenet121", 224),
    "DenseNet161": ("densenet161", 224),
    "DenseNet169": ("densenet169", 224),
    "DenseNet201": ("densenet201", 224),
    "GoogLeNet": ("googlenet", 224),
    "Inception v3": ("inception_v3", 299),
}
CANDIDATES = (0, 4, 8, 16, 32, 48, 64, 96, 128)
MAX_BATCH = 128
SLOW_MS = 78.57  # ResNet269, batch of one, in Table 4


def run(quick: bool, seed: int) -> list[Row]:
    if not torch.cuda.is_available():
        why = f"skipped: torch {torch.__version__} finds no CUDA device"
        return [Row(why, "networks measured", "", 0)]
    device = torch.cuda.get_device_name()
    paper = load("shepherd_v100")
    rows = []
    for name, (build, side) in _networks(quick).items():
        module = build().eval().cuda()
        item = torch.randn(3, side, side, device="cuda")
        alpha_s, beta_s = _latency(module, item, quick).fit_linear()
        profile = _preemption(module, item, quick, seed)
        rows += _table_4(f"{device} · {name}", alpha_s, beta_s, profile, paper[name])
        del module
        torch.cuda.empty_cache()
    return [*rows, *_two_streams(device, quick, seed)]


def _networks(quick: bool) -> dict[str, tuple[Callable[[], Any], int]]:
    try:
        import torchvision.models as zoo
    except (ImportError, RuntimeError):  # RuntimeError: of another torch build
        depths = (18, 50) if quick else DEPTHS_OF_TABLE_4
        return {f"ResNet{d}": (lambda d=d: resnet(d), 224) for d in depths}
    names = {f"ResNet{d}": (f"resnet{d}", 224) for d in DEPTHS_OF_TABLE_4} | OTHERS
    if quick:
        names = {name: names[name] for name in ("ResNet18", "ResNet50")}
    return {name: (lambda n=n: _of_torchvision(zoo, n), side) for name, (n, side) in names.items()}


def _of_torchvision(zoo: Any, name: str) -> Any:
    if name in ("googlenet", "inception_v3"):
        return zoo.get_model(name, weights=None, aux_logits=False, init_weights=True)
    return zoo.get_model(name, weights=None)


def _latency(module: Any, item: torch.Tensor, quick: bool) -> LatencyProfile:
    batch = torch.stack([item] * MAX_BATCH)

    def forward(items: list[None]) -> None:
        module(batch[: len(items)])
        torch.cuda.synchronize()

    with torch.inference_mode():
        sizes = doubling_sizes(MAX_BATCH)
        samples = profile_callable(forward, None, sizes, budget_s=2 if quick else 10)
    return to_profile(samples, quantile=0.5, max_batch_size=MAX_BATCH)


def _preemption(module: Any, item: torch.Tensor, quick: bool, seed: int) -> PreemptionProfile:
    return profile_preemption(
        module,
        item,
        (1, 32) if quick else (1, 8, 32, 128),
        (0, 16, 64) if quick else CANDIDATES,
        budget_s=4 if quick else 40,
        seed=seed,
    )


def _table_4(
    case: str, alpha_s: float, beta_s: float, profile: PreemptionProfile, paper: Any
) -> list[Row]:
    chosen = [p for p in profile.points if p.exit_points == profile.chosen]
    return [
        Row(case, "α", "ms", 1e3 * alpha_s, paper.alpha_ms),
        Row(case, "β", "ms", 1e3 * beta_s, paper.beta_ms),
        Row(case, "exit points", "", profile.chosen, paper.exit_points),
        Row(case, "delay p95", "%", 100 * max(p.delay for p in chosen)),
        Row(case, "slowdown", "%", 100 * max(p.slowdown for p in chosen)),
    ]


def _two_streams(device: str, quick: bool, seed: int) -> list[Row]:
    profiles: dict[str, LatencyProfile] = {}
    runs: dict[str, Callable[[int], object]] = {}
    delay_s = 0.0
    for depth in (18, 269):
        name, module = f"ResNet{depth}", resnet(depth).cuda()
        item = torch.randn(3, 224, 224, device="cuda")
        preemption = _preemption(module, item, quick, seed)
        Preemptible(module, preemption.exit_points)  # stays on the module
        profiles[name] = _latency(module, item, quick).scaled(1.05)
        runs[name] = _runner(module, torch.stack([item] * MAX_BATCH))
        chosen = [p for p in preemption.points if p.exit_points == preemption.chosen]
        delay_s = max(delay_s, *(p.delay_p95_s for p in chosen))
    quick_name, slow_name = profiles
    scale = profiles[slow_name].latency(1) / (SLOW_MS / 1e3)
    rows = []
    for periods, label in ((1, "the first burst"), (10 if quick else 100, "many bursts")):
        for slo_ms in (250.0, 90.0):
            results: dict[str, Result] = {}
            for policy, preempts in (("flex", True), ("flex, no preemption", False)):
                kwargs = {"preemption": preempts, "preempt_delay_ms": 1e3 * delay_s}
                arrivals = streams(quick_name, slow_name, periods, scale)
                slo_s = scale * slo_ms / 1e3
                results[policy] = asyncio.run(
                    serve(make_policy("flex", kwargs), profiles, runs, arrivals, slo_s)
                )
            for policy, result in results.items():
                case = f"{device}, SLO {slo_ms:g} ms, {label} · {policy}"
                better = results["flex"].goodput / max(result.goodput, 1e-9)
                is_paper = policy != "flex" and label == "the first burst"
                paper = {250.0: 1.0, 90.0: 6.2}[slo_ms] if is_paper else None
                rows += [
                    Row(case, "goodput", "req/s", scale * result.goodput),
                    Row(case, "flex is better by", "×", better, paper),
                    Row(case, "preempted", "batches", len(result.delays_s)),
                ]
    return rows


def _runner(module: Any, batch: torch.Tensor) -> Callable[[int], object]:
    def run(batch_size: int) -> object:
        with torch.inference_mode():
            return module(batch[:batch_size]).argmax(1).cpu()

    return run
