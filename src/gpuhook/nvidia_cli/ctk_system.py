"""``nvidia-ctk system``: the driver's nodes, and their links in /dev/char for systemd."""

import os
import shlex
import subprocess
from typing import Any

import click

from gpuhook.base import names
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError
from gpuhook.base.host import files as host_files
from gpuhook.nvidia_cli import dev_nodes
from gpuhook.nvidia_cli.ctk_words import PROGRAM, say
from gpuhook.tools.cli._help import Group
from gpuhook.tools.cli.runtime import switch
from gpuhook.vendors.nvidia import kernel_modules

_MODPROBE_SECONDS = 60
_ENVIRONMENT = {"PATH": names.SEARCH_PATH}
_DRY_RUN = switch("--dry-run", envvar="DRY_RUN", help="Print what would be done, and do nothing.")


@click.group(cls=Group)
def system() -> None:
    """Prepare this host for containers."""


@system.command(
    "create-dev-char-symlinks",
    examples={
        f"{PROGRAM} system create-dev-char-symlinks": "Create links to the existing nodes",
        f"{PROGRAM} system create-dev-char-symlinks --create-all": "Also for possible nodes",
    },
)
@click.option(
    "--dev-char-path", "folder", default="/dev/char", show_default=True, metavar="DIR",
    envvar="DEV_CHAR_PATH", help="The folder of the links.",
)  # fmt: skip
@click.option(
    "--driver-root", default="/", show_default=True, metavar="DIR",
    envvar=["NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"], help="The root whose modprobe loads modules.",
)  # fmt: skip
@switch(
    "--create-all", envvar="CREATE_ALL",
    help="Create links for all nodes that the GPUs can have, including MIG devices.",
)  # fmt: skip
@switch(
    "--load-kernel-modules", envvar="LOAD_KERNEL_MODULES",
    help="Load the driver's modules first; with --create-all.",
)  # fmt: skip
@switch(
    "--create-device-nodes", envvar="CREATE_DEVICE_NODES",
    help="Create the driver's control nodes first; with --create-all.",
)  # fmt: skip
@_DRY_RUN
def create_dev_char_symlinks(
    folder: str,
    driver_root: str,
    create_all: bool,
    load_kernel_modules: bool,
    create_device_nodes: bool,
    dry_run: bool,
) -> None:
    """Create links /dev/char/MAJOR:MINOR to the driver's nodes.

    systemd finds devices through them, so a container keeps its GPUs when systemd writes its rules
    again. gpu-py and gpuhook refresh create those of existing nodes.
    """
    if not create_all and (load_kernel_modules or create_device_nodes):
        say("warning: modules are loaded and nodes created only with --create-all")
    if create_all and load_kernel_modules:
        _load_modules(driver_root, dry_run=dry_run)
    if create_all and create_device_nodes:
        _make_nodes("/", dry_run=dry_run)
    nodes = dev_nodes.possible() if create_all else [*dev_nodes.existing()]
    if not nodes:
        say("there is no NVIDIA device node")
    if nodes and not dry_run:
        _prepare(folder)
    for node in nodes:
        try:
            done = dev_nodes.link(folder, node, dry_run=dry_run)
        except OSError as error:
            raise _failed(f"A link in {folder}", error) from None
        if done:
            say(done)


@system.command(
    "create-device-nodes",
    examples={
        f"{PROGRAM} system create-device-nodes --control-devices": "Create the control nodes",
    },
)
@click.option(
    "--root", "--driver-root", "root", default="/", show_default=True, metavar="DIR",
    envvar=["ROOT", "NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"], help="The driver root.",
)  # fmt: skip
@click.option(
    "--dev-root", metavar="DIR", envvar=["NVIDIA_DEV_ROOT", "DEV_ROOT"],
    help="The folder above /dev.  [default: the driver root]",
)  # fmt: skip
@switch("--control-devices", help="Create the nodes that don't belong to one GPU.")
@switch("--load-kernel-modules", help="Load the driver's modules first.")
@_DRY_RUN
def create_device_nodes(
    root: str, dev_root: str | None, control_devices: bool, load_kernel_modules: bool, dry_run: bool
) -> None:
    """Create missing control nodes of the driver in /dev."""
    if load_kernel_modules:
        _load_modules(root, dry_run=dry_run)
    if control_devices:
        _make_nodes(dev_root or root, dry_run=dry_run)


def _check_modprobe(below: Rootfs) -> None:
    if below.exists(dev_nodes.MODPROBE):
        kernel_modules.check_program(below, dev_nodes.MODPROBE)  # protects: ctk-modprobe


def _load_modules(root: str, *, dry_run: bool) -> None:
    if os.path.isdir(root):
        with Rootfs(root) as below:
            _check_modprobe(below)
    for words in dev_nodes.module_commands(root):
        if dry_run:
            say(f"would run {shlex.join(words)}")
            continue
        try:
            subprocess.run(
                words, check=True, capture_output=True, timeout=_MODPROBE_SECONDS, env=_ENVIRONMENT
            )
        except (OSError, subprocess.SubprocessError) as error:
            output: Any = getattr(error, "stderr", b"") or b""
            detail = output.decode(errors="replace").strip() or str(error)
            raise DriverError(
                f"{shlex.join(words)} failed: {detail}", "Install the driver for this kernel"
            ) from None


def _make_nodes(root: str, *, dry_run: bool) -> None:
    known = dev_nodes.majors(dev_nodes.text_of_devices())
    if not dry_run:
        _prepare(os.path.join(root, "dev"))
    for node in dev_nodes.control_nodes(known):
        try:
            done = dev_nodes.make(node, root, dry_run=dry_run)
        except OSError as error:
            raise _failed(f"The node {node.path}", error) from None
        if done:
            say(done)


def _prepare(folder: str) -> None:
    """Create a folder, after checking that only root can redirect its path."""
    host_files.check_way(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise _failed(folder, error) from None


def _failed(what: str, error: OSError) -> DriverError:
    return DriverError(
        f"{what} can't be created: {error.strerror}", "Run this as root, with a writable /dev"
    )
