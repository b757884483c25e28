"""Published measurements that programs compare on, outside the repository: `RAY_SLO_DATA`."""

from __future__ import annotations

import os
from pathlib import Path


class MissingData(Exception):
    """A program needs published data that is not here."""


def published(name: str) -> Path:
    """Path of a published data file, as "ramsis/image_profiles.csv".

    Raises:
        MissingData: `RAY_SLO_DATA` is not set, or the folder that it names has no such file.
    """
    folder = os.environ.get("RAY_SLO_DATA")
    if not folder:
        raise MissingData(
            f"needs the published data file {name}; set RAY_SLO_DATA to the folder that has it"
        )
    path = Path(folder) / name
    if not path.is_file():
        raise MissingData(f"needs {name}, which RAY_SLO_DATA={folder} does not have")
    return path
