"""What every loader of a published network asks: which weights, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import torch

Source = Literal["default", "none"] | Path


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
    """A name that is none of the valid ones."""
    return ValueError(f"{field}: got {got!r}, wanted one of {', '.join(valid)}")


def weights_source(
    weights: object, wanted: str, *, default: str = "published, downloaded once"
) -> Source:
    """Where weights come from: "default" (published, downloaded once), "none" (random), or a path.

    Args:
        weights: as a user gives it.
        wanted: what the path must be of, for the error message.
        default: what "default" stands for, for the error message.

    Raises:
        ValueError: neither word, and no such file or folder.
    """
    if weights == "default" or weights == "none":
        return "default" if weights == "default" else "none"
    choices = f"'default' ({default}), 'none' (random) or the path of {wanted}"
    if not isinstance(weights, str | Path) or not str(weights):
        raise ValueError(f"weights: got {weights!r}, wanted {choices}")
    path = Path(weights).expanduser()
    if not path.exists():
        raise ValueError(
            f"weights: got {str(weights)!r}, which is no file or folder here ({Path.cwd()}); "
            f"wanted {choices}"
        )
    return path


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
