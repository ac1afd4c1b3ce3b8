"""The lines between the process that looks, which is root's, and the one that serves.

The one that serves says

    {"ready": true}           it could load what it needs
    {"error": [cause, remedy]}  it can't, or not with the files that it was given last
    {"files": 7}              have these files changed?
    {"look": 8}               what do the devices do now?

and is answered {"files": 7}, with "web" where it has to know it, or {"look": 8, "snapshot": {...},
"seconds": 0.1}, without the two where the look failed. It says nothing else, and gets nothing else.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from gpuhook.tools.metrics.model import Container, Device, Snapshot, Usage
from gpuhook.tools.metrics.web_files import WebContent

QUESTION = 1 << 10  # bytes of a line of the one that serves
_KINDS: dict[str, Any] = {"devices": Device, "containers": Container, "usages": Usage}


def line(**words: object) -> bytes:
    """Return a line."""
    return json.dumps(words).encode() + b"\n"


def from_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Return a look as values of JSON; processes aren't served."""
    found = dict(vars(snapshot))
    del found["processes"]
    for kind in _KINDS:
        found[kind] = [vars(each) for each in found[kind]]
    return found


def to_snapshot(values: Mapping[str, Any]) -> Snapshot:
    """Return the look that ``from_snapshot`` was given."""
    found = dict(values)
    for kind, made in _KINDS.items():
        found[kind] = tuple(made(**_typed(made, each)) for each in found[kind])
    found["problems"], found["notes"] = tuple(found["problems"]), tuple(found["notes"])
    return Snapshot(**found)


def _typed(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with what JSON has no word for."""
    if kind is Device:
        reasons = values["clock_reasons"]
        values["clock_reasons"] = None if reasons is None else tuple(reasons)
        xids = values["xids"]
        values["xids"] = None if xids is None else {int(xid): xids[xid] for xid in xids}
    elif kind is Container:
        values["devices"] = tuple(values["devices"])
    return values


def from_web(content: WebContent) -> dict[str, Any]:
    """Return what is to be served by whom, as values of JSON."""
    files = {key: base64.b64encode(data).decode() for key, data in content.content.items()}
    return {**content._asdict(), "content": files}


def to_web(values: Mapping[str, Any]) -> WebContent:
    """Return what ``from_web`` was given."""
    files = {key: base64.b64decode(text) for key, text in values["content"].items()}
    return WebContent(**{**values, "content": files})
