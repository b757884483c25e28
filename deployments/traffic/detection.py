"""torchvision's detectors as variants: names, published accuracies, loading.

    load("ssdlite320_mobilenet_v3_large")                 # published weights, downloaded once
    load("fasterrcnn_resnet50_fpn_v2", weights="local")   # the same, if they are there
    load("fasterrcnn_resnet50_fpn_v2", weights="none")    # random ones: see `Detector`

Needs torchvision (`pip install 'ray-slo[traffic]'`); importing this module does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.models.devices import pick_device
from ray_slo.models.lanes import Lane
from ray_slo.models.loading import checked_by, one_of
from ray_slo.models.running import How, OnRunner, Runner, Staged, parse_how
from ray_slo.models.vision import build, torchvision_models, weights_of
from ray_slo.models.ways import fit

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

_EXAMPLE = (480, 640, 3)  # shape of the picture for measurements: COCO's usual size
_GIVES_BOXES = ("backbone", "head", "rpn.head", "roi_heads.box_predictor")
"""Parts of torchvision's detectors of whose outputs it computes boxes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Detector(OnRunner):
    """A network with its preprocessing. It finds the things in pictures, the surest first.

    With random weights (`made_up`), a detector would find nothing, or hundreds of things. The next
    tasks would have no useful work. So the network runs for its cost, and the answer is the same
    made-up scene for every picture: two vehicles, a person and a bench.

    `runs` says in words how the network is run.
    """

    name: str
    runner: Runner
    transform: Callable[[Any], Any]
    categories: list[str]
    made_up: bool = False
    runs: str = ""

    def stage(self, pictures: list[Picture]) -> Staged:
        """Copy pictures to the device and prepare them there. `__call__` takes the result."""
        return _stage(self.runner, self.transform, pictures)

    def __call__(self, pictures: list[Picture] | Staged) -> list[list[Found]]:
        """The things in each picture; pictures may differ in size."""
        if not isinstance(pictures, Staged):
            if not pictures:
                return []
            pictures = self.stage(pictures)
        outputs = self.runner(pictures)
        if self.made_up:
            return [made_up(*picture.shape[-2:]) for picture in pictures.inputs]
        return [
            found(
                [self.categories[label] for label in output["labels"].tolist()],
                output["scores"].cpu().numpy(),
                output["boxes"].cpu().numpy(),
            )
            for output in outputs
        ]


def _stage(runner: Runner, transform: Callable[[Any], Any], pictures: Sequence[Picture]) -> Staged:
    def make(lane: Lane) -> list[torch.Tensor]:
        there = [lane.put(picture) for picture in pictures]  # all copies before the first transform
        return [transform(one.permute(2, 0, 1)) for one in there]

    return runner.stage(make)


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


def _check(
    name: str,
    weights: str | Path | None = None,
    device: str = "auto",
    how: object = "auto",
    *_: Any,
    **__: Any,
) -> None:
    weights_of(name, weights, anywhere=True)
    _check_how(how)
    if name in FAMILY:
        return  # without torchvision
    with suppress(ImportError):  # the workers may have it
        _published(name)


def _check_how(how: object) -> None:
    """A detector's work depends on what it finds, so that it is neither recorded nor compiled."""
    asked = parse_how(how)
    if isinstance(asked, How) and asked.engine != "eager":
        raise one_of("how.engine", asked.engine, ["eager"])


@checked_by(_check)
def load(
    name: str,
    weights: str | Path | None = None,
    device: str = "auto",
    how: str | Mapping[str, Any] | How = "auto",
) -> Detector:
    """A detector of torchvision, ready to look.

    Args:
        name: one of torchvision's detectors of COCO's categories, of `FAMILY` or another.
        weights: "none" (random, the same in every process; see `Detector`), "local", "download" or
            a path, as for `ray_slo.models.vision.load`. Default: $RAY_SLO_WEIGHTS, else "download".
        device: "auto", "cpu", "cuda", "cuda:1", …
        how: as for `ray_slo.models.vision.load`, but for `engine`, which is "eager".

    Raises:
        ValueError: an argument is not valid, or the weights are of another network.
        RuntimeError: the download failed.
        ImportError: torchvision is missing, or does not fit the installed torch.
    """
    _check_how(how)
    source = weights_of(name, weights)
    published = _published(name)
    place = pick_device(device)
    categories = published.meta["categories"]
    network = build(name, source, published, weights_backbone=None, num_classes=len(categories))
    _decode_in_float32(network)
    transform = published.transforms()
    picture = np.random.default_rng(0).integers(0, 256, _EXAMPLE, np.uint8)
    runner, runs = fit(
        network,
        place,
        lambda runner, size: _stage(runner, transform, [picture] * size),
        how,
        plain=How(channels_last=True),  # as for the classifiers
        fixed_shape=False,
        compared=_dense,
        sizes=(1, 4),
    )
    _log.info("%s runs in %s", name, runs)
    return Detector(name, runner, transform, categories, source == "none", runs)


def _decode_in_float32(network: Any) -> None:
    """Let the backbone and the heads of a network return float32 under autocast, too. torchvision
    computes anchors in the type of the backbone's output, and boxes in that of the heads'. In
    bfloat16, both would be off by pixels. The comparison of ways does not see anchors."""
    for name, module in network.named_modules():
        if name in _GIVES_BOXES:
            module.register_forward_hook(lambda _module, _inputs, output: _float32(output))


def _float32(output: Any) -> Any:
    if isinstance(output, Mapping):
        return {name: _float32(part) for name, part in output.items()}
    if isinstance(output, list | tuple):
        return type(output)(_float32(part) for part in output)
    return output.float()


def _dense(network: Any, pictures: list[torch.Tensor]) -> torch.Tensor:
    """What a network says about each place in pictures of one size, before it chooses boxes. This
    is compared between ways, because the chosen boxes have no fixed number or order."""
    import torch

    images, _ = network.transform(pictures)
    head = network.rpn.head if hasattr(network, "rpn") else network.head
    output = head(list(network.backbone(images.tensors).values()))
    return torch.cat([part.flatten(1) for part in _tensors(output)], 1)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)
    else:
        yield output


def _published(name: str) -> Any:
    models = torchvision_models()
    names = [n for n in models.list_models(module=models.detection) if "keypoint" not in n]
    if name not in names:
        raise one_of("name", name, names)
    return models.get_model_weights(name).DEFAULT
