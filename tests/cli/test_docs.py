"""`ray-slo docs` shows the pages and sections that error messages name."""

import pytest

from ray_slo.cli import docs, main
from ray_slo.core import environment
from ray_slo.core.pages import PAGE, SECTIONS
from ray_slo.serve.deadlines import HTTP_PAGE


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["docs", *args])
    told = capsys.readouterr()
    return left.value.code, told.out, told.err


def test_it_lists_the_pages(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "reference/config.md " in out and "Glossary" in out
    assert len(out.splitlines()) > 30


@pytest.mark.parametrize("anchor", SECTIONS)
def test_every_section_that_messages_name(anchor, capsys):
    code, out, _ = run(capsys, f"{PAGE}#{anchor}")
    assert code == 0
    assert out.startswith("#") and "**`" in out
    assert "<!-- fields" not in out


@pytest.mark.parametrize("page", [environment.PAGE, f"{HTTP_PAGE}#requests", "faults", "policies"])
def test_pages_by_any_of_their_names(page, capsys):
    code, out, _ = run(capsys, page)
    assert code == 0
    assert out.startswith("#")


def test_errors_and_commands_are_filled_in(capsys):
    assert "`RefusedEarly` | 503" in run(capsys, "http")[1]
    assert "--what-if" in run(capsys, "cli")[1]


def test_a_section_ends_with_the_next_of_its_level():
    page = "# A\n## B\nb\n### C\nc\n```sh\n# no heading\n```\n## D\nd\n"
    assert docs.section(page, "b") == "## B\nb\n### C\nc\n```sh\n# no heading\n```\n"
    assert docs.section(page, "d") == "## D\nd\n"
    with pytest.raises(ValueError, match="no section #no-heading; they are a, b, c, d"):
        docs.section(page, "no-heading")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("reference/confg", "did you mean 'reference/config'"),
        ("config", "several pages are named 'config': how-to/config and reference/config"),
        ("glossary#slow", "no section #slow; they are glossary"),
    ],
)
def test_what_is_no_page(page, said, capsys):
    code, _, err = run(capsys, page)
    assert code == 2
    assert said in err


def test_without_the_pages_the_message_says_where_they_should_be(monkeypatch, tmp_path):
    monkeypatch.setattr(docs, "__file__", str(tmp_path / "a" / "b" / "docs.py"))
    monkeypatch.setattr(docs.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="the documentation is neither in"):
        docs.folder()
    pages = tmp_path / "share" / "doc" / "ray-slo"
    pages.mkdir(parents=True)
    (pages / "index.md").write_text("# ray-slo\n")
    assert docs.folder() == pages
