"""The bounds that our module sets in Serve's proxies."""

from ray_slo.serve.proxy import middlewares
from ray_slo.serve.proxy.admission import AdmissionMiddleware
from ray_slo.serve.proxy.bounds import PROXY_CALLBACK, BoundsMiddleware
from ray_slo.serve.proxy.http import FailoverMiddleware


def test_callback_is_what_serve_loads():
    module, _, name = PROXY_CALLBACK.partition(":")
    assert module == middlewares.__module__
    assert name == middlewares.__name__
    # From the inside to the outside, as Serve applies them.
    assert [m.cls for m in middlewares()] == [
        FailoverMiddleware,
        AdmissionMiddleware,
        BoundsMiddleware,
    ]
