"""Networks in plain torch with random weights, so that no benchmark needs torchvision.

The ResNets follow He et al., "Deep Residual Learning for Image Recognition". The stride is on the
3×3 convolution, as in torchvision. Parameters and multiplications are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# (Blocks per stage, whether they are bottlenecks). 269 is as in ResNeSt-269, SHEPHERD's largest.
DEPTHS: dict[int, tuple[tuple[int, int, int, int], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
    269: ((3, 30, 48, 8), True),
}


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """A residual block: 3×3, 3×3; a bottleneck is 1×1, 3×3, 1×1 with a quarter of the width."""

    def __init__(self, inputs: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inner = outputs // 4 if bottleneck else outputs
        shapes = [(inputs, inner, 3, stride), (inner, outputs, 3, 1)]
        if bottleneck:
            shapes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for i, shape in enumerate(shapes):
            layers += [*_conv(*shape), *([nn.ReLU(True)] if i < len(shapes) - 1 else [])]
        self.layers = nn.Sequential(*layers)
        change = stride != 1 or inputs != outputs
        self.shortcut = nn.Sequential(*_conv(inputs, outputs, 1, stride)) if change else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return torch.relu(self.layers(x) + shortcut)


def resnet(depth: int, *, classes: int = 1000, seed: int = 0) -> nn.Module:
    """Return a network in evaluation mode. Its input is float32 with shape (b, 3, 224, 224)."""
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {', '.join(map(str, DEPTHS))}, got {depth}")
    counts, bottleneck = DEPTHS[depth]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stem: list[Any] = [*_conv(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        stages, width = [], 64
        for stage, blocks in enumerate(counts):
            outputs = (256 if bottleneck else 64) << stage
            for i in range(blocks):
                stride = 2 if stage and not i else 1
                stages.append(Block(width, outputs, stride, bottleneck))
                width = outputs
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
        return nn.Sequential(*stem, *stages, *head).eval()
