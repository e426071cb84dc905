"""Hook of mkdocs.yml: adds the pages of the repository's root to the site, and rewrites links that
leave docs/.

README.md is the first page. A link to another file of the repository, such as `../gpt2_ddp/api.py`,
becomes a link to `project.urls.Repository` of pyproject.toml; without that, it becomes plain text.
"""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "README.zh-CN.md": "README.zh-CN.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""Page of the site -> file of the repository's root."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SOURCE = re.compile(r'(srcset|src)="docs/')


def repository() -> str:
    """Address of the repository's files, or empty."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get(
        "urls", {}
    )
    address = next(
        (url for name, url in urls.items() if name.lower() in ("repository", "source", "homepage")),
        "",
    )
    return f"{address.rstrip('/')}/blob/main" if address else ""


def rewrite(text: str, folder: str, files: str) -> str:
    """The text of a page in `folder` of the repository ("" or docs), with links as the site needs
    them; code is left as it is. `files`: what `repository` returned."""

    def link(found: re.Match) -> str:
        image, words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        page = next((page for page, file in PAGES.items() if file == path), "")
        if re.fullmatch(r"docs/[^/]+", path) and not path.endswith(".py"):
            page = path[5:]
        if page:
            return f"{image}[{LINK.sub(link, words)}]({page}{hash_}{anchor})"
        words = LINK.sub(link, words)
        return (
            f"{image}[{words}]({files}/{path}{hash_}{anchor})"
            if files and path[:2] != ".."
            else words
        )

    parts = re.split(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    code = parts[1::2]  # put aside meanwhile: the words of a link may hold code
    parts[1::2] = [f"\0{number}\0" for number in range(len(code))]
    text = LINK.sub(link, SOURCE.sub(r'\1="', "".join(parts)))
    return re.sub("\0(\\d+)\0", lambda found: code[int(found[1])], text)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the root."""
    from mkdocs.structure.files import File

    for page, file in PAGES.items():
        text = rewrite((ROOT / file).read_text(encoding="utf-8"), "", repository())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page of docs/."""
    return markdown if page.file.src_uri in PAGES else rewrite(markdown, "docs", repository())
