"""Syntax of files that have a single owner, such as scripts: nothing is merged."""

from gpuhook.tools.engines.merge import Document

KEY = "text"


def parse(text: str, path: str) -> Document:
    """Return the document, whose only member is the text; none for an empty file."""
    del path
    return {KEY: text} if text else {}


def edited(text: str, wanted: Document, path: str) -> str:
    """Return the text of the document."""
    del text, path
    return str(wanted.get(KEY, ""))
