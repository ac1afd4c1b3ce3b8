"""The node's config.toml: settings that the manifest names, and the file of a ConfigMap."""

import json
import os
from typing import Any

from node import NO_ENGINE, Node, say, text_of

from gpuhook.base.config.loader import loads
from gpuhook.base.config.source import flatten, parse
from gpuhook.base.errors import ConfigError, EngineError
from gpuhook.base.host import files as host_files
from gpuhook.tools.cli.config import save
from gpuhook.tools.config.edit import parse_assignment, set_value
from gpuhook.vendors import registry

# The config.toml from a ConfigMap, if there is one.
GIVEN = "/config/config.toml"


def settle(node: Node) -> None:
    """Have the node's config.toml say what was asked for; the rest of it stays.

    A ConfigMap's file takes the place of the node's own, and what it says itself counts before
    ``settings``. No engine is restarted: gpu-py reads the file at each start.
    """
    given, before = text_of(GIVEN), own_settings(node)
    said = flatten(parse(given, GIVEN)) if given is not None else {}
    text = before if given is None else given
    for key, value in map(parse_assignment, node.settings):
        text = text if key in said else set_value(text or "", key, value)
    registry.all_vendors(loads(text or ""))  # only vendors can check the settings about vendors
    now = text_of(node.settings_file)
    record = {
        "before": before,
        "now": now,
        "written": text,
        "settings": [*node.settings],
        "given": given is not None,
        "engine": node.engine,
    }
    if text == now and {**(_record(node) or record), "now": now} == record:
        return
    host_files.replace(node.settings_record, json.dumps(record).encode(), 0o600)
    _put_settings(node, now, text)


def refuse_runtime(node: Node) -> None:
    """Raise EngineError where gpu-py is a runtime of the node's, and the node is to have none.

    An engine that still knows it would start pods without the settings that were made for it.
    """
    record = _record(node) or {}
    engine = record.get("engine", "engine" if record.get("settings") else NO_ENGINE)
    if engine != NO_ENGINE:  # protects: runtime-settings
        raise EngineError(
            f"gpu-py is a runtime of this node's {engine}, with settings that it would lose",
            "Apply overlays/remove first, and this when that is done",
        )


def unsettle(node: Node) -> None:
    """Give the node its own config.toml back."""
    if not os.path.exists(node.settings_record):
        return
    try:
        _put_settings(node, text_of(node.settings_file), own_settings(node))
    except ConfigError as error:
        say(f"{node.settings_file} stays as it is: {error}")
    os.unlink(node.settings_record)


def own_settings(node: Node) -> str | None:
    """Return the node's config.toml without what is ours in it; None for no file.

    That is the former file. If it was changed since, it is that with the former values of our keys;
    changes of a ConfigMap's file don't count.
    """
    now = text_of(node.settings_file)
    record = _record(node)
    if record is None:
        return now
    before: str | None = record["before"]
    if record["given"] or now in (before, record["written"], record.get("now", before)):
        return before
    was = flatten(parse(before or ""))
    for key, value in map(parse_assignment, record["settings"]):
        text = now or ""
        if flatten(parse(text, node.settings_file)).get(key) == value:
            now = set_value(text, key, was.get(key))  # type: ignore[arg-type]
    return now


def _record(node: Node) -> dict[str, Any] | None:
    """Return what ``settle`` has written down, None where it hasn't."""
    try:
        with open(node.settings_record, "rb") as file:
            return json.load(file)  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def _put_settings(node: Node, now: str | None, text: str | None) -> None:
    if text == now:
        return
    if text is None:
        os.unlink(node.settings_file)
        say(f"removed {node.settings_file}")
        return
    save(node.settings_file, text, None if now is not None else 0o644)
    say(f"wrote {node.settings_file}")
