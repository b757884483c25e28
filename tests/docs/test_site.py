"""The site builds without a warning, asks nobody else for anything, and says what the code says."""

import re
from html import unescape

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pydantic import BaseModel, Field

from docs import hooks
from ray_slo.cli import docs_made
from tests.docs.pages import ROOT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what builds it
@pytest.mark.timeout(600)  # a busy machine may give it little of its time
def test_it_builds_and_needs_no_network(tmp_path, caplog):
    site = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    site.plugins.on_startup(command="build", dirty=False)
    build(site)
    site.plugins.on_shutdown()
    warned = [r.getMessage() for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    assert warned == []
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    loaded = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(https?://[^\" >]+)")
    for page in pages:
        found = loaded.findall(page.read_text(encoding="utf-8"))
        assert not [url for url in found if 'rel="canonical"' not in url], page.name
    config = unescape((tmp_path / "reference" / "config.html").read_text(encoding="utf-8"))
    for field in ("latency_slo_ms", "make_before_break", "interruptions_per_hour", "slo_mix"):
        assert field in config
    assert "--what-if" in (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")


class Spec(BaseModel):
    """What a file says.

    Attributes:
        rate: requests
            per second.
        low, high: bounds.
    """

    rate: float = Field(gt=0)
    low: int | None = None
    high: dict[str, int] = Field(default_factory=lambda: {"a": 1})


class Silent(BaseModel):
    """Says nothing of its field."""

    rate: float


def test_fields_are_told_from_the_class():
    assert docs_made.fields_list(f"{__name__}.Spec").splitlines() == [
        *("* **`rate`**: number (> 0), required", "<br>requests per second."),
        *("* **`low`**: integer", "<br>bounds."),
        *("* **`high`**: integer by name, default `{a: 1}`", "<br>bounds."),
    ]
    with pytest.raises(LookupError, match=r"Silent\.rate: its docstring does not say"):
        docs_made.fields_list(f"{__name__}.Silent")


def test_links_out_of_docs_lead_to_pages():
    said = "[a](../configs/README.md#x) [b](metrics.md) [c](../examples/groups.py) [d](https://x.y)"
    assert hooks.rewritten(said, "how.md") == (
        "[a](files/configs/README.md#x) [b](metrics.md) [c](files/examples/groups.py.md) "
        "[d](https://x.y)"
    )
    back = hooks.rewritten("[a](../docs/metrics.md)", "files/configs/README.md")
    assert back == "[a](../../metrics.md)"
    assert hooks.shown("examples/groups.py").startswith("# examples/groups.py\n\n````python\n")
