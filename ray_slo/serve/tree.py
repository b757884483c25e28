"""Runs a request through a pipeline: a tree of tasks, asynchronously, and joins what comes back.

Pure asyncio, no ray: whoever serves one request at one task is a function (`Serve`). What a task's
batch method returned for a request is split into its result and the items that it made for child
tasks; all of them are served at the same time, and theirs likewise. When one fails, or the caller
leaves, the rest is cancelled, and the first error is the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray_slo.core.requests import Upstream


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the batch method of a task with children returns for one request.

    Args:
        result: of the request at this task.
        items: by child task, what it is to work on: an item is a request there. A child that is
            not named gets none.
    """

    result: Any
    items: Mapping[str, Sequence[Any]] = field(default_factory=dict)
