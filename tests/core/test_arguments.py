"""Arguments checked by their annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from ray_slo.core.arguments import Count, NonNegative, Share, check, checked

if TYPE_CHECKING:
    from nowhere import Unknown


class Thing:
    @checked
    def __init__(
        self,
        kind: Literal["small", "large"] = "small",
        *,
        size: Count | None = None,
        wait_s: NonNegative = 0.0,
        share: Share = 1.0,
        factor: Annotated[float, Field(gt=1)] = 2.0,
        on: bool = True,
        other: Unknown = None,
        table: dict[str, float] | None = None,
    ) -> None:
        self.given = kind, size, wait_s, share, factor, on, other, table


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "tiny"}, "kind must be one of small, large, got 'tiny'"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"size": 1.5}, "size must be a whole number or null, got 1.5"),
        ({"size": True}, "size must be a whole number or null, got True"),
        ({"wait_s": -1}, "wait_s must be at least 0, got -1"),
        ({"wait_s": float("nan")}, "wait_s must be a finite number, got nan"),
        ({"share": 2.0}, "share must be above 0 and at most 1, got 2.0"),
        ({"factor": "x"}, "factor must be a number, got 'x'"),
        ({"on": 1}, "on must be true or false, got 1"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"^{said}$"):
        Thing(**given)


def test_what_is_right_is_left_as_it_is():
    size, table = np.int64(3), {"a": 1.0}
    thing = Thing("large", size=size, wait_s=2, factor=np.float64(3.0), other="?", table=table)
    assert thing.given == ("large", size, 2, 1.0, 3.0, True, "?", table)
    assert thing.given[-1] is table


def test_a_class_without_annotations_takes_anything():
    check(dict, {"a": 1})
