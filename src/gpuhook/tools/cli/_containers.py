"""Names of running containers in the commands' output."""

import os
from collections.abc import Iterable

import click

from gpuhook.base.errors import printable
from gpuhook.monitor.containers.device_users import WITHOUT_ROOT, RunningContainer
from gpuhook.monitor.kubelet import SOCKET
from gpuhook.tools.cli._output import say
from gpuhook.tools.running.names import Names

_SHORT = 12  # characters of a container's id, as Docker prints it
_WHOLE = 64  # characters of a complete id
_PATIENCE = 0.5  # seconds to wait for an engine's answer; without one, ids are shown

pod_resources_option = click.option(
    "--pod-resources", default=SOCKET, show_default=True, metavar="SOCKET",
    help="Where to ask the kubelet for pods' devices.",
)  # fmt: skip


def names_of(containers: Iterable[RunningContainer]) -> Names:
    """Return the engines' names for these containers, as far as engines answer in time."""
    names = Names(patience=_PATIENCE)
    names.ask([(each.engine, each.name, each.bundle) for each in containers])
    return names


def say_what_is_missing(problems: Iterable[str]) -> None:
    """Report on standard error what the search for containers could not see."""
    if os.geteuid() != 0:
        click.echo(WITHOUT_ROOT, err=True)
    for sentence in problems:
        say(f"{sentence}.", err=True)


def title(container: RunningContainer, called: str) -> str:
    """Return a container's display name: from Kubernetes, else from its engine, else its id.

    ``called`` is the engine's name for it, "" if unknown.
    """
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return printable("/".join(word for word in words if word))
    if called and container.engine:
        return printable(f"{container.engine}:{called}")
    return printable(called or nameless(container.engine, container.name))


def nameless(engine: str, container: str) -> str:
    """Return a container's display name made from its id."""
    if not engine or container.startswith(f"{engine}:"):  # such as the name of a Slurm job
        return container
    return f"{engine}:{short(container)}"


def short(container: str) -> str:
    """Return an id in the short form that engines print."""
    return container[:_SHORT] if len(container) == _WHOLE else container
