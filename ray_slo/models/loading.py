"""The argument `weights`, which all loaders of published networks have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from ray_slo.core.environment import PAGE, WEIGHTS
from ray_slo.core.text import quoted

Word = Literal["none", "local", "download"]
Source = Word | Path
WORDS: tuple[Word, ...] = ("none", "local", "download")


Load = TypeVar("Load", bound=Callable[..., Any])


def checked_by(check: Callable[..., Any]) -> Callable[[Load], Load]:
    """Return a decorator that adds a check of the arguments to the loader of a variant.

    The check runs when the configuration is read, before any worker starts. It gets the loader's
    arguments, and raises ValueError if no worker could load the variant. The decorator stores it as
    the loader's attribute `check`; any loader that is a function may have this attribute.
    """

    def mark(load: Load) -> Load:
        load.check = check  # type: ignore[attr-defined]
        return load

    return mark


def one_of(field: str, got: object, valid: list[str]) -> ValueError:
    """Return the error for a value that is not one of the valid names."""
    return ValueError(f"{field}: got {quoted(got)}, wanted one of {', '.join(valid)}")


def weights_source(
    weights: object,
    wanted: str,
    *,
    download: str = "fetches what is missing, once",
    anywhere: bool = False,
) -> Source:
    """Return where the weights come from. It is one of these words, or a path:

    * "none": random weights. The cost is the same, and the answers are meaningless.
    * "local": weights that are already on this machine. Nothing is downloaded.
    * "download": as "local", and missing weights are downloaded (or trained) once.

    Args:
        weights: the user's choice. None: $RAY_SLO_WEIGHTS, or "download" if that is not set.
        wanted: the expected content of a path, for the error message.
        download: what "download" does beyond "local", for the error message.
        anywhere: whether a path may be missing on this machine. A configuration may be read on
            another machine than the workers'.

    Raises:
        ValueError: the choice is neither a valid word nor an existing file or folder.
    """
    field, see = "weights", ""
    if weights is None:
        see = f"\nSee {PAGE}"
        field, weights = WEIGHTS, os.environ.get(WEIGHTS) or "download"
    choices = (
        "'none' (random), 'local' (what is on this machine), "
        f"'download' (as local, and {download}) or the path of {wanted}"
    )
    if not isinstance(weights, str | Path) or not str(weights) or weights == "default":
        raise ValueError(f"{field}: got {quoted(weights)}, wanted {choices}{see}")
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
    """Return the end of an error message about missing weights. It names the other choices of the
    user:

    "say 'none' (random) or a path, as the argument weights or in RAY_SLO_WEIGHTS"
    """
    said = ", ".join((*choices, "'none' (random)")) + " or a path"
    return f"say {said}, as the argument weights or in {WEIGHTS}"
