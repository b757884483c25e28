"""The networks: small residual trunks, several snapshots of which are averaged.

Snapshots and views run one after the other, so a call costs ``members * views`` passes, each with a
fixed part (per-layer overhead, reading the weights) and a part per image: alpha * b + beta.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_slo.demo.digits.data import INK
from ray_slo.demo.digits.family import Spec

# A view is the image rotated (degrees) and moved (of half its side): too little to change a label.
VIEWS = (
    (0.0, 0.0, 0.0),
    (6.0, 0.06, 0.0),
    (-6.0, -0.06, 0.0),
    (3.0, 0.0, 0.06),
    (-3.0, 0.0, -0.06),
)


def look(images: Tensor, theta: Tensor, side: int) -> Tensor:
    """Images (b, 8, 8) in 0..16 through affine maps (b or 1, 2, 3): (b, 1, side, side) in 0..1."""
    b = len(images)
    grid = functional.affine_grid(theta.expand(b, 2, 3), [b, 1, side, side], align_corners=False)
    return functional.grid_sample(images[:, None] / INK, grid, align_corners=False)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(y)))


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


class Trunk(nn.Sequential):
    """(b, 1, side, side) -> logits (b, 10)."""

    def __init__(self, width: int, blocks: tuple[int, ...]) -> None:
        layers = _conv(1, width)
        for stage, count in enumerate(blocks):
            if stage:
                layers += _conv(width, 2 * width, stride=2)
                width *= 2
            layers += [Residual(width) for _ in range(count)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Network(nn.Module):
    """Images (b, 8, 8), ink 0..16 -> probabilities (b, 10), averaged over members and views."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        if not 1 <= spec.views <= len(VIEWS):
            raise ValueError(f"views: got {spec.views}, wanted 1 to {len(VIEWS)}")
        self.spec = spec
        self.members = nn.ModuleList(Trunk(spec.width, spec.blocks) for _ in range(spec.members))
        rows = []
        for angle, dx, dy in VIEWS[: spec.views]:
            c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            rows.append([[c, -s, dx], [s, c, dy]])
        self.register_buffer("theta", torch.tensor(rows), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        total = images.new_zeros(len(images), 10)
        for theta in self.theta:
            seen = look(images, theta[None], self.spec.side)
            for member in self.members:
                total += member(seen).softmax(1)
        return total / (len(self.theta) * len(self.members))


def macs(network: Network) -> int:
    """Multiply-adds for one image: the cost of a network without a clock."""
    total = 0

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += output[0].numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            total += module.weight.numel()

    hooks = [m.register_forward_hook(count) for m in network.modules()]
    with torch.inference_mode():
        network.eval()(torch.zeros(1, 8, 8))
    for hook in hooks:
        hook.remove()
    return total
