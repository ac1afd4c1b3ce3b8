"""Syntax of an LXC container's configuration file: our line in it; the rest is its owner's.

Our line includes a file with everything else. It is recognised by that file's name, because
Proxmox rewrites its files: comments become the container's notes, and "=" becomes ":". There, the
line comes before the first section, and sections (snapshots, pending changes) are never changed.
Sources: lxc.container.conf(5), Proxmox' pct.conf(5).
"""

import re

from gpuhook.tools.engines.merge import Document

PREFIX = "gpuhook-"  # of the included file's name
OTHERS, OURS = "others", "included"
_BEGIN = "# From here on written by gpuhook install; gpuhook uninstall removes it."
_END = "# To here written by gpuhook install."
_PROXMOX = "/etc/pve/"
_MARK = re.compile(rf"^(?:{re.escape(_BEGIN)}|{re.escape(_END)})\r?(?:\n|\Z)", re.MULTILINE)
_LINE = re.compile(
    rf"^[ \t]*lxc\.include[ \t]*[:=][ \t]*(/[^\n]*/{PREFIX}[^/\n]+\.conf)[ \t\r]*(?:\n|\Z)",
    re.MULTILINE,
)
_SECTION = re.compile(r"^\[", re.MULTILINE)


def is_proxmox(path: str) -> bool:
    """Tell whether a configuration file is one of Proxmox'."""
    return _PROXMOX in path


def parse(text: str, path: str) -> Document:
    """Return the document: the path that we include, and the others' part; omitted if empty."""
    head, tail = _split(text, path)
    included = _LINE.findall(head)
    others = _LINE.sub("", _MARK.sub("", head)) + tail
    found = {OTHERS: others, OURS: included[-1] if included else ""}
    return {key: value for key, value in found.items() if value}


def edited(text: str, wanted: Document, path: str) -> str:
    """Return the text of the document."""
    if parse(text, path) == wanted:
        return text
    others, included = str(wanted.get(OTHERS, "")), str(wanted.get(OURS, ""))
    if not included:
        return others
    head, tail = _split(others, path)
    body = head.rstrip("\n")
    blank = head[len(body) :]
    if body:
        body, blank = f"{body}\n", blank[1:]
    if is_proxmox(path):
        return f"{body}lxc.include: {included}\n{blank}{tail}"
    return f"{body}{_BEGIN}\nlxc.include = {included}\n{_END}\n{blank}{tail}"


def _split(text: str, path: str) -> tuple[str, str]:
    """Return the part before the first section, and the rest."""
    found = _SECTION.search(text) if is_proxmox(path) else None
    return (text[: found.start()], text[found.start() :]) if found else (text, "")
