"""torchvision's detectors as variants: names, published accuracies, loading.

    load("ssdlite320_mobilenet_v3_large")                 # published weights, downloaded once
    load("fasterrcnn_resnet50_fpn_v2", weights="local")   # the same, if they are there
    load("fasterrcnn_resnet50_fpn_v2", weights="none")    # random ones: see `Detector`

Needs torchvision (`pip install 'ray-slo[traffic]'`); importing this module does not.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.models.devices import pick_device
from ray_slo.models.lanes import lane_of
from ray_slo.models.loading import checked_by, one_of
from ray_slo.models.vision import build, torchvision_models, weights_of

from .boxes import Found, Picture

if TYPE_CHECKING:
    import torch

FAMILY = (
    "ssdlite320_mobilenet_v3_large",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn_v2",
)
"""In order of cost, and of accuracy."""

THRESHOLD = 0.5  # of confidence
MOST = 30  # things in a picture; without it, a crowd would make hundreds of requests

_MADE_UP: tuple[tuple[str, float, float, float, float], ...] = (
    ("car", 0.05, 0.55, 0.4, 0.85),
    ("bus", 0.45, 0.3, 0.9, 0.8),
    ("person", 0.4, 0.4, 0.5, 0.9),
    ("bench", 0.1, 0.8, 0.4, 0.95),
)
"""The scene of a detector with random weights: labels, and boxes in shares of the picture."""


@dataclass(frozen=True)
class Detector:
    """A network with its preprocessing. It finds the things in pictures, the surest first.

    With random weights (`made_up`), a detector would find nothing, or hundreds of things. The next
    tasks would have no useful work. So the network runs for its cost, and the answer is the same
    made-up scene for every picture: two vehicles, a person and a bench.
    """

    name: str
    network: Any
    transform: Any
    categories: list[str]
    device: torch.device
    made_up: bool = False

    def __call__(self, pictures: list[Picture]) -> list[list[Found]]:
        """The things in each picture; pictures may differ in size."""
        if not pictures:
            return []
        import torch

        lane = lane_of(self.device)
        with torch.inference_mode(), lane.computing():
            # All copies are queued before the first transform.
            there = [lane.put(picture) for picture in pictures]
            outputs = self.network([self.transform(one.permute(2, 0, 1)) for one in there])
        lane.finish()
        if self.made_up:
            return [made_up(*picture.shape[:2]) for picture in pictures]
        return [
            found(
                [self.categories[label] for label in output["labels"].tolist()],
                output["scores"].cpu().numpy(),
                output["boxes"].cpu().numpy(),
            )
            for output in outputs
        ]


def found(labels: list[str], scores: Any, boxes: Any) -> list[Found]:
    """The things that are sure enough, the surest first, at most `MOST`."""
    order = np.argsort(-np.asarray(scores, float), kind="stable")[:MOST]
    return [
        {
            "label": labels[i],
            "confidence": round(float(scores[i]), 4),
            "box": [round(float(x), 1) for x in boxes[i]],
        }
        for i in order.tolist()
        if scores[i] >= THRESHOLD
    ]


def made_up(height: int, width: int) -> list[Found]:
    """The scene of a detector with random weights for a picture of that size."""
    sides = (width, height, width, height)
    return [
        {
            "label": label,
            "confidence": 0.0,
            "box": [round(share * side, 1) for share, side in zip(box, sides, strict=True)],
        }
        for label, *box in _MADE_UP
    ]


def accuracy(name: str) -> float:
    """Published box mAP on COCO val2017 in percent, from the default weights' metadata.

    Raises:
        ValueError: unknown name.
    """
    return float(_published(name).meta["_metrics"]["COCO-val2017"]["box_map"])


def _check(name: str, weights: str | Path | None = None, *_: Any, **__: Any) -> None:
    weights_of(name, weights, anywhere=True)
    if name in FAMILY:
        return  # without torchvision
    with suppress(ImportError):  # the workers may have it
        _published(name)


@checked_by(_check)
def load(name: str, weights: str | Path | None = None, device: str = "auto") -> Detector:
    """A detector of torchvision, ready to look.

    Args:
        name: one of torchvision's detectors of COCO's categories, of `FAMILY` or another.
        weights: "none" (random, the same in every process; see `Detector`), "local", "download" or
            a path, as for `ray_slo.models.vision.load`. Default: $RAY_SLO_WEIGHTS, else "download".
        device: "auto", "cpu", "cuda", "cuda:1", …

    Raises:
        ValueError: unknown name, no such weights or device, or weights of another network.
        RuntimeError: the download failed.
        ImportError: torchvision is missing, or does not fit the installed torch.
    """
    source = weights_of(name, weights)
    published = _published(name)
    place = pick_device(device)
    categories = published.meta["categories"]
    network = build(name, source, published, weights_backbone=None, num_classes=len(categories))
    return Detector(
        name=name,
        network=network.to(place),
        transform=published.transforms(),
        categories=categories,
        device=place,
        made_up=source == "none",
    )


def _published(name: str) -> Any:
    models = torchvision_models()
    names = [n for n in models.list_models(module=models.detection) if "keypoint" not in n]
    if name not in names:
        raise one_of("name", name, names)
    return models.get_model_weights(name).DEFAULT
