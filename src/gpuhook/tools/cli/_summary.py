"""Summary of `gpuhook explain` on one screen: a container's devices and their sources."""

import os
from collections import Counter
from collections.abc import Iterator

from gpuhook.base.errors import listed
from gpuhook.core.contract import Grant
from gpuhook.core.plan.operations import LD_CACHE, BindFile, BindSocket, Operation, UpdateLdCache
from gpuhook.core.request.reader import Request
from gpuhook.tools.cli._explanation import ApplyDocument, Explanation, Row

MOST = 30  # lines
_NAMED = 4  # most devices, folders and CDI specs to name
_PATHS = 8
_SENTENCES = 4
_WAYS = {
    "cdi": "gpu-py writes it into config.json, from CDI specs",
    "folder": "gpuhook apply does it, before a program is started there",
    "hook": "a hook does it, before the container's own program starts",
    "spec": "gpu-py writes it into config.json (mode spec)",
}
_COUNTED = {
    "symlink": "link",
    "write": "written file",
    "environment": "variable",
    "group": "group",
    "allow-device": "device rule",
}
_DRAWN_APART = ("bind", "device", "cdi-device", "ldcache")
_EVERY_STEP = "-v shows every step with its reason"


def rows(explanation: Explanation) -> list[Row]:
    """Return at most ``MOST`` facts: first the devices, then the problems."""
    facts = [*explanation.circumstances, *_requests(explanation), *_done(explanation)]
    wrong = [*_lost(explanation), *_wrong(explanation)]
    steps = [Row("", _EVERY_STEP)] if explanation.operations else []
    over = len(facts) + len(wrong) + len(steps) - MOST
    if over > 0:
        left_out = sorted(range(len(facts)), key=lambda at: (not facts[at].extra, -at))[: over + 1]
        facts = [row for at, row in enumerate(facts) if at not in left_out]
        facts.append(Row("", f"{len(left_out)} more lines with -v"))
    return [*facts, *wrong, *steps]


def _requests(explanation: Explanation) -> Iterator[Row]:
    requests = explanation.progress.requests
    ignored = [f"from {source}: {why}" for each in requests for source, why in each.ignored]
    yield from _few("Ignored", ignored, "poor")
    asking = [request for request in requests if request.devices is not None]
    if requests and not asking:
        yield Row("", "The container requests no GPU: it stays unchanged.")
        if explanation.why_nothing:
            yield Row("Because", explanation.why_nothing)
    inventories = {each.vendor: each for each in explanation.progress.inventories}
    grants = explanation.resolved.grants if explanation.resolved is not None else []
    granted = {grant.request.vendor: grant for grant in grants}
    for request in asking:
        yield Row("Requests", _asked(request, explanation.vendors[request.vendor].TITLE))
        facts = request.options.facts() if request.options is not None else []
        for title, text in facts:
            if text != "none":
                yield Row(title, text, extra=True)
        inventory = inventories.get(request.vendor)
        if inventory is not None:
            where = f"; its driver is at {inventory.root}" if inventory.root != "/" else ""
            yield Row("This host", f"{inventory.sentence()}{where}", extra=True)
        if request.vendor in granted:
            yield Row("Gets", _given(granted[request.vendor], explanation.operations), "good")


def _asked(request: Request, title: str) -> str:
    names = listed(list(request.devices or ()), _PATHS) or "none"
    return f"{title} {names}, from its {request.source}"


def _given(grant: Grant, operations: list[Operation]) -> str:
    noun = grant.vendor.names.NOUN
    if not grant.devices:
        return f"no {noun}{', only the driver' if operations else ''}"
    texts = [
        each.label if each.label == each.id else f"{each.label} ({each.id})"
        for each in grant.devices
    ]
    models = dict.fromkeys(each.model for each in grant.devices if each.model)
    return f"{noun} {listed(texts, _NAMED)}{''.join(f'; {each}' for each in [*models][:2])}"


def _done(explanation: Explanation) -> Iterator[Row]:
    """Yield the changes: nodes, files and others."""
    operations = explanation.operations
    for each in operations:
        if isinstance(each, ApplyDocument):
            yield Row("CDI device", f"{each.name} of {each.file}", "good", extra=True)
    nodes = [str(op.to_json()["destination"]) for op in operations if op.kind == "device"]
    if nodes:
        yield Row("Nodes", f"{len(nodes)}: {listed(nodes, _PATHS)}")
    files = [op for op in operations if isinstance(op, (BindFile, BindSocket))]
    if files:
        yield Row("Files", f"{len(files)}, {_origins(files)}")
    others = _others(operations)
    if others:
        yield Row("Besides", ", ".join(others))
    if explanation.mode is not None and operations:
        yield Row("How", _WAYS[explanation.mode])


def _origins(files: list[BindFile | BindSocket]) -> str:
    """Return the folders that files come from, and their driver root."""
    folders = Counter(os.path.dirname(op.path) for op in files)
    texts = [f"{folder} ({count})" for folder, count in folders.most_common()]
    roots = [root for root in dict.fromkeys(op.root for op in files) if root != "/"]
    below = f"; all below {' and '.join(roots)}" if roots else ""
    return f"from {listed(texts, _NAMED)}{below}"


def _others(operations: list[Operation]) -> list[str]:
    counts = Counter(op.kind for op in operations)
    found = [
        f"{counts[kind]} {noun}{'' if counts[kind] == 1 else 's'}"
        for kind, noun in _COUNTED.items()
        if counts[kind]
    ]
    caches = [len(op.libraries) for op in operations if isinstance(op, UpdateLdCache)]
    found += [f"{count} libraries in {LD_CACHE}" for count in caches if count]
    known = {*_COUNTED, *_DRAWN_APART}
    more = [op.describe() for op in operations if op.kind not in known]
    return found + [text.partition(",")[0] for text in more][:_NAMED]


def _lost(explanation: Explanation) -> Iterator[Row]:
    yield from _few("Lost", explanation.lost, "bad")


def _wrong(explanation: Explanation) -> Iterator[Row]:
    """Yield warnings, hints, skipped operations, and the error that refuses the container."""
    said = explanation.lost
    warnings = [text for text in explanation.warnings if text not in said]
    yield from _few("Warning", warnings, "poor")
    yield from _few("Hint", explanation.hints, "poor")
    undone = [operation.describe() for operation in explanation.undone]
    if undone:
        yield Row("Skipped", listed(undone, _NAMED), "poor")
    if explanation.error is not None:
        yield Row("", f"Error ({explanation.error.code}): {explanation.error}", "bad")


def _few(title: str, texts: list[str], tone: str) -> Iterator[Row]:
    """Yield a line for each of the first texts, and the number of further ones."""
    yield from (Row(title, text, tone) for text in texts[:_SENTENCES])
    if len(texts) > _SENTENCES:
        yield Row("", f"{len(texts) - _SENTENCES} more with -v", tone)
