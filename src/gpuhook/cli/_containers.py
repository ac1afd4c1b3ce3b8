"""What the commands call running containers."""

from collections.abc import Iterable

from gpuhook.cli._output import printable
from gpuhook.running.holders import Container
from gpuhook.running.names import Names

_SHORT = 12  # characters of a container's id, as Docker prints it
_PATIENCE = 0.5  # seconds for an engine's answer: who waits for a list is given ids instead


def names_of(containers: Iterable[Container]) -> Names:
    """Return what the engines call these containers, as far as they say it in time."""
    names = Names(patience=_PATIENCE)
    names.look([(each.engine, each.name, each.bundle) for each in containers])
    return names


def title(container: Container, names: Names) -> str:
    """Return what to call a container: Kubernetes' names, else the engine's, else its id."""
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return printable("/".join(word for word in words if word))
    called = names.of(container.name)[0] or short(container)
    return printable(f"{container.engine}:{called}" if container.engine else called)


def short(container: Container) -> str:
    """Return a container's id as its engine prints it, in a printable form."""
    return printable(container.name[:_SHORT] if container.engine else container.name)
