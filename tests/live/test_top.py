"""`ray-slo top` and the status page show what an application with two frontends does under load."""

import asyncio

import httpx
import pytest
from apps import Named
from waiting import PATIENCE_S, eventually

from ray_slo.cli.top_app import Top
from ray_slo.errors import SLOError
from ray_slo.serve import build_app
from ray_slo.serve.watch.status import read_status

NAME = "watched"
VARIANTS = {
    name: {"load": "apps:Network", "args": [name, base_s], "accuracy": accuracy}
    for name, base_s, accuracy in (("quick", 0.01, 70), ("slow", 0.02, 80))
}
ARGS = {
    "models": {
        "m": {"callable": Named, "variants": VARIANTS, "latency_slo_ms": 30_000},
    },
    "workers": {"small": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}},
    "num_frontends": 2,
    "policy": "eager",
    "status_page": True,
    "status_hosts": ["*.example"],
    "profile_seconds": 0.3,
}


def section(screen, key):
    return next((s for s in screen["sections"] if s["key"] == key), {"rows": []})


def test_what_is_served_is_seen(ray_cluster):
    with ray_cluster.running(build_app(ARGS), NAME, f"/{NAME}") as handle:
        url = f"{ray_cluster.url}/{NAME}/-"
        with httpx.Client(timeout=PATIENCE_S) as http:

            def shown():
                """The page's tables, once they have answers, refusals and both frontends."""
                for answer in [handle.remote(0) for _ in range(16)]:
                    answer.result(timeout_s=PATIENCE_S)
                with pytest.raises(SLOError):
                    handle.remote(0, latency_slo_ms=1).result(timeout_s=PATIENCE_S)
                screen = http.get(f"{url}/screen").json()
                full = all(section(screen, key)["rows"] for key in ("variants", "refused"))
                return screen if full and "2 of 2 frontends" in screen["head"] else None

            screen = eventually(shown)
            assert screen
            (row,) = section(screen, "models")["rows"]
            assert row["cells"][:2] == ["m", "30000"]
            assert float(row["cells"][3]) > 0  # goodput
            assert {row["cells"][1] for row in section(screen, "variants")["rows"]} <= {*VARIANTS}
            assert {row["cells"][1] for row in section(screen, "refused")["rows"]} == {"m"}
            assert section(screen, "kinds")["rows"][0]["cells"][:2] == ["small", "1"]

            page = http.get(f"{url}/top")
            assert page.headers["content-type"].startswith("text/html")
            told = http.get(f"{url}/status").json()
            assert told["models"] == http.get(f"{ray_cluster.url}/{NAME}").json()["models"]

            for headers, status in (
                ({"host": "slo.example"}, 200),
                ({"host": "slo.example", "origin": "http://slo.example"}, 200),
                ({"host": "evil.test"}, 400),
                ({"origin": "http://evil.test"}, 400),
                ({"sec-fetch-site": "cross-site"}, 400),
            ):
                for path in ("top", "screen", "status"):
                    answer = http.get(f"{url}/{path}", headers=headers)
                    assert answer.status_code == status, (headers, answer.text)

        async def on_screen():
            app = Top(lambda: read_status("auto", NAME), interval_s=3600)
            async with app.run_test(size=(140, 60)) as pilot:
                await app.workers.wait_for_complete()
                await pilot.pause()
                return app.body.texts

        lines = asyncio.run(on_screen())
        assert lines[lines.index("Models") + 2].split()[:2] == ["m", "30000"]
        assert any(line.split()[:1] == ["small"] for line in lines)
