"""Editor of our block at the end of a systemd file; the rest belongs to the file's owner.

Sections may be repeated in such a file, so our block has its own.
"""

from gpuhook.tools.engines.merge import Document

_BEGIN = "# From here on written by gpuhook install; gpuhook uninstall takes it back."
_END = "# To here written by gpuhook install."
OTHERS, OURS = "others", "gpuhook"


def parse(text: str, path: str) -> Document:
    """Return the document: our part and the others' part, each omitted if empty."""
    del path
    before, begin, rest = text.partition(f"{_BEGIN}\n")
    block, end, after = rest.partition(f"{_END}\n")
    if not begin or not end:
        return {OTHERS: text} if text else {}
    found = {OTHERS: before + after, OURS: block}
    return {key: value for key, value in found.items() if value}


def edited(text: str, wanted: Document, path: str) -> str:
    """Return the text of the document."""
    del text, path
    others, block = str(wanted.get(OTHERS, "")), str(wanted.get(OURS, ""))
    if not block:
        return others
    line = "" if not others or others.endswith("\n") else "\n"
    return f"{others}{line}{_BEGIN}\n{block}{_END}\n"
