"""The OCR pipeline of `configs/ocr-loki.yaml`, with two of its variants: pages in, text out."""

from pathlib import Path

import httpx
import pytest
import yaml

from deployments.ocr.pages import errors, pages
from ray_slo.serve import build_app

CONFIG = Path(__file__).parents[2] / "configs" / "ocr-loki.yaml"
KEPT = {"detect": "det736", "recognise": "rec48"}


def args():
    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    made = application["args"]
    pipeline = made["pipeline"]
    for name, kept in KEPT.items():
        task = pipeline["tasks"][name]
        task["variants"] = {kept: task["variants"][kept]}
        task["max_batch_size"] = 2
    path = "/".join(KEPT.values())
    pipeline["path_accuracies"] = {path: pipeline["path_accuracies"][path]}
    pipeline["latency_slo_ms"] = 60_000  # machines that run tests may be slow
    made["workers"]["default"] |= {"max_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}}
    made["profile_seconds"] = 1.0
    return made


def test_pages_are_read_from_end_to_end(ray_cluster):
    for module in ("rapidocr_onnxruntime", "onnxruntime", "cv2"):
        why = f"{module} cannot be imported: pip install 'ray-slo[ocr]'"
        pytest.importorskip(module, reason=why, exc_type=ImportError)
    with ray_cluster.running(build_app(args()), "ocr", "/ocr") as handle:
        for truth in pages(2, seed=5):
            answer = handle.remote(truth.png, response_metadata=True).result()
            wrong, written = errors(truth.lines, answer.result["text"])
            assert wrong / written < 0.1
            assert answer.variant == "/".join(KEPT.values())
            detect, recognise = answer.stages
            assert (detect.requests, recognise.requests) == (1, len(answer.result["lines"]))
        sent = httpx.post(
            f"{ray_cluster.url}/ocr",
            content=truth.png,
            headers={"content-type": "image/png"},
            timeout=60,
        )
        assert sent.json()["text"] == answer.result["text"]
        refused = httpx.post(f"{ray_cluster.url}/ocr", content=b"no page", timeout=60)
        assert refused.status_code == 422
        assert "an unreadable file" in refused.text
