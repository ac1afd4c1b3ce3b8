"""The device plugin as a unit of the node's systemd, which starts it before the kubelet at boot."""

import hashlib
import os
from collections.abc import Mapping

from node import Node, say, text_of
from node_unit import Unit, shipped

from gpuhook.base.errors import EngineError, shown
from gpuhook.base.host import files as host_files
from gpuhook.cluster.device_plugin import configure
from gpuhook.cluster.device_plugin.options import VARIABLES

UNIT = Unit("gpuhook-device-plugin.service", "runs the device plugin")
# The plugin's options from a ConfigMap, if there is one.
GIVEN = "/config/device-plugin.yaml"
_FILE = "CONFIG_FILE"


def put_plugin(node: Node, version: str, environ: Mapping[str, str]) -> None:
    """Have the unit run this version with the options of the installer's environment.

    It is restarted where anything that it reads at its start has changed, and only there.
    """
    given = text_of(GIVEN)
    options = {name: environ[name] for name in VARIABLES if name in environ}
    _check(options, given)
    _put(node.plugin_file, given)
    if given is not None:
        options[_FILE] = node.plugin_file
    options.setdefault("GPUHOOK_CDI_HOOK_PATH", f"{node.programs}/gpuhook-cdi-hook")
    lines = tuple(quoted(name, value) for name, value in sorted(options.items()))
    text = shipped(UNIT.name, f"{node.programs}/gpuhook", Environment=lines)
    read = "\n".join([version, given or "", text_of(node.settings_file) or ""])
    digest = hashlib.sha256(read.encode()).hexdigest()
    UNIT.put(node, f"# What else it reads: {digest}\n{text}")


def refuse_plugin(node: Node) -> None:
    """Raise EngineError where the unit is there and the node is to have none."""
    UNIT.refuse(node)


def remove_plugin(node: Node) -> None:
    """Stop the unit and take it away, where it is there."""
    _put(node.plugin_file, None)
    UNIT.remove(node)


def quoted(name: str, value: str) -> str:
    """Return NAME=VALUE as one word of a unit file (systemd.syntax(7), systemd.exec(5))."""
    if not value.isprintable():
        raise EngineError(
            f"The variable {name} of the installer is {shown(value)}, which no unit can have",
            "Give it a value of one line without control characters",
        )
    text = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{name}={text}"'


def _check(options: Mapping[str, str], given: str | None) -> None:
    """Raise ConfigError where the plugin would end at once."""
    flags = {} if given is None else {configure.FILE: GIVEN}
    for warning in configure.read(flags, options)[1]:
        say(warning)


def _put(path: str, text: str | None) -> None:
    """Have a file hold a text, or be gone."""
    if text is not None:
        host_files.replace(path, text.encode(), 0o644)
    elif os.path.lexists(path):
        os.unlink(path)
