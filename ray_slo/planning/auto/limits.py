"""What is found out while planning: which programs have plans that cannot be carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Pair = tuple[str, str]
"""Variant and kind; the variant is "" where all of a kind share its workers."""


@dataclass(frozen=True)
class Limits:
    """Limits besides those of the problem.

    Attributes:
        occupancy: ρ, share of the workers' time that may be planned, by variant and kind where
            workers have one variant each, else by "" and kind; all of it where not given.
        memory: share of a kind's memory that may be planned; less than 1 where variants could not
            be packed.
        longest_s: of a batch on a kind, where others could not wait longer behind it.
        least: workers of a kind, at least, so that those who cannot wait have their own.
        mixed: kinds on which some wait longer all the same, as there is no other way.
    """

    occupancy: Mapping[Pair, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    mixed: frozenset[str] = frozenset()
