"""The documentation as a whole: links and anchors, mkdocs.yml's
navigation, and figures that other files have, too."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from pages import ROOT, load_docs

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")] + DOCS
TARGETS = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


HOOK = load_docs("site_hook")


def without_code(page):
    """The page's text without fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    found = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+?) *#*$", without_code(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_anchor_is_there(page):
    for target in map("".join, TARGETS.findall(re.sub(r"`[^`\n]*`", "", without_code(page)))):
        path, _, anchor = target.partition("#")
        # a badge of the repository's site
        if re.match(r"[a-z]+:", target) or path.startswith("../../actions/"):
            continue
        file = Path(os.path.normpath(page.parent / path)) if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_code_that_a_page_names_is_there(page):
    # a diff of docs/extend.md makes files
    text = re.sub(r"```diff\n.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in re.findall(r"\b(?:gpt2_ddp|tests)/[\w/]*\w\.py\b", text):
        assert (ROOT / name).exists(), name


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose anchors are made by a function of Python's."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
MKDOCS = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def test_the_navigation_has_every_page_once():
    found = re.findall(r"[\w.-]+\.md", str(MKDOCS["nav"]))
    assert sorted(found) == sorted([*HOOK.PAGES, *(page.name for page in DOCS)])


def test_links_out_of_docs_become_addresses_or_text():
    text = (
        "[`a`](docs/x.md#y) [b](configs/b.yaml) ![c](docs/c.png) `[d](docs/d.md)` [e](https://e) "
        "[![f](../g.svg)](../h)"
    )
    text += (
        '\n```\n[i](docs/i.md)\n```\n<img src="docs/j.svg"> [k](README.zh-CN.md) [`m` and '
        "`n`](LICENSE) [o](#p)"
    )
    done = HOOK.rewrite(text, "", "")
    assert done.split("\n")[0] == "[`a`](x.md#y) b ![c](c.png) `[d](docs/d.md)` [e](https://e) f"
    assert done.split("\n")[2] == "[i](docs/i.md)"
    assert done.split("\n")[4] == '<img src="j.svg"> [k](README.zh-CN.md) `m` and `n` [o](#p)'
    linked = HOOK.rewrite(
        "[a](../gpt2_ddp/api.py#L1) [b](../README.md#c) [d](e.md)", "docs", "https://h/blob/main"
    )
    assert linked == "[a](https://h/blob/main/gpt2_ddp/api.py#L1) [b](index.md#c) [d](e.md)"


@pytest.mark.parametrize("page", ["architecture", "reliability"])
def test_the_tests_and_files_that_a_page_names_exist(page):
    text = (ROOT / f"docs/{page}.md").read_text()
    named = re.findall(r"`((?:\w+/)?test_\w+\.py)(?:(?: -k |::)(\"[^`]+\"|\w+))?`", text)
    assert len(named) > 12
    for file, chosen in named:
        content = (ROOT / "tests" / file).read_text()
        assert all(word in content for word in re.findall(r"\w+", chosen)), (file, chosen)
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert [
        file
        for file in files
        if not any((ROOT / folder / file).is_file() for folder in ("gpt2_ddp", "tests", "."))
    ] == []
