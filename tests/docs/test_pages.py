"""Every code block of the README and of docs/ is tried, or says why not."""

import re
from collections import Counter

import pytest

from tests.docs.pages import OUTPUT, PAGES, ROOT, Reader, at, blocks, looks_like, needs_ray

PURE = [path for path in PAGES if not needs_ray(path)]
KNOWN = ("python", "yaml", "sh", "console", "protobuf", "", *OUTPUT)
NOT_RUN = 11  # blocks that are not tried; each says why


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("path", PURE, ids=name)
def test_the_page_does_what_it_says(path, tmp_path, sample_log):
    with at(tmp_path):
        Reader(path, tmp_path, sample_log).read()


def test_every_block_is_tried_or_says_why_not(capsys):
    count, skipped = Counter(), []
    for path in PAGES:
        for block in blocks(path):
            if block.not_run:
                skipped.append(f"{block.where}: {block.not_run}")
            else:
                assert block.language in KNOWN, f"{block.where}: {block.language}"
                count[block.language or "drawing"] += 1
    with capsys.disabled():
        print(f"\n{sum(count.values())} blocks: {dict(count)}; not run:", *skipped, sep="\n  ")
    assert len(skipped) == NOT_RUN
    assert count["python"] > 30 and count["sh"] > 20 and count["yaml"] > 15


def test_no_marker_is_left_over():
    for path in PAGES:
        markers = re.findall(r"<!-- (\w+)", path.read_text(encoding="utf-8"))
        known = {
            "not",
            "with",
            "setup",
            "followed",
            "fields",
            "errors",
            "commands",
            "Made",
            "composes",
        }
        assert set(markers) <= known, name(path)


def test_what_an_output_may_look_like():
    said = "│ p99 │ 24.6 ms │\n…\ndone: 3 of x1"
    assert looks_like("┃ p99 ┃  7 ms ┃\nmore\nmore\ndone: 12 of x1", said)
    assert not looks_like("┃ p95 ┃  7 ms ┃\nmore\ndone: 12 of x1", said)
    assert not looks_like("┃ p99 ┃ 7 ms ┃\nmore\ndone: 12 of x2", said)
    assert not looks_like("done: 12 of x1\n┃ p99 ┃ 7 ms ┃", said)
