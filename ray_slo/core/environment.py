"""The environment variables of ray-slo: their valid values, and one message for every wrong one.

`docs/reference/environment.md` explains them. This module imports neither Ray nor NumPy.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray_slo.core.names import nearest
from ray_slo.core.requests import MAX_LATENCY_MS
from ray_slo.core.text import quoted

T = TypeVar("T")

PREFIX = "RAY_SLO_"
PAGE = "docs/reference/environment.md"
_LONGEST_S = MAX_LATENCY_MS / 1e3
_MOST_BYTES = 2**31 - 1
_LONGEST_NUMBER = 32  # characters
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable that has a value of its own kind.

    Attributes:
        name: its name.
        wanted: its valid values, in words.
        default: its value if it is not set or is empty.
        parse: makes its value from the text; None if the text is not valid.
    """

    name: str
    wanted: str
    default: T
    parse: Callable[[str], T | None]

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """The value in an environment; default: that of this process.

        Raises:
            ValueError: the text is not valid.
        """
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        if (value := self.parse(text)) is None:
            raise ValueError(refused(self.name, self.wanted, text))
        return value


def refused(name: str, wanted: str, text: str) -> str:
    """The message about a variable whose text is not valid."""
    return f"{name}: must be {wanted}, got {quoted(text)}\nSee {PAGE}"


def _seconds(text: str) -> float | None:
    try:
        value = float(text) if len(text) <= _LONGEST_NUMBER else math.nan
    except ValueError:
        return None
    return value if 0 < value <= _LONGEST_S else None


def _bytes(text: str) -> int | None:
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER):
        return None
    return int(text) if 0 < int(text) <= _MOST_BYTES else None


def _host(text: str) -> str | None:
    """A host as gRPC writes it before a port; an IPv6 address is in brackets there."""
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        is_number = re.fullmatch(r"[\d.]+", text) is not None
        return text if _HOST_NAME.fullmatch(text) and not is_number else None
    return f"[{address}]" if address.version == 6 else str(address)


FAST: Variable[bool | None] = Variable(
    "RAY_SLO_FAST", "0 or 1", None, lambda text: {"0": False, "1": True}.get(text)
)
FRONTEND_WAIT_S = Variable(
    "RAY_SLO_FRONTEND_WAIT_S",
    f"a number of seconds above 0 and at most {_LONGEST_S:.0f}",
    30.0,
    _seconds,
)
GRPC_HOST = Variable("RAY_SLO_GRPC_HOST", "an IP address or a host name", "127.0.0.1", _host)
MARK = Variable(
    "RAY_SLO_MARK",
    "16 to 128 letters, digits, - or _",
    "",
    lambda text: text if re.fullmatch(r"[A-Za-z0-9_-]{16,128}", text) else None,
)
MAX_BODY_BYTES = Variable(
    "RAY_SLO_MAX_BODY_BYTES",
    f"a whole number of bytes from 1 to {_MOST_BYTES}",
    256 * 2**20,
    _bytes,
)
CHECKED: tuple[Variable[Any], ...] = (FAST, FRONTEND_WAIT_S, GRPC_HOST, MARK, MAX_BODY_BYTES)
WEIGHTS, CACHE, TRACEBACK = "RAY_SLO_WEIGHTS", "RAY_SLO_CACHE", "RAY_SLO_TRACEBACK"
NAMES = (*(variable.name for variable in CHECKED), WEIGHTS, CACHE, TRACEBACK)


def check(environ: Mapping[str, str] | None = None) -> list[str]:
    """Read every variable.

    Returns:
        One line for each name that begins with RAY_SLO_ and is no variable of ours: nothing reads
        it, so it may be a typing error.

    Raises:
        ValueError: the text of a variable is not valid.
    """
    environ = os.environ if environ is None else environ
    for variable in CHECKED:
        variable.read(environ)
    return [
        f"{name} is not a variable of ray-slo, and is ignored{nearest(name, NAMES)}. See {PAGE}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in NAMES
    ]
