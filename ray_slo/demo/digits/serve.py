"""`make serve`, in a clone: run the digits application on a local Ray cluster until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import yaml

from ray_slo.core.files import whole
from ray_slo.serve.proxy import modes

CONFIG = Path(__file__).parents[3] / "configs" / "digits.yaml"


def main() -> None:
    if not CONFIG.is_file():
        sys.exit(
            f"`make serve` works in a clone of ray-slo only: there is no {CONFIG}. With the wheel, "
            "try `ray-slo demo`, or `ray-slo new NAME` and then `serve run config.yaml` there"
        )
    port = int(os.environ.get("PORT", "8000"))
    mode = modes.enter()  # before Ray is imported, which reads it then
    import ray
    from ray import serve

    from ray_slo.demo.digits.data import test_pngs
    from ray_slo.demo.digits.train import load_or_train
    from ray_slo.serve import build_app

    load_or_train(["digits-m"])  # once, before all replicas load it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = yaml.safe_load(CONFIG.read_text())["applications"][0]
        serve.run(build_app(application["args"]), name=application["name"])
        pictures, labels = test_pngs(1)
        path = Path("out") / f"digit-{labels[0]}.png"
        path.parent.mkdir(exist_ok=True)
        with whole(path) as half:
            half.write_bytes(pictures[0])
        url = f"http://127.0.0.1:{port}/"
        print(f"\nThe digits application answers at {url}. Ray Serve's mode: {mode}")
        print("(`make serve FAST=0` takes Serve's own proxies). Try, in another terminal:\n")
        curl = f"curl -si --data-binary @{path} -H 'content-type: image/png'"
        print(f"  {curl} {url}")
        print(f"  {curl} -H 'x-request-timeout-seconds: 0.001' {url}   # refused, and why")
        print("  .venv/bin/ray-slo status")
        print(f"  .venv/bin/ray-slo bench {url} --payload {path} --rate 20 --duration-s 10\n")
        print("Ctrl-C ends it.", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
