"""Additions to mkdocs.yml, made in mkdocs' events.

The site has four kinds of pages: those of docs/, those that ``reference`` makes from the code,
three of the repository's root (ROOT), and README's comparison. The three are in the root
because people look for them there. Problems that mkdocs itself doesn't detect cause a warning
here, which fails a strict build. They are Markdown that isn't understood, a missing image, and
a page that would load anything from another host.
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
import reference  # in this file's folder; mkdocs loads this file by its path

from gpuhook import __version__

LOG = logging.getLogger("mkdocs.hooks.gpuhook")
ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_TO_DOCS = re.compile(r"\]\(docs/")
_TO_ROOT = re.compile(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, ROOT))})")
# Remains of a fence, list or table that has a wrong indentation or no empty line before it.
_NOT_UNDERSTOOD = re.compile(r"```|^- |^\s*\|? ?--- \|", re.MULTILINE)
_BLOCKS = re.compile(r"<(code|pre)\b.*?</\1>", re.DOTALL)
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
COMPARISON = "compare.md"
# Pictures of a terminal, made by scripts/screenshots.
TERMINALS = ("doctor", "explain", "list", "stats")
_TO_COMPARISON = re.compile(r"\]\(((?:\.\./)*)\.\./README\.md#compared-with[a-z-]*")
_PICTURE = re.compile(r'(<img [^>]*src="([^"]+\.svg)"[^>]*>)(?!</a>)')
_ELSEWHERE = ("http:", "https:", "//")
_CSS_ELSEWHERE = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that aren't in docs/."""
    repository = Path(config.config_file_path).parent
    for name in ROOT:
        text = (repository / name).read_text("utf-8")
        files.append(File.generated(config, name, content=_TO_DOCS.sub("](", text)))
    for name, make in reference.PAGES.items():
        files.append(File.generated(config, name, content=make()))
    readme = (repository / "README.md").read_text("utf-8")
    files.append(File.generated(config, COMPARISON, content=comparison(readme)))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version at the end of each page."""
    config.copyright = f"gpuhook {__version__}"
    return config


def on_pre_page(page: Page, **_: object) -> Page:
    """Remove the link to edit a page that isn't a file of docs/."""
    if page.file.generated_by:
        page.edit_url = None
    return page


def comparison(readme: str) -> str:
    """Return README's comparison as a page; ValueError if README has none."""
    _, heading, rest = readme.partition("\n## Compared with")
    if not heading:
        raise ValueError("README.md has no section that compares")
    section = rest.partition("\n## ")[0]
    return _TO_DOCS.sub("](", f"# Compared with{section.rstrip()}\n")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page's text, in which links to the repository's root are links of the site."""
    for number in badly_indented(markdown):
        LOG.warning("%s, line %d: in a list this takes four spaces", page.file.src_uri, number)
    return _TO_ROOT.sub(r"](\1\2", _TO_COMPARISON.sub(rf"](\1{COMPARISON}", markdown))


def badly_indented(markdown: str) -> list[int]:
    """Return the numbers of badly indented lines, which would end their list on the site.

    A paragraph or a block in a list needs three spaces on GitHub, and four in Python's
    Markdown.
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
    """Return the page with links around its pictures; warn about Markdown that isn't understood."""
    if _NOT_UNDERSTOOD.search(_BLOCKS.sub("", html)):
        LOG.warning("%s: a table or a fenced block was not understood", page.file.src_uri)
    return _PICTURE.sub(_linked, html)


def _linked(picture: re.Match[str]) -> str:
    """Return a picture in a link to its file, which a browser can show in any size."""
    source = picture[2]
    kind = ' class="terminal"' if Path(source).stem in TERMINALS else ""
    return f'<a{kind} href="{source}">{picture[1]}</a>'


def on_post_build(config: MkDocsConfig) -> None:
    """Warn about everything that a page would load from another host."""
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
    """Collector of the addresses that a browser loads by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the address that the tag loads; links like canonical or next load nothing."""
        words = dict(attrs)
        if tag == "link" and words.get("rel") in {"canonical", "prev", "next"}:
            return
        self.addresses.append(words.get(_LOADED.get(tag, "")) or "")
