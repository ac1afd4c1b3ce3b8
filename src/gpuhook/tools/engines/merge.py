"""Comparison of parsed configurations: the edits to make, and the parts that are ours.

A document is a nested dict with string keys, as parsed from JSON or TOML. A path is the tuple of
keys of a value.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
Path = tuple[str, ...]


@dataclass(frozen=True)
class EditStep:
    """One edit: set ``path`` to ``value``, or remove it if ``remove`` is true."""

    path: Path
    value: Any = None
    remove: bool = False


def steps(current: Document, wanted: Document, prefix: Path = ()) -> Iterator[EditStep]:
    """Yield the fewest edits that turn ``current`` into ``wanted``."""
    for key in current:
        if key not in wanted:
            yield EditStep((*prefix, key), remove=True)
    for key, value in wanted.items():
        old = current.get(key)
        if key in current and isinstance(old, dict) and isinstance(value, dict):
            yield from steps(old, value, (*prefix, key))
        elif key not in current or not _same(old, value):
            yield EditStep((*prefix, key), value)


def _same(one: object, other: object) -> bool:
    """Compare values as in JSON and TOML, where true isn't 1 and 1 isn't 1.0."""
    return type(one) is type(other) and one == other


def get(document: Document, path: Path) -> Any:
    """Return the value at a path, None if there is none."""
    node: Any = document
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def without_ours(
    current: Document, original: Document, written: Document, owned: Iterable[Path]
) -> Document:
    """Return ``current`` without the changes that turned ``original`` into ``written``.

    Later changes by others are kept, except below the paths in ``owned``, where the original
    values are restored.
    """
    result = copy.deepcopy(current)
    _take_back(result, original, written)
    return restored(result, original, owned)


def restored(document: Document, original: Document, paths: Iterable[Path]) -> Document:
    """Return a document with the values at the paths restored from ``original``."""
    result = copy.deepcopy(document)
    for path in paths:
        _restore(result, original, path)
    return result


def beside(ours: Document, others: Document) -> Document:
    """Return the union of both documents; our values take precedence, and lists are joined."""
    result = {**copy.deepcopy(others), **ours}
    for key in ours.keys() & others.keys():
        mine, theirs = ours[key], others[key]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            result[key] = beside(mine, theirs)
        elif isinstance(mine, list) and isinstance(theirs, list):
            result[key] = [*mine, *(item for item in theirs if item not in mine)]
    return result


def _take_back(node: Document, original: Document, written: Document) -> None:
    for key in original:
        if key not in written and key not in node:
            _put_back(node, key, original)
    for key, ours in written.items():
        before, now = original.get(key), node.get(key)
        if key not in node or (key in original and _same(before, ours)):
            continue
        if isinstance(ours, dict) and isinstance(now, dict):
            _take_back(now, before if isinstance(before, dict) else {}, ours)
            if not now and not isinstance(before, dict):
                _put_back(node, key, original)
        elif _same(now, ours):
            _put_back(node, key, original)
        elif isinstance(ours, list) and isinstance(now, list):
            added = [item for item in ours if item not in (before or [])]
            node[key] = [item for item in now if item not in added]


def _put_back(node: Document, key: str, original: Document) -> None:
    if key in original:
        node[key] = copy.deepcopy(original[key])
    else:
        del node[key]


def _restore(result: Document, original: Document, path: Path) -> None:
    """Restore the value at ``path``, and remove empty parents that didn't exist before."""
    parents = [result]
    for key in path[:-1]:
        child = parents[-1].get(key)
        if not isinstance(child, dict):
            return
        parents.append(child)
    if path[-1] in parents[-1]:
        _put_back(parents[-1], path[-1], _parent(original, path))
    for depth in range(len(path) - 1, 0, -1):
        if not parents[depth] and get(original, path[:depth]) is None:
            del parents[depth - 1][path[depth - 1]]


def _parent(original: Document, path: Path) -> Document:
    found = get(original, path[:-1])
    return found if isinstance(found, dict) else {}
