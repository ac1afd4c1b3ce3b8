"""What is to be on a node, and what all parts of the installer need."""

import contextlib
import ctypes
import os
import subprocess
from dataclasses import dataclass

import click

from gpuhook.base import names
from gpuhook.base.config.model import DEFAULT_PATH
from gpuhook.base.config.source import read_text
from gpuhook.base.errors import EngineError
from gpuhook.cluster.device_plugin.settings import CDI_FOLDER
from gpuhook.tools.engines.lock import FolderLock

# The kubelet shows the text of this file when a pod ends.
LAST_WORDS = "/dev/termination-log"
LOCK_SECONDS = 300.0
# Here a shim of containerd records its container's runtime, in NAMESPACE/CONTAINER/runtime.
_TASKS = "io.containerd.runtime.v2.task"
TASKS = f"/run/containerd/{_TASKS}"
UNITS = "/etc/systemd/system"
NO_ENGINE = "none"
_CLONE_NEWNS = 0x00020000  # linux/sched.h


@dataclass(frozen=True)
class Node:
    """What is to be on the node.

    ``config`` is the engine's configuration file, "" for its usual one; ``unit`` is the systemd
    unit to restart; ``tasks`` is the folder where containerd's shims note their containers.
    ``settings`` are KEY=VALUE for the node's config.toml. With ``plugin`` the device plugin is a
    unit of the node's systemd; with ``mps`` MPS' control daemon is one, with ``nri`` the engine's
    plugin. ``documents`` is the folder where the device plugin keeps CDI documents. ``lease`` is
    the cluster's lease on restarting engines, "" for none, and ``holder`` this node's name in it.
    """

    folder: str
    engine: str
    config: str
    restart: str
    unit: str
    set_default: bool
    tasks: str = TASKS
    settings: tuple[str, ...] = ()
    plugin: bool = False
    mps: bool = False
    nri: bool = False
    settings_file: str = DEFAULT_PATH
    units: str = UNITS
    documents: str = CDI_FOLDER
    lease: str = ""
    holder: str = ""

    @property
    def settings_record(self) -> str:
        """The file that says what config.toml was, and what was made of it."""
        return f"{self.folder}/settings"

    @property
    def programs(self) -> str:
        """The folder of the links."""
        return f"{self.folder}/bin"

    @property
    def versions(self) -> str:
        """The folder of the versions."""
        return f"{self.folder}/versions"

    @property
    def marker(self) -> str:
        """The file that says that the engine hasn't been restarted yet."""
        return f"{self.folder}/restart"

    @property
    def plugin_file(self) -> str:
        """The device plugin's file of options."""
        return f"{self.folder}/device-plugin.yaml"

    def locked(self) -> FolderLock:
        """Return what keeps other installers of this node waiting."""
        return FolderLock(f"{self.folder}/lock", "installing gpuhook", LOCK_SECONDS, EngineError)


def tasks_of(state: str) -> str:
    """Return the folder where shims note their containers, in containerd's state folder."""
    return f"{state}/{_TASKS}"


def say(text: str) -> None:
    """Print a line to the pod's log, at once."""
    click.echo(f"install-node: {text}")


def say_last(error: object) -> None:
    """Print why it failed, and leave it where the kubelet finds it when the log is lost."""
    click.echo(f"install-node: {error}", err=True)
    with contextlib.suppress(OSError), open(LAST_WORDS, "r+b") as file:
        file.truncate()  # the file exists only in a pod
        file.write(f"install-node: {error}\n".encode())


def systemctl(*words: str, init: int = 1) -> None:
    """Run systemctl among the node's own files; EngineError with its remedy where that fails."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        with open(f"/proc/{init}/ns/mnt", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNS) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        os.chdir("/")

    line = ["systemctl", *words]
    environment = {"PATH": names.SYSTEM_PATH}
    try:
        subprocess.run(line, preexec_fn=enter, env=environment, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"{' '.join(line)} failed on this node: {error}",
            "Give the installer hostPID and the capabilities SYS_ADMIN, SYS_CHROOT and SYS_PTRACE, "
            "if it lacks them; what systemctl said stands above",
        ) from None


def text_of(path: str) -> str | None:
    """Return what a file says, None where there is none."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
