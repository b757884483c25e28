"""A model whose module is slow to import, in replicas: until the file beside it is gone."""

import sys
import tempfile
import time
from pathlib import Path

from apps import Tagged

WAIT = Path(tempfile.gettempdir()) / "ray-slo-test-late"

while "default_worker" in sys.argv[0] and WAIT.exists():
    time.sleep(0.1)


class Late(Tagged):
    """As `Tagged`."""
