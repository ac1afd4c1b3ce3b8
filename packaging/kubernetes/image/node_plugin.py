"""The device plugin as a unit of the node's systemd, which starts it before the kubelet at boot."""

import hashlib
import os
from collections.abc import Mapping

from node import Node, say, systemctl, text_of

from gpuhook.ground.errors import EngineError, shown
from gpuhook.ground.host import files as host_files
from gpuhook.tools.kubernetes import configure
from gpuhook.tools.kubernetes.options import VARIABLES

UNIT = "gpuhook-device-plugin.service"
# Where a ConfigMap's file of the plugin's options is, if there is one.
GIVEN = "/config/device-plugin.yaml"
_FIRST_LINE = "# Made by gpuhook's installer, which replaces and removes it.\n"
_FILE = "CONFIG_FILE"
# All that has a kubelet in it. TimeoutStartSec is how long it waits at boot, at most.
_TEXT = """\
[Unit]
Description=Hand this node's devices to the kubelet
After=nvidia-persistenced.service systemd-modules-load.service systemd-udevd.service
# Pods that the kubelet has at its start are refused for good where their devices aren't known yet.
Before=kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service
Before=k0scontroller.service k0sworker.service snap.microk8s.daemon-kubelite.service

[Service]
Type=notify
ExecStart={program} device-plugin
{environment}
Restart=always
RestartSec=10
TimeoutStartSec=2min

[Install]
WantedBy=multi-user.target
"""


def put_plugin(node: Node, version: str, environ: Mapping[str, str]) -> None:
    """Have the unit run this version with the options of the installer's environment.

    It is restarted where anything that it reads at its start has changed, and only there.
    """
    path, given = _unit(node), text_of(GIVEN)
    options = {name: environ[name] for name in VARIABLES if name in environ}
    _check(options, given)
    _put(node.plugin_file, given)
    if given is not None:
        options[_FILE] = node.plugin_file
    options.setdefault("GPUHOOK_CDI_HOOK_PATH", f"{node.programs}/gpuhook-cdi-hook")
    lines = [f"Environment={quoted(name, value)}" for name, value in sorted(options.items())]
    text = _TEXT.format(program=f"{node.programs}/gpuhook", environment="\n".join(lines))
    read = "\n".join([version, given or "", text_of(node.settings_file) or ""])
    digest = hashlib.sha256(read.encode()).hexdigest()
    text = f"{_FIRST_LINE}# What else it reads: {digest}\n{text}"
    if text_of(path) == text and not os.path.exists(_marker(node)):
        systemctl("start", UNIT)
        return
    with open(_marker(node), "wb") as file:
        os.fsync(file)
    host_files.replace(path, text.encode(), 0o644)
    systemctl("daemon-reload")
    systemctl("enable", "--quiet", UNIT)
    systemctl("restart", UNIT)
    os.unlink(_marker(node))
    say(f"started {UNIT}")


def refuse_plugin(node: Node) -> None:
    """Raise EngineError where the unit is there and the node is to have none."""
    if text_of(_unit(node)) is not None:
        raise EngineError(
            f"{UNIT} runs the device plugin on this node, which is to run in a pod now",
            "Apply overlays/remove first, and this when that is done",
        )


def remove_plugin(node: Node) -> None:
    """Stop the unit and take it away, where it is there."""
    _put(node.plugin_file, None)
    if text_of(_unit(node)) is not None:
        systemctl("disable", "--quiet", "--now", UNIT)
        os.unlink(_unit(node))
        systemctl("daemon-reload")
        say(f"removed {UNIT}")
    _put(_marker(node), None)


def quoted(name: str, value: str) -> str:
    """Return NAME=VALUE as one word of a unit file (systemd.syntax(7), systemd.exec(5))."""
    if not value.isprintable():
        raise EngineError(
            f"The variable {name} of the installer is {shown(value)}, which no unit can have",
            "Give it a value of one line without control characters",
        )
    text = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{name}={text}"'


def _unit(node: Node) -> str:
    """Return the path of the unit; EngineError where it is there and isn't ours."""
    path = f"{node.units}/{UNIT}"
    text = text_of(path)
    if text is not None and not text.startswith(_FIRST_LINE):
        raise EngineError(
            f"{path} is there, and install-node didn't put it there",
            f"Remove it (systemctl disable --now {UNIT} before that); it is tried again then",
        )
    return path


def _marker(node: Node) -> str:
    """Return the file that says that the unit hasn't been started with what it says now."""
    return f"{node.folder}/restart-plugin"


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
