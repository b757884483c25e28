"""torchvision's ImageNet classifiers as variants: names, published accuracies, loading.

    load("resnet50")                              # published weights, downloaded once
    load("resnet50", weights="none")              # random ones: the same cost, senseless answers
    load("resnet50", weights="/models/imagenet")  # /models/imagenet/resnet50.pth

A loaded network maps pictures (RGB, uint8, of any size) to their five likeliest categories; it
resizes, crops and normalises as its weights were published with. Needs torchvision
(`pip install 'ray-slo[imagenet]'`); importing this module does not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray

from ray_slo.models.loading import Source, checked_by, one_of, pick_device, weights_source

if TYPE_CHECKING:
    import torch

TOP = 5

FAMILY = (
    *(f"efficientnet_b{i}" for i in range(8)),
    *(f"efficientnet_v2_{size}" for size in "sml"),
    "googlenet",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_large",
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    "resnext101_32x8d",
    "resnext101_64x4d",
    *(f"shufflenet_v2_x{width}" for width in ("0_5", "1_0", "1_5", "2_0")),
)
"""The 26 networks of RAMSIS' image task (EuroSys '24, §7); `load` takes any of `names()`."""

_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # heads of two networks, for training only
_TAKES_INPUT_TRANSFORM = ("googlenet", "inception_v3")

_log = logging.getLogger(__name__)


class Category(TypedDict):
    label: str
    confidence: float


class ImageAnswer(TypedDict):
    """The likeliest category and its probability, and the five likeliest, best first."""

    label: str
    confidence: float
    top5: list[Category]


@dataclass(frozen=True)
class ImageClassifier:
    """A network with its preprocessing: pictures (height, width, 3) of uint8 to answers."""

    name: str
    network: Callable[[Any], Any]
    transform: Callable[[Any], Any]
    categories: list[str]
    device: torch.device

    def __call__(self, pictures: list[NDArray[np.uint8]]) -> list[ImageAnswer]:
        """One answer per picture, in the same order."""
        if not pictures:
            return []
        import torch

        with torch.inference_mode():
            batch = torch.stack([self._prepared(picture) for picture in pictures])
            batch = batch.to(memory_format=torch.channels_last)  # convolutions run faster in it
            likeliest = self.network(batch).softmax(1).topk(TOP)
        answers: list[ImageAnswer] = []
        for values, indices in zip(
            likeliest.values.tolist(), likeliest.indices.tolist(), strict=True
        ):
            top5: list[Category] = [
                {"label": self.categories[index], "confidence": value}
                for value, index in zip(values, indices, strict=True)
            ]
            answers.append({**top5[0], "top5": top5})
        return answers

    def _prepared(self, picture: NDArray[np.uint8]) -> Any:
        import torch

        # A copy: what Ray hands out is read-only, which torch warns of.
        return self.transform(torch.tensor(picture, device=self.device).permute(2, 0, 1))


@cache
def names() -> list[str]:
    """All of torchvision's ImageNet classifiers."""
    models = torchvision_models()
    listed: list[str] = models.list_models(module=models)
    return listed


def accuracy(name: str) -> float:
    """Published top-1 accuracy on ImageNet-1K in percent, from the default weights' metadata.

    Raises:
        ValueError: unknown name.
    """
    return float(_published(name).meta["_metrics"]["ImageNet-1K"]["acc@1"])


def _check(name: str, *_: Any, **__: Any) -> None:
    if name in FAMILY:
        return  # without torchvision
    with suppress(ImportError):  # the workers may have it
        _published(name)


@checked_by(_check)
def load(name: str, weights: str | Path = "default", device: str = "auto") -> ImageClassifier:
    """A network of torchvision, ready to answer.

    Args:
        name: one of `names()`.
        weights: "default" (torchvision downloads them into $TORCH_HOME once), "none" (random, the
            same in every process), or the path of a state dict, or of a folder that holds it as
            `<name>.pth` or under the name of torchvision's download.
        device: "auto", "cpu", "cuda", "cuda:1", …

    Raises:
        ValueError: unknown name, no such weights or device, or weights of another network.
        RuntimeError: the download failed.
        ImportError: torchvision is missing, or does not fit the installed torch.
    """
    source = weights_source(weights, f"a state dict of {name}, or of a folder with {name}.pth")
    published = _published(name)
    place = pick_device(device)
    import torch

    # These two change their input as their published weights want it, but only if told so.
    options = {"transform_input": True, "init_weights": False, "aux_logits": False}
    network = build(name, source, published, **(options if name in _TAKES_INPUT_TRANSFORM else {}))
    return ImageClassifier(
        name=name,
        network=network.to(place, memory_format=torch.channels_last),
        transform=published.transforms(),
        categories=published.meta["categories"],
        device=place,
    )


def build(name: str, source: Source, published: Any, **options: Any) -> Any:
    """A network of torchvision, of any kind, with weights, in eval mode.

    Args:
        source: as `ray_slo.models.loading.weights_source` says it.
        published: its default weights.
        options: of its constructor, when it does not get the published weights.

    Raises:
        ValueError: weights of another network, or none.
        RuntimeError: the download failed.
    """
    import torch

    models = torchvision_models()
    if source == "default":
        try:
            network = models.get_model(name, weights=published, progress=False)
        except (URLError, OSError) as error:
            raise RuntimeError(
                f"weights: cannot download {published.url} ({error}); put the file into "
                f"{Path(torch.hub.get_dir()) / 'checkpoints'}, or give weights: <its path> or none"
            ) from error
        return network.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = models.get_model(name, weights=None, **options)
    if isinstance(source, Path):
        _fill(network, name, _state_dict_file(source, name, published))
    else:
        _log.warning("%s has random weights: its answers mean nothing", name)
    return network.eval()


def torchvision_models() -> Any:
    """The module. ImportError says what to install."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # the latter: built for another torch
        raise ImportError(
            f"torchvision's networks need torchvision beside a torch from the same index "
            f"({error}): pip install 'ray-slo[imagenet]'"
        ) from error
    return torchvision.models


def _published(name: str) -> Any:
    """The default weights: metadata, transforms, address."""
    models = torchvision_models()
    if name not in names():
        raise one_of("name", name, names())
    return models.get_model_weights(name).DEFAULT


def _state_dict_file(path: Path, name: str, published: Any) -> Path:
    if not path.is_dir():
        return path
    candidates: list[Path] = [path / f"{name}.pth", path / published.url.rpartition("/")[2]]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"weights: the folder {str(path)!r} holds neither "
        f"{' nor '.join(candidate.name for candidate in candidates)}"
    )


def _fill(network: Any, name: str, path: Path) -> None:
    """Load a state dict, changed in place: it carries its format's version beside its items."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch each have their own
        raise ValueError(
            f"weights: {str(path)!r} is not what torch.save(network.state_dict(), path) writes"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(
            f"weights: {str(path)!r} holds a {type(state).__name__}, wanted a state dict"
        )
    for key in list(state):
        if name in _TAKES_INPUT_TRANSFORM and key.startswith(_AUXILIARY):
            del state[key]
        elif name.startswith("densenet"):  # published before module names could not hold dots
            state[re.sub(r"\.(norm|conv)\.([12])\.", r".\1\2.", key)] = state.pop(key)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        difference = " ".join(str(error).partition(":")[2].split())
        if len(difference) > 200:
            difference = difference[:200] + " …"
        raise ValueError(
            f"weights: {str(path)!r} is not a state dict of {name}: {difference}"
        ) from error
