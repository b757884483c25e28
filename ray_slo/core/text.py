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
    """The value's `repr`, escaped, and cut if it is long."""
    try:
        shown = ascii(value)
    except ValueError:  # an integer of thousands of digits
        shown = f"a huge {type(value).__name__}"
    return clipped(shown, SHOWN)
