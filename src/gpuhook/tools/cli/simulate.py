"""``gpuhook simulate``: the only part of gpuhook that knows the package gpuhook-simulate."""

import click

from gpuhook.ground.errors import SimulateError
from gpuhook.tools.cli._help import command

try:
    from gpuhook_simulate.command import simulate
except ModuleNotFoundError as missing:
    if missing.name != "gpuhook_simulate":
        raise

    @command(
        examples={
            "pip install 'gpuhook[simulate]'": "Install it beside a gpuhook that pip installed",
            "apt-get install ./gpuhook-simulate_*_all.deb": "Install it beside the Debian package",
        },
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("words", nargs=-1, metavar="DIR", type=click.UNPROCESSED)
    def simulate(words: tuple[str, ...]) -> None:
        """Build a simulated driver root in DIR.

        This is in a package of its own, gpuhook-simulate, which isn't installed here.
        """
        del words
        raise SimulateError(
            "What simulates drivers is a package of its own, which isn't installed",
            "Run pip install 'gpuhook[simulate]', or install the package gpuhook-simulate",
        )
