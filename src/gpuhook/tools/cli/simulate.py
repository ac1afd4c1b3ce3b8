"""``gpuhook simulate``: the only part of gpuhook that knows the package gpuhook-simulate."""

import click

from gpuhook import __version__
from gpuhook.ground.errors import SimulateError
from gpuhook.tools.cli._help import command

try:
    from gpuhook_simulate import __version__ as _theirs
except ModuleNotFoundError as missing:
    if missing.name != "gpuhook_simulate":
        raise
    _theirs = ""

if _theirs == __version__:
    from gpuhook_simulate.command import simulate
else:
    # Both are of one release, which pip says and doesn't insist on.
    _CAUSE = (
        f"gpuhook-simulate is of version {_theirs}, and this is gpuhook {__version__}"
        if _theirs
        else "What simulates drivers is a package of its own, which isn't installed"
    )

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

        This is in a package of its own, gpuhook-simulate, which isn't installed here in this
        version.
        """
        del words
        raise SimulateError(
            _CAUSE,
            "Run pip install 'gpuhook[simulate]', or install the package gpuhook-simulate",
        )
