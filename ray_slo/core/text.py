"""Text from outside in our messages is escaped, and cut if it is long. Imports no Ray."""

from __future__ import annotations

from typing import Any

SHOWN = 80  # characters of a value


_TYPES: dict[type, str] = {
    type(None): "nothing",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    bytes: "bytes",
    dict: "a mapping",
    list: "a list",
    tuple: "a tuple",
    set: "a set",
}


def type_in_words(value: Any) -> str:
    """The type of a value in words, for messages that do not show the value itself."""
    kind = type(value)
    article = "an" if kind.__name__[:1].lower() in "aeiou" else "a"
    return _TYPES.get(kind) or f"{article} {kind.__name__}"


def text_of(error: Exception) -> str:
    """The text of an error; that of an OSError begins with the file, without an error number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename or quoted('')}: {error.strerror}"
    return str(error)


def clipped(text: str, most: int) -> str:
    """`text` cut to `most` characters, and such that it can be encoded."""
    text = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def quoted(value: Any) -> str:
    """The value's `repr`, escaped, and cut if it is long. A container is read no further than it is
    shown: one of a few nested lists may have billions of items."""
    left = [SHOWN]
    try:
        shown = ascii(_beginning(value, left))
    except ValueError:  # an integer of thousands of digits
        shown = f"a huge {type(value).__name__}"
    except Exception:  # of a class of the user
        shown = type_in_words(value)
    if left[0] > 0:
        return clipped(shown, SHOWN)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


def _beginning(value: Any, left: list[int]) -> Any:
    """A container with its first items, where `left[0]` is the number that may follow. Each item
    takes a character or more."""
    if type(value) not in (list, tuple, set, frozenset, dict):
        return value
    kept: list[Any] = []
    for item in value.items() if isinstance(value, dict) else value:
        if left[0] <= 0:
            break
        left[0] -= 1
        if isinstance(value, dict):
            kept.append((item[0], _beginning(item[1], left)))
        else:
            kept.append(_beginning(item, left))
    return type(value)(kept)
