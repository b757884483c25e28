"""`make serve`: the digits application on a local Ray, left running until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ray
import yaml
from ray import serve

from ray_slo.demo.digits.data import test_pngs
from ray_slo.demo.digits.train import load_or_train
from ray_slo.serve import build_app
from ray_slo.serve.proxy.bounds import PROXY_CALLBACK, PROXY_CALLBACK_ENV

CONFIG = Path(__file__).parents[2] / "configs" / "digits-deferred.yaml"


def main() -> None:
    port = int(os.environ.get("PORT", "8000"))
    load_or_train(["digits-m"])  # once, before the replicas all want it
    os.environ.setdefault(PROXY_CALLBACK_ENV, PROXY_CALLBACK)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = yaml.safe_load(CONFIG.read_text())["applications"][0]
        serve.run(build_app(application["args"]), name=application["name"])
        pictures, labels = test_pngs(1)
        path = Path("out") / f"digit-{labels[0]}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pictures[0])
        url = f"http://127.0.0.1:{port}/"
        print(f"\nThe digits application answers at {url}. Try, in another terminal:\n")
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
