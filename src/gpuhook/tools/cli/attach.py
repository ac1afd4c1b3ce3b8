"""gpuhook attach and detach: change the devices of running containers."""

from collections.abc import Callable
from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import listed, printable
from gpuhook.monitor.containers import attach as changes
from gpuhook.monitor.containers.attach import AttachResult
from gpuhook.monitor.containers.target import AttachTarget
from gpuhook.monitor.vendors import survey
from gpuhook.tools import root_folder
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._containers import nameless
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json, say, warn
from gpuhook.tools.running import attach as requests
from gpuhook.tools.running.find import find

_SHOWN = 16  # most nodes to name


def _arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add CONTAINER, DEVICE..., --config and --format."""
    container = click.argument("container", shell_complete=completing.containers)
    words = click.argument("words", metavar="DEVICE...", nargs=-1, required=True)
    return container(words(config_option(format_option(function))))


@command(
    examples={
        "gpuhook attach training nvidia.com/gpu=1": "Give the container named training a GPU",
        "gpuhook attach training 1 2": "The same for two, if the host has GPUs of one vendor",
    },
)
@_arguments
def attach(
    container: str, words: tuple[str, ...], config_path: str | None, output_format: str
) -> None:
    """Give a running container devices.

    It gets their nodes, access in its cgroup, and the driver's files if it has none. CONTAINER is
    an id, the start of an id, or the engine's name for it; DEVICE is a CDI name. Nodes keep working
    after systemctl daemon-reload. The devices are gone when the container stops. Needs root; pods
    get devices only from the kubelet.
    """

    def work(target: AttachTarget, config: Config) -> AttachResult:
        root_folder.settle(config)
        return changes.attach(target, *requests.wanted(target, words, config), config)

    _change(container, config_path, output_format, "got", work)


@command(
    examples={
        "gpuhook detach training nvidia.com/gpu=1": "Take a GPU away that was attached",
        "gpuhook detach --force training 1": "The same while a process has it open",
    },
)
@_arguments
@click.option("--force", is_flag=True, help="Continue if a process has a device open.")
def detach(
    container: str, words: tuple[str, ...], config_path: str | None, output_format: str, force: bool
) -> None:
    """Take devices away that gpuhook attach has given a running container.

    Refused while a process in the container has one open. With --force such a process keeps it,
    but nothing can open it again; exclusive devices stay refused. The driver's files remain.
    """
    _change(container, config_path, output_format, "lost", lambda target, config: changes.detach(
        target, words, config, force=force
    ))  # fmt: skip


def _change(
    word: str,
    config_path: str | None,
    output_format: str,
    verb: str,
    work: Callable[[AttachTarget, Config], AttachResult],
) -> None:
    """Change a container's devices, and print the result."""
    from gpuhook.core.inventory.cache import get_inventory  # noqa: PLC0415

    config = load(config_path)
    inventories, _ = survey.present(config, lambda vendor: get_inventory(config, vendor))
    found = find(word, inventories, config.state_dir)
    with requests.target(found, inventories, config) as target:
        done = work(target, config)
    if output_format == "json":
        print_json(
            {"id": found.id, "engine": found.engine, "engine_name": found.name, **done._asdict()}
        )
        return
    for warning in done.warnings:
        warn(warning)
    if not done.lasts:
        warn("the next systemctl daemon-reload removes the access; gpuhook repair restores it")
    name = f"{found.engine}:{found.name}" if found.name and found.engine else found.name
    title = name or nameless(found.engine, found.id)
    labels = listed([f"{each['label']} ({each['id']})" for each in done.devices], _SHOWN)
    nodes = f": {listed(done.nodes, _SHOWN)}" if done.nodes else ""
    say(f"{printable(title)}: {verb} {labels}{nodes}")
