"""The pipeline's three tasks, and how their results become one answer.

    detect ──vehicles──▶ vehicles    EfficientNets name what kind of vehicle it is
           └──people───▶ faces       VGGs or ResNets look at the head

It takes a photograph, and returns the vehicles and people in it, each with its network's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from deployments.imagenet.app import MIN_SIDE, picture_of
from deployments.imagenet.pictures import photographs
from ray_slo.models import vision
from ray_slo.models.running import Staged
from ray_slo.models.vision import ImageAnswer, ImageClassifier

from . import detection
from .boxes import Found, Picture, crop, head, parts
from .detection import Detector

if TYPE_CHECKING:
    import ray_slo

MAX_SIDE = 1333  # the detectors shrink what is larger
VEHICLE_CLASSIFIERS = ("efficientnet_b0", "efficientnet_b2", "efficientnet_b4")
FACE_CLASSIFIERS = ("vgg11", "vgg16", "resnet18", "resnet50")

FACTORS = {
    "ssdlite320_mobilenet_v3_large": {"vehicles": 1.0, "faces": 0.6},
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"vehicles": 1.2, "faces": 0.8},
    "fasterrcnn_mobilenet_v3_large_fpn": {"vehicles": 1.6, "faces": 1.0},
    "fasterrcnn_resnet50_fpn_v2": {"vehicles": 2.0, "faces": 1.2},
}
"""Expected vehicles and people in a picture, by detector. They are first guesses; better detectors
find more. The real numbers are learned while serving."""


class Ahead(NamedTuple):
    """A batch that is staged on the device, and its pictures here, of which parts are cut out."""

    pictures: list[Picture]
    staged: Staged


class Detect:
    """Finds vehicles and people, and sends each to the next task."""

    def __call__(self, detector: Detector, batch: list[Picture] | Ahead) -> list[ray_slo.Outputs]:
        """Find things in preprocessed pictures, with the parts for the next tasks."""
        pictures, given = batch if isinstance(batch, Ahead) else (batch, batch)
        return [
            outputs(picture, things)
            for picture, things in zip(pictures, detector(given), strict=True)
        ]

    def stage(self, detector: Detector, pictures: list[Picture]) -> Ahead:
        """Prepare the next batch while another one runs on a GPU."""
        return Ahead(pictures, detector.stage(pictures))

    @staticmethod
    def preprocess(item: Any) -> Picture:
        """The bytes of a JPEG, PNG or WebP, a PIL image or an array of uint8, as RGB.

        Pictures larger than any detector's input are shrunk to `MAX_SIDE` by the longer side.

        ValueError says what was wrong with ``image``.
        """
        picture = picture_of(item, MAX_SIDE)
        if min(picture.size) < MIN_SIDE:
            raise ValueError(
                f"image: got {picture.width} x {picture.height} pixels, "
                f"wanted at least {MIN_SIDE} x {MIN_SIDE}"
            )
        scale = MAX_SIDE / max(picture.size)
        if scale < 1:
            size = (max(round(scale * s), MIN_SIDE) for s in picture.size)
            picture = picture.resize(tuple(size), Image.Resampling.BICUBIC)
        return np.asarray(picture)

    @staticmethod
    def join(result: list[Found], outputs: dict[str, list[ImageAnswer]]) -> dict[str, Any]:
        """The things in the picture, each with the result of its task."""
        vehicles, people, others = parts(result)
        return {
            "vehicles": _described(vehicles, outputs["vehicles"]),
            "people": _described(people, outputs["faces"]),
            "others": others,
        }

    @staticmethod
    def example_input() -> Picture:
        """A preprocessed picture of COCO's usual size, for profiling."""
        return np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)


def outputs(picture: Picture, things: list[Found]) -> ray_slo.Outputs:
    """The result of a picture, and its items for each task."""
    from ray_slo import Outputs

    vehicles, people, _ = parts(things)
    return Outputs(
        things,
        {
            "vehicles": [crop(picture, vehicle["box"]) for vehicle in vehicles],
            "faces": [crop(picture, head(person["box"])) for person in people],
        },
    )


def _described(things: list[Found], answers: list[ImageAnswer]) -> list[dict[str, Any]]:
    return [
        {**thing, "looks_like": answer["top5"]}
        for thing, answer in zip(things, answers, strict=True)
    ]


class Vehicles:
    """Says what kind of vehicle a part of a picture shows: cab, minivan, school bus, …"""

    def __call__(
        self, classifier: ImageClassifier, crops: list[Picture] | Staged
    ) -> list[ImageAnswer]:
        """Answer parts of pictures of any size, in the same order."""
        return classifier(crops)

    def stage(self, classifier: ImageClassifier, crops: list[Picture]) -> Staged:
        """Prepare the next batch while another one runs on a GPU."""
        return classifier.stage(crops)

    @staticmethod
    def example_input() -> Picture:
        """A part of usual size, for profiling."""
        return np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)


class Faces(Vehicles):
    """Looks at the heads of people.

    torchvision publishes no network for faces. By default, these networks name ImageNet's
    categories (a sunglass, a wig, a helmet), at the cost of a network for faces. Give the path of
    your own weights.
    """


def detectors(
    *names: str, weights: str | None = None, device: str = "auto"
) -> list[ray_slo.Variant]:
    """Variants of the task `detect`, with published box mAPs and first guesses of factors.

    Args:
        names: of torchvision's detectors; default: `detection.FAMILY`.
        weights, device: see `deployments.traffic.detection.load`.

    ValueError names the valid names; ImportError: torchvision is missing.
    """
    from ray_slo import Variant

    return [
        Variant(
            name,
            accuracy=detection.accuracy(name),
            load="deployments.traffic.detection:load",
            kwargs={"name": name, "weights": weights, "device": device},
            factors=FACTORS.get(name),
        )
        for name in names or detection.FAMILY
    ]


def classifiers(*names: str, weights: str | None, device: str) -> list[ray_slo.Variant]:
    """Variants of the tasks below it, with published top-1 accuracies."""
    from ray_slo import Variant

    return [
        Variant(
            name,
            accuracy=vision.accuracy(name),
            load="ray_slo.models.vision:load",
            kwargs={"name": name, "weights": weights, "device": device},
        )
        for name in names
    ]


def pipeline(
    *,
    latency_slo_ms: float = 2000,
    weights: str | None = None,
    device: str = "auto",
    **options: Any,
) -> ray_slo.Pipeline:
    """The whole pipeline, for `serve.run(pipeline().bind())`.

    Args:
        weights: of all networks: "none", "local", "download", or a folder with `<name>.pth` for
            each. Default: $RAY_SLO_WEIGHTS where a worker loads them, else "download".
        device: of all networks.
        options: of `ray_slo.Pipeline`, e.g. max_replicas=4.
    """
    from ray_slo import Pipeline, Task

    options = {"name": "traffic", **options}
    given = {"weights": weights, "device": device}
    return Pipeline(
        [
            Task("detect", Detect, variants=detectors(**given)),
            Task(
                "vehicles",
                Vehicles,
                parent="detect",
                variants=classifiers(*VEHICLE_CLASSIFIERS, **given),
            ),
            Task("faces", Faces, parent="detect", variants=classifiers(*FACE_CLASSIFIERS, **given)),
        ],
        latency_slo_ms=latency_slo_ms,
        **options,
    )


def payloads() -> list[bytes]:
    """Payloads for `ray-slo bench --payload deployments.traffic:payloads`; see `photographs`."""
    return photographs()
