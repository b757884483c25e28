"""The host on which Serve listens by default.

With HAProxy, Serve uses every interface instead of loopback, for HAProxy and for the ingress
replicas. `tests/serve/ray_private/test_http_host.py` fails when Serve has changed.
"""

from __future__ import annotations

from ray.serve.config import HTTPOptions

_LOOPBACK = "127.0.0.1"


def loopback_by_default() -> None:
    """Make Serve listen on loopback if this process starts it without a host, in every mode.

    Config files have another default: every interface, in every mode.
    """
    field = HTTPOptions.model_fields["host"]
    if field.default != _LOOPBACK:
        field.default = _LOOPBACK
        HTTPOptions.model_rebuild(force=True)
