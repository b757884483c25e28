"""Text from outside in our messages is escaped, and cut if it is long. Imports no Ray."""

from __future__ import annotations

from typing import Any

SHOWN = 80  # characters of a value


def clipped(text: str, most: int) -> str:
    """`text` cut to `most` characters, and such that it can be encoded."""
    text = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def quoted(value: Any) -> str:
    """The value's `repr`, escaped, and cut if it is long."""
    try:
        shown = ascii(value)
    except ValueError:  # an integer of thousands of digits
        shown = f"a huge {type(value).__name__}"
    return clipped(shown, SHOWN)
