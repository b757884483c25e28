"""What every loader of a published network asks: which weights, and on which device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ray_slo.core.environment import PAGE, WEIGHTS

if TYPE_CHECKING:
    import torch

Word = Literal["none", "local", "download"]
Source = Word | Path
WORDS: tuple[Word, ...] = ("none", "local", "download")

WEIGHTS_VARIABLE = WEIGHTS
"""Environment variable that decides for every loader whose argument `weights` is not given."""


Load = TypeVar("Load", bound=Callable[..., Any])


def checked_by(check: Callable[..., Any]) -> Callable[[Load], Load]:
    """For the loader of a variant: where the configuration is read, before any worker starts,
    `check` gets the loader's arguments, and raises ValueError for what no worker could load.

    It is the attribute `check` of any loader that is a function.
    """

    def mark(load: Load) -> Load:
        load.check = check  # type: ignore[attr-defined]
        return load

    return mark


def one_of(field: str, got: object, valid: list[str]) -> ValueError:
    """The name is not one of the valid names."""
    return ValueError(f"{field}: got {got!r}, wanted one of {', '.join(valid)}")


def weights_source(
    weights: object,
    wanted: str,
    *,
    download: str = "fetches what is missing, once",
    anywhere: bool = False,
) -> Source:
    """Where weights come from.

    * "none": random ones; the same cost, senseless answers.
    * "local": what is on this machine already. The network is never touched.
    * "download": the same, and what is missing is fetched (or trained) once.
    * A path.

    Args:
        weights: as a user gives it. None: $RAY_SLO_WEIGHTS, or "download" where that is not set.
        wanted: what the path must be of, for the error message.
        download: what "download" does beyond "local", for the error message.
        anywhere: a path need not be on this machine: a configuration is read for others, too.

    Raises:
        ValueError: none of the words, and no such file or folder.
    """
    field, see = "weights", ""
    if weights is None:
        see = f"\nSee {PAGE}"
        field, weights = WEIGHTS_VARIABLE, os.environ.get(WEIGHTS_VARIABLE) or "download"
    choices = (
        "'none' (random), 'local' (what is on this machine), "
        f"'download' (as local, and {download}) or the path of {wanted}"
    )
    if not isinstance(weights, str | Path) or not str(weights) or weights == "default":
        raise ValueError(f"{field}: got {weights!r}, wanted {choices}{see}")
    for word in WORDS:
        if weights == word:
            return word
    path = Path(weights).expanduser()
    if not anywhere and not path.exists():
        raise ValueError(
            f"{field}: got {str(weights)!r}, which is no file or folder here ({Path.cwd()}); "
            f"wanted {choices}{see}"
        )
    return path


def say(*choices: str) -> str:
    """The end of an error about weights that are not there: what else the user can say, and where.

    "say 'none' (random) or a path, as the argument weights or in RAY_SLO_WEIGHTS"
    """
    said = ", ".join((*choices, "'none' (random)")) + " or a path"
    return f"say {said}, as the argument weights or in {WEIGHTS_VARIABLE}"


def pick_device(device: str = "auto") -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: no such device.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device: got {device!r}, wanted 'auto', 'cpu', 'cuda' or 'cuda:0', 'cuda:1', …"
        ) from None
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: got {device!r}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices here"
        )
    return picked
