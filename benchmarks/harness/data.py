"""Published measurements that programs use; `benchmarks/data/README.md` names their sources."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data"


class Missing(Exception):
    """The program needs something that is not installed, so it is skipped."""


def published(name: str) -> Path:
    """Return the path of a published data file, such as "ramsis/image_profiles.csv".

    Raises:
        FileNotFoundError: no file has this name; the message lists all names.
    """
    path = FOLDER / name
    if not path.is_file():
        names = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("*/*.csv"))
        raise FileNotFoundError(f"no published data file {name!r}; there are {', '.join(names)}")
    return path
