"""Questions of ``gpuhook install`` on a terminal, and its refusal to guess without one."""

import sys

import click

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.known import ENGINES


def can_ask() -> bool:
    """Tell whether a person can answer: standard input and output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def present(ask: EngineRequest) -> list[str]:
    """Return the engines that this host has; EngineError if it has none."""
    found = [name for name, engine in ENGINES.items() if engine.is_present(ask)]
    if not found:
        raise EngineError(
            "No container engine was found", f"Name one with --engine: {', '.join(ENGINES)}"
        )
    return found


def engines(ask: EngineRequest, *, interactive: bool) -> tuple[str, ...]:
    """Return the engines to set up where none was named; EngineError if none is chosen."""
    found = present(ask)
    if interactive:
        click.echo(f"Container engines on this host: {', '.join(found)}")
        chosen = tuple(each for each in found if click.confirm(f"Set up {each}?", default=True))
        if chosen:
            return chosen
    raise EngineError(
        f"No engine was named, and this host has {', '.join(found)}",
        f"Name what to set up, such as --engine {found[0]}, or all of them with --engine all",
    )


def gpus(folder: str, *, default: bool) -> bool:
    """Return whether --gpus is to work, from the answer to a question."""
    click.echo(
        "docker run --gpus, and devices in compose files and dev containers, need links with the\n"
        f"names of NVIDIA's programs in {folder}, and a restart of Docker."
    )
    return click.confirm("Make them work?", default=default)
