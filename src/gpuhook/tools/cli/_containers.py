"""What the commands call running containers."""

import os
from collections.abc import Iterable

import click

from gpuhook.ground.errors import printable
from gpuhook.tools.cli._output import say
from gpuhook.tools.metrics.kubelet import SOCKET
from gpuhook.tools.running.holders import WITHOUT_ROOT, Container
from gpuhook.tools.running.names import Names

_SHORT = 12  # characters of a container's id, as Docker prints it
_WHOLE = 64  # characters of an id as engines make them
_PATIENCE = 0.5  # seconds for an engine's answer: who waits for a list is given ids instead

pod_resources_option = click.option(
    "--pod-resources", default=SOCKET, show_default=True, metavar="SOCKET",
    help="Where to ask the kubelet for pods' devices.",
)  # fmt: skip


def names_of(containers: Iterable[Container]) -> Names:
    """Return what the engines call these containers, as far as they say it in time."""
    names = Names(patience=_PATIENCE)
    names.ask([(each.engine, each.name, each.bundle) for each in containers])
    return names


def say_what_is_missing(problems: Iterable[str]) -> None:
    """Say on standard error what a look at the containers didn't see."""
    if os.geteuid() != 0:
        click.echo(WITHOUT_ROOT, err=True)
    for sentence in problems:
        say(f"{sentence}.", err=True)


def title(container: Container, called: str) -> str:
    """Return what to call a container: Kubernetes' names, else its engine's, else its id.

    ``called`` is the engine's name for it, "" where that isn't known.
    """
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return printable("/".join(word for word in words if word))
    if called and container.engine:
        return printable(f"{container.engine}:{called}")
    return printable(called or nameless(container.engine, container.name))


def nameless(engine: str, container: str) -> str:
    """Return what to call a container by its id alone."""
    if not engine or container.startswith(f"{engine}:"):  # as a job of Slurm's is called
        return container
    return f"{engine}:{short(container)}"


def short(container: str) -> str:
    """Return an id as engines print it."""
    return container[:_SHORT] if len(container) == _WHOLE else container
