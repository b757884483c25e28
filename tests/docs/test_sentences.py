"""README, docs and the READMEs of the folders have only short sentences."""

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.docs.sentences import long_sentences, sentences, words

GENERATED = {"docs/benchmarks.md"}
BESIDE = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *(
        ROOT / name / "README.md"
        for name in ("benchmarks", "configs", "deployments", "examples", "policies")
    ),
]
OF_DOCS = [path for path in PAGES if path.relative_to(ROOT).as_posix() not in GENERATED]
SHORT = list(dict.fromkeys([*OF_DOCS, *BESIDE]))


@pytest.mark.parametrize("page", SHORT, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_is_long(page):
    assert list(sentences(page.read_text(encoding="utf-8")))
    assert not long_sentences(page)


def test_what_a_sentence_is():
    page = (
        "# A heading. Not counted\n\nOne [link](https://a.b/c.d?e=f) here, i.e. `x = 1. y` code. "
        'Is it "two?" Version 2.5 at\n95.5 %. It waits: `a`; b.\n\n'
        "* an item\n  of a list\n* another\n\n| a table | is |\n"
        "|---|---|\n| left. | out. |\n\n```python\nprint(1). 2\n```\n"
    )
    assert [sentence for _, sentence in sentences(page)] == [
        "One link here, i.e. Code code.",
        'Is it "two?"',
        "Version 2.5 at 95.5 %.",
        "It waits: Code; b.",
        "an item of a list",
        "another",
    ]
    assert words("Version 2.5 at 95.5 % – fine.") == 5


def test_a_long_sentence_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Short.\n\n" + "word " * 25 + "end. Short again.\n")
    (found,) = long_sentences(page)
    assert found.startswith("page.md:3: 26 words: word word")
    assert long_sentences(page, 26) == []
