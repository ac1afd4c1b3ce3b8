"""The protocol between the exporter's root process, which reads devices, and its server process.

The server process sends

    {"ready": true}           it has loaded everything that it needs
    {"error": [cause, remedy]}  it can't serve, or not with the files that it received last
    {"files": 7}              have these files changed?
    {"look": 8}               what is the devices' state now?

and receives {"files": 7}, with "web" if that has changed, or {"look": 8, "snapshot": {...},
"seconds": 0.1}, without the last two if the snapshot failed. There are no other messages.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from gpuhook.metrics.model import Accelerator, Container, Snapshot, Usage
from gpuhook.metrics.web_files import WebContent

QUESTION = 1 << 10  # bytes of a line of the server process
_KINDS: dict[str, Any] = {"devices": Accelerator, "containers": Container, "usages": Usage}


def line(**words: object) -> bytes:
    """Encode a message as a line."""
    return json.dumps(words).encode() + b"\n"


def from_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON values, without processes, which aren't served."""
    found = dict(vars(snapshot))
    del found["processes"]
    for kind in _KINDS:
        found[kind] = [vars(each) for each in found[kind]]
    return found


def to_snapshot(values: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot that ``from_snapshot`` converted."""
    found = dict(values)
    for kind, made in _KINDS.items():
        found[kind] = tuple(made(**_typed(made, each)) for each in found[kind])
    found["problems"], found["notes"] = tuple(found["problems"]), tuple(found["notes"])
    return Snapshot(**found)


def _typed(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Restore the types of fields that JSON doesn't have."""
    if kind is Accelerator:
        reasons = values["clock_reasons"]
        values["clock_reasons"] = None if reasons is None else tuple(reasons)
        xids = values["xids"]
        values["xids"] = None if xids is None else {int(xid): xids[xid] for xid in xids}
    elif kind is Container:
        values["devices"] = tuple(values["devices"])
    return values


def from_web(content: WebContent) -> dict[str, Any]:
    """Return the content of the TLS and password files as JSON values."""
    files = {key: base64.b64encode(data).decode() for key, data in content.content.items()}
    return {**content._asdict(), "content": files}


def to_web(values: Mapping[str, Any]) -> WebContent:
    """Return the content that ``from_web`` converted."""
    files = {key: base64.b64decode(text) for key, text in values["content"].items()}
    return WebContent(**{**values, "content": files})
