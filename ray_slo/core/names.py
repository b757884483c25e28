"""Names that users write: of an object ("module:attr"), and suggestions for a wrong name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def import_attr(path: str) -> Any:
    """Import "module:attr".

    Raises:
        ValueError: the module or the attribute does not exist.
    """
    module, _, attr = path.partition(":")
    try:
        return getattr(import_module(module), attr)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {path!r}: {error}") from error
    except Exception as error:  # of the module's own code
        raise ValueError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message, the first ones of many."""
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}" if names else "none"


def nearest(name: str, valid: Sequence[str]) -> str:
    """ " (did you mean 'x'?)", or "" if no name is similar."""
    lower = {v.lower(): v for v in valid}
    near = get_close_matches(name.lower(), lower, n=1)
    return f" (did you mean {lower[near[0]]!r}?)" if near else ""
