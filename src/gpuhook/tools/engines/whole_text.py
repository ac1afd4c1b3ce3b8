"""A file that is one person's or one program's as a whole, such as a script: nothing is merged."""

from gpuhook.tools.engines.merge import Document

KEY = "text"


def parse(text: str, path: str) -> Document:
    """Return the document, whose one member is the text; an empty file has none."""
    del path
    return {KEY: text} if text else {}


def edited(text: str, wanted: Document, path: str) -> str:
    """Return the text that the document says."""
    del text, path
    return str(wanted.get(KEY, ""))
