"""What mkdocs is told beside mkdocs.yml, by its events.

The site has three kinds of pages: those of docs/, those that ``reference`` makes from the code,
and three of the repository's root (ROOT), where people look for them. What mkdocs itself doesn't
see is a warning here, which ends a strict build: Markdown that was not understood, an image that
is not there, and a page that would load anything from another host.
"""

import logging
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference  # beside this file, which mkdocs loads by its path

LOG = logging.getLogger("mkdocs.hooks.gpuhook")
ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_TO_DOCS = re.compile(r"\]\(docs/")
_TO_ROOT = re.compile(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, ROOT))})")
# What is left of a fence, list or table with a wrong indentation, or no empty line before it.
_NOT_UNDERSTOOD = re.compile(r"```|^- |^\s*\|? ?--- \|", re.MULTILINE)
_BLOCKS = re.compile(r"<(code|pre)\b.*?</\1>", re.DOTALL)
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_ELSEWHERE = ("http:", "https:", "//")
_CSS_ELSEWHERE = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that don't lie in docs/."""
    repository = Path(config.config_file_path).parent
    for name in ROOT:
        text = (repository / name).read_text("utf-8")
        files.append(File.generated(config, name, content=_TO_DOCS.sub("](", text)))
    for name, make in reference.PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page's text, its links to the repository's root as links of the site."""
    for number in badly_indented(markdown):
        LOG.warning("%s, line %d: in a list this takes four spaces", page.file.src_uri, number)
    return _TO_ROOT.sub(r"](\1\2", markdown)


def badly_indented(markdown: str) -> list[int]:
    """Return the numbers of lines that were meant to be in a list, and would end it here.

    GitHub takes a paragraph or a block in a list with three spaces, Python's Markdown with four.
    """
    found = []
    fence, before = "", ""
    for number, line in enumerate(markdown.splitlines(), 1):
        indent, mark = line[: -len(line.lstrip())], line.lstrip()[:3] == "```"
        if len(indent) in {1, 2, 3} and ((mark and not fence) or not (before or fence)):
            found.append(number)
        if mark:
            fence = "" if fence else "```"
        before = line.strip()
    return found


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Return the page as it is; warn of what Markdown has not understood in it."""
    if _NOT_UNDERSTOOD.search(_BLOCKS.sub("", html)):
        LOG.warning("%s: a table or a fenced block was not understood", page.file.src_uri)
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of what a page would load from another host."""
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*.html")):
        found = Loaded()
        found.feed(path.read_text("utf-8"))
        for address in found.addresses:
            if address.startswith(_ELSEWHERE):
                LOG.warning("%s: it would load %s", path.relative_to(site), address)
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        if _CSS_ELSEWHERE.search(path.read_text("utf-8")):
            LOG.warning("%s: it would load a file from another host", path.relative_to(site))


class Loaded(HTMLParser):
    """Collects the addresses of what a browser loads by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag loads; a link of the kind canonical or next loads nothing."""
        words = dict(attrs)
        if tag == "link" and words.get("rel") in {"canonical", "prev", "next"}:
            return
        self.addresses.append(words.get(_LOADED.get(tag, "")) or "")
