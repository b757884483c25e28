"""The troubleshooting page knows every reason and error, and quotes what is printed."""

import ast
import re
from pathlib import Path

import pytest

from ray_slo.core import DropReason
from ray_slo.serve import build_app, errors
from ray_slo.serve.config.spec import AppSpec
from tests.docs.pages import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = [p.read_text(encoding="utf-8") for p in (ROOT / "ray_slo").rglob("*.py")]
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.SLOError)
]
TABLE = {
    cells[0].strip("`"): [cell.strip("`") for cell in cells[1:]]
    for cells in (line.split(" | ") for line in re.findall(r"^\| (`\w+` .+) \|$", PAGE, re.M))
}


def literals():
    """Every text in the code; of a formatted one, what stands between its values."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_is_there_with_its_codes(error):
    assert TABLE[error.default_reason][:3] in (
        [error.__name__, str(error.http_status), error.grpc_code],
        ["RefusedEarly", "503", "RESOURCE_EXHAUSTED"],
    )
    assert f"`{error.__name__}`" in PAGE


def test_every_reason_is_there():
    in_code = {r for s in SOURCES for r in re.findall(r'reason="(\w+)"', s)}
    assert in_code | {reason.value for reason in DropReason} | {"failed"} <= set(TABLE)
    for reason in ("would_miss", "shed", "queue_full", "no_worker", "preempted"):
        assert TABLE[reason][0] == "RefusedEarly"


@pytest.mark.slow
def test_what_it_quotes_is_printed():
    said = "\n".join(literals())
    boxes = [b.code for b in blocks(ROOT / "docs" / "troubleshooting.md") if not b.language]
    assert len(boxes) > 6
    for line in "".join(boxes).splitlines():
        for part in line.split("…"):
            # "refused early: " and what follows are two texts
            for piece in part.split("refused early: "):
                assert len(piece.strip()) < 3 or piece.strip(" ") in said, line


def test_what_it_names_exists():
    code = "\n".join(SOURCES)
    rules = (ROOT / "ray_slo" / "serve" / "watch" / "rules.yml").read_text(encoding="utf-8")
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for metric in set(re.findall(r"`(serve_slo_\w+?)(?:\{.*?\})?`", PAGE)):
        assert f"\n### {metric}\n" in metrics, metric
    for alert in set(re.findall(r"`(RaySLO\w+)`", PAGE)):
        assert f"alert: {alert}\n" in rules, alert
    fields = set(re.findall(r"`(num_frontends|max_\w+|retries|profile_\w+|isolate_errors)`", PAGE))
    for field in fields:
        assert re.search(rf"\b{field}\b", code), field
    assert fields & set(AppSpec.model_fields)


MISTAKES = [
    ("policy 'defered' is unknown; choose one of", {"policy": "defered"}),
    (
        "policy 'deferred' has no argument timeout_ms; it takes",
        {"policy": {"name": "deferred", "kwargs": {"timeout_ms": 3}}},
    ),
    ("modells: unknown key (did you mean 'models'?)", {"modells": {}}),
    (
        "models.digits.callable: cannot import 'ray_slo.demo.digits:Digit'",
        {"models": {"digits": {"callable": "ray_slo.demo.digits:Digit", "latency_slo_ms": 200}}},
    ),
    (
        "models.digits: args and kwargs do not fit Digits:",
        {
            "models": {
                "digits": {
                    "callable": "ray_slo.demo.digits:Digits",
                    "kwargs": {"varient": "digits-l"},
                    "latency_slo_ms": 200,
                }
            }
        },
    ),
    (
        "models.rank.callable: Recommender.size: policy 'ramsis' counts requests, not",
        {
            "models": {
                "rank": {"callable": "deployments.recommender:Recommender", "latency_slo_ms": 200}
            },
            "policy": {"name": "ramsis", "kwargs": {"load_rps": 10}},
        },
    ),
    ("planner.name: 'loki' plans a pipeline, and there is none", {"planner": "loki"}),
    (
        "workers.default.price_per_hour, or instance_type: required by the planner 'kairos'",
        {"planner": {"name": "kairos", "kwargs": {"budget_per_hour": 1}}},
    ),
]


@pytest.mark.parametrize(("says", "mistake"), MISTAKES, ids=[says[:20] for says, _ in MISTAKES])
def test_mistakes_in_a_config_say_what_the_page_says(says, mistake):
    models = {"digits": {"callable": "ray_slo.demo.digits:Digits", "latency_slo_ms": 200}}
    with pytest.raises(ValueError, match=re.escape(says)):
        build_app({"models": models, **mistake})
    assert f"`{says}" in PAGE
