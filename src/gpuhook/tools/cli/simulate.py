"""``gpuhook simulate``: the only module that imports the package gpuhook-simulate."""

import click

from gpuhook import __version__
from gpuhook.base.errors import SimulateError
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
    # Both must be of one release; pip's requirement says so, but doesn't enforce it.
    _CAUSE = (
        f"gpuhook-simulate has version {_theirs}, and gpuhook has version {__version__}"
        if _theirs
        else "gpuhook simulate needs the package gpuhook-simulate, which isn't installed"
    )

    @command(
        examples={
            "pip install 'gpuhook[simulate]'": "Install it for a gpuhook installed with pip",
            "apt-get install ./gpuhook-simulate_*_all.deb": "Install it for the Debian package",
        },
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("words", nargs=-1, metavar="DIR", type=click.UNPROCESSED)
    def simulate(words: tuple[str, ...]) -> None:
        """Build a simulated driver root in DIR.

        This command needs the package gpuhook-simulate, which isn't installed in this version.
        """
        del words
        raise SimulateError(
            _CAUSE,
            "Run pip install 'gpuhook[simulate]', or install the package gpuhook-simulate",
        )
