"""torchvision's ImageNet classifiers as variants: names, published accuracies, loading.

    load("resnet50")                              # published weights, downloaded once
    load("resnet50", weights="local")             # the same, or an error if not downloaded
    load("resnet50", weights="none")              # random: the same cost, meaningless answers
    load("resnet50", weights="/models/imagenet")  # /models/imagenet/resnet50.pth

Without the argument `weights`, the environment variable RAY_SLO_WEIGHTS decides.

A loaded network maps pictures (RGB, uint8, of any size) to their five most likely categories. It
resizes, crops and normalises them as was done when its weights were published. Loading needs
torchvision (`pip install 'ray-slo[imagenet]'`); importing this module does not.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ray_slo.models.devices import pick_device
from ray_slo.models.fetching import fetch
from ray_slo.models.lanes import Lane
from ray_slo.models.loading import (
    Source,
    checked_by,
    one_of,
    say,
    weights_source,
)
from ray_slo.models.running import How, OnRunner, Runner, Staged, parse_how
from ray_slo.models.ways import fit

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
"""The 26 networks of RAMSIS' image task (EuroSys '24, §7). `load` takes any of `names()`."""

_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # heads of two networks that only training uses
_TAKES_INPUT_TRANSFORM = ("googlenet", "inception_v3")

_EXAMPLE = (375, 375, 3)  # shape of the picture for measurements: a square of typical size

_log = logging.getLogger(__name__)


class Category(TypedDict):
    label: str
    confidence: float


class ImageAnswer(TypedDict):
    """The most likely category with its probability, and the five most likely ones, best first."""

    label: str
    confidence: float
    top5: list[Category]


@dataclass(frozen=True)
class ImageClassifier(OnRunner):
    """A network with its preprocessing. It maps pictures, shape (height, width, 3), uint8, to
    answers.

    Attributes:
        runs: how the network is run, in words.
    """

    name: str
    runner: Runner
    transform: Callable[[Any], Any]
    categories: list[str]
    runs: str = ""

    def stage(self, pictures: list[NDArray[np.uint8]]) -> Staged:
        """Copy pictures to the device and prepare them there. `__call__` takes the result."""
        return _stage(self.runner, self.transform, pictures)

    def __call__(self, pictures: list[NDArray[np.uint8]] | Staged) -> list[ImageAnswer]:
        """Return one answer per picture, in the same order."""
        if not isinstance(pictures, Staged):
            if not pictures:
                return []
            pictures = self.stage(pictures)
        likeliest = self.runner(pictures, lambda output: output.softmax(1).topk(TOP))
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


def _stage(
    runner: Runner, transform: Callable[[Any], Any], pictures: Iterable[NDArray[np.uint8]]
) -> Staged:
    import torch

    def make(lane: Lane) -> torch.Tensor:
        there = [lane.put(picture).permute(2, 0, 1) for picture in pictures]
        return torch.stack([transform(picture) for picture in there])

    return runner.stage(make)


@cache
def names() -> list[str]:
    """Return the names of all ImageNet classifiers of torchvision."""
    models = torchvision_models()
    listed: list[str] = models.list_models(module=models)
    return listed


def accuracy(name: str) -> float:
    """Return the published top-1 accuracy on ImageNet-1K, in percent. It is from the metadata of
    the default weights.

    Raises:
        ValueError: the name is unknown.
    """
    return float(_published(name).meta["_metrics"]["ImageNet-1K"]["acc@1"])


def weights_of(name: str, weights: object, *, anywhere: bool = False) -> Source:
    """Return where the weights of a torchvision network come from; see `weights_source`."""
    wanted = f"a state dict of {name}, or of a folder with {name}.pth"
    return weights_source(weights, wanted, anywhere=anywhere)


def _check(
    name: str,
    weights: str | Path | None = None,
    device: str = "auto",
    how: object = "auto",
    *_: Any,
    **__: Any,
) -> None:
    weights_of(name, weights, anywhere=True)
    parse_how(how)
    if name in FAMILY:
        return  # without torchvision
    with suppress(ImportError):  # torchvision may be missing here and present on the workers
        _published(name)


@checked_by(_check)
def load(
    name: str,
    weights: str | Path | None = None,
    device: str = "auto",
    how: str | Mapping[str, Any] | How = "auto",
) -> ImageClassifier:
    """Load a network of torchvision.

    Args:
        name: one of `names()`.
        weights: one of these words, or a path. Default: $RAY_SLO_WEIGHTS, otherwise "download".

            * "none": random weights, the same in every process.
            * "local": the published weights from torchvision's cache, $TORCH_HOME/hub/checkpoints.
            * "download": as "local", and missing weights are downloaded once.
            * The path of a state dict, or of a folder that contains it. In a folder, its name is
              `<name>.pth`, or that of torchvision's download.
        device: "auto", "cpu", "cuda", "cuda:1", …
        how: the way in which the network is run: "auto", "measure", or fields of
            `ray_slo.models.running.How`; see `parse_how` there.

    Raises:
        ValueError: an argument is not valid, or the weights are of another network.
        RuntimeError: the download failed.
        ImportError: torchvision is missing, or does not fit the installed torch.
    """
    source = weights_of(name, weights)
    published = _published(name)
    place = pick_device(device)

    # GoogLeNet and Inception normalise their input for the published weights only on request.
    options = {"transform_input": True, "init_weights": False, "aux_logits": False}
    network = build(name, source, published, **(options if name in _TAKES_INPUT_TRANSFORM else {}))
    transform = published.transforms()
    picture = np.random.default_rng(0).integers(0, 256, _EXAMPLE, np.uint8)
    runner, runs = fit(
        network,
        place,
        lambda runner, size: _stage(runner, transform, [picture] * size),
        how,
        plain=How(channels_last=True),  # convolutions are faster in this layout
        fixed_shape=True,
    )
    _log.info("%s runs in %s", name, runs)
    return ImageClassifier(name, runner, transform, published.meta["categories"], runs)


def build(name: str, source: Source, published: Any, **options: Any) -> Any:
    """Return any network of torchvision with its weights, in evaluation mode.

    Args:
        source: result of `ray_slo.models.loading.weights_source`.
        published: the network's default weights.
        options: arguments of the network's constructor. They are not used with the published
            weights.

    Raises:
        ValueError: there are no weights, or they are of another network.
        RuntimeError: the download failed, or the downloaded file cannot be read.
    """
    import torch

    models = torchvision_models()
    file = _published_file(source, published) if source in ("local", "download") else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if file is None:
            network = models.get_model(name, weights=None, **options)
        else:
            network = _as_published(name, published, file)
    if isinstance(source, Path):
        _fill(network, name, _state_dict_file(source, name, published))
    elif source == "none":
        _log.warning("%s has random weights: its answers are meaningless", name)
    return network.eval()


def _published_file(source: Source, published: Any) -> Path:
    """Return the file of the published weights in torchvision's cache. If it is not there and
    `source` is "download", download it first."""
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file: Path = folder / published.url.rpartition("/")[2]
    if file.is_file():
        return file
    if source == "local":
        raise ValueError(
            f"weights: got 'local', but {str(file)!r} is not there; "
            f"get it from {published.url}, or {say(repr('download'))}"
        )
    try:
        fetch(published.url, file)
    except OSError as error:
        raise RuntimeError(
            f"weights: cannot download {published.url} ({error}); "
            f"put the file into {folder}, or {say()}"
        ) from error
    return file


def _as_published(name: str, published: Any, file: Path) -> Any:
    """Return the network with the published weights, which torchvision loads from its cache."""
    try:
        return torchvision_models().get_model(name, weights=published, progress=False)
    except Exception as error:  # zip, pickle and torch each raise their own classes
        raise RuntimeError(
            f"weights: cannot read {str(file)!r} ({_short(error)}); delete it and get it from "
            f"{published.url}, or {say()}"
        ) from error


def torchvision_models() -> Any:
    """Return the module `torchvision.models`.

    Raises:
        ImportError: it cannot be imported. The message says what to install.
    """
    try:
        import torchvision
    # RuntimeError: the installed torchvision was built for another version of torch.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"torchvision's networks need torchvision beside a torch from the same index "
            f"({error}): pip install 'ray-slo[imagenet]'"
        ) from error
    return torchvision.models


def _published(name: str) -> Any:
    """Return the default weights of a network: metadata, transforms and URL."""
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
    """Load a state dict into a network. It is changed in place, because a copy would lose the
    version of its format, which is an attribute."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch each raise their own classes
        raise ValueError(
            f"weights: {str(path)!r} is not what torch.save(network.state_dict(), path) writes "
            f"({_why(error)})"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(
            f"weights: {str(path)!r} holds a {type(state).__name__}, wanted a state dict"
        )
    for key in list(state):
        if name in _TAKES_INPUT_TRANSFORM and key.startswith(_AUXILIARY):
            del state[key]
        elif name.startswith("densenet"):  # its published names have dots, now forbidden by torch
            state[re.sub(r"\.(norm|conv)\.([12])\.", r".\1\2.", key)] = state.pop(key)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        difference = _short(str(error).partition(":")[2])
        raise ValueError(
            f"weights: {str(path)!r} is not a state dict of {name}: {difference}"
        ) from error


def _why(error: Exception) -> str:
    """Return the reason why torch cannot read a file."""
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error):
        return "it holds other Python objects, such as a whole network, which are not loaded"
    return _short(error) or type(error).__name__


def _short(said: object) -> str:
    text = " ".join(str(said).split())
    return text if len(text) <= 200 else text[:200] + " …"
