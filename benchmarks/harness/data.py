"""Published measurements that programs compare on; `benchmarks/data/README.md` says whose."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data"


class Missing(Exception):
    """A program needs something that is not installed here; it is skipped."""


def published(name: str) -> Path:
    """Path of a published data file, as "ramsis/image_profiles.csv".

    Raises:
        FileNotFoundError: there is none of that name; the message lists the names.
    """
    path = FOLDER / name
    if not path.is_file():
        names = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("*/*.csv"))
        raise FileNotFoundError(f"no published data file {name!r}; there are {', '.join(names)}")
    return path
