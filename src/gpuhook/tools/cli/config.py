"""``gpuhook config``: show, check and change config.toml."""

import contextlib
import os
import sys
from importlib import resources

import click

from gpuhook.base.config.loader import PATH_VARIABLE, examine, load, loads
from gpuhook.base.config.locate import line_of
from gpuhook.base.config.model import DEFAULT_PATH, WITHOUT_EFFECT
from gpuhook.base.config.source import UTF_8_MARK, read_text
from gpuhook.base.errors import ConfigError
from gpuhook.base.host import files as host_files
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._help import group
from gpuhook.tools.cli._output import say
from gpuhook.tools.config.edit import parse_assignment, set_value, similar_keys
from gpuhook.tools.config.render import as_toml
from gpuhook.tools.engines.lock import Lock
from gpuhook.vendors import registry

_PATIENCE = 20.0  # seconds; a change takes less than one
_FILE = click.option(
    "--config",
    "path",
    metavar="FILE",
    help=f"Configuration file.  [default: ${PATH_VARIABLE} or {DEFAULT_PATH}]",
)


def default_text() -> str:
    """Return the commented config.toml that lists every key with its default."""
    return (resources.files("gpuhook") / "tools/config/config.toml").read_text("utf-8")


def chosen_file(path: str | None) -> str:
    """Return the configuration file to use, ``path`` if it is given."""
    return path or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH


@group()
def config() -> None:
    """Show, check and change the configuration."""


@config.command(
    examples={
        "gpuhook config show": "Print all settings in effect, and their file",
    },
)
@_FILE
def show(path: str | None) -> None:
    """Print the settings in effect, as TOML."""
    settings = load(path)
    say(f"# {settings.path or 'no configuration file: all defaults'}")
    click.echo(as_toml(settings), nl=False)


@config.command(
    examples={
        "gpuhook config default > /etc/gpuhook/config.toml": "Create a file with all defaults",
    },
)
def default() -> None:
    """Print a config.toml with every key, its meaning and its default."""
    click.echo(default_text(), nl=False)


@config.command(
    examples={
        "gpuhook config validate": "Check the file in use",
        "gpuhook config validate ./config.toml": "Check a file before you install it",
    },
)
@click.argument("file", required=False)
@_FILE
def validate(file: str | None, path: str | None) -> None:
    """Check a configuration file; exit with status 1 if it has an error.

    Keys without effect are reported as warnings.
    """
    chosen = chosen_file(file or path)
    try:
        text = read_text(chosen)
    except FileNotFoundError:
        if file or path or os.environ.get(PATH_VARIABLE):
            load(chosen)
        say(f"{chosen} does not exist: all settings have their defaults")
        return
    settings, errors = examine(text, chosen)
    for key, reason in settings.ignored:
        line = line_of(text, key)
        place = f"{chosen}, line {line}" if line else chosen
        question = "" if key in WITHOUT_EFFECT else similar_keys(key)
        full_stop = "." if question else ""
        say(f"warning: {place}: {key} has no effect: {reason}{full_stop}{question}", err=True)
    for error in errors:
        click.echo(f"error: {error}", err=True)
    try:
        registry.known(settings)
    except ConfigError as error:
        errors.append(error)
        click.echo(f"error: {error}", err=True)
    if errors:
        sys.exit(1)
    say(f"{chosen} is valid")


@config.command(
    "set",
    examples={
        "gpuhook config set nvidia-container-runtime.mode=spec": "Choose another mode",
        "gpuhook config set nvidia-container-runtime.runtimes=crun:runc": "Try crun first",
        "gpuhook config set gpuhook.accept-annotations --dry-run": "Print the changed file",
    },
)
@click.argument(
    "assignments",
    metavar="KEY=VALUE...",
    nargs=-1,
    required=True,
    shell_complete=completing.settings,
)
@_FILE
@click.option("--list-separator", default=":", help="Separator of list elements.  [default: :]")
@click.option("--dry-run", is_flag=True, help="Print the changed file without writing it.")
def set_(
    assignments: tuple[str, ...], path: str | None, list_separator: str, dry_run: bool
) -> None:
    """Change settings in the configuration file; comments and order are kept.

    Write a key with its section: nvidia-container-runtime.mode=spec. A boolean key without a
    value becomes true; features also accept nil, which removes them. A file that does not
    exist is created from the commented default.
    """
    if not list_separator:
        raise click.BadParameter("it can't be empty", param_hint="--list-separator")
    chosen = chosen_file(path)
    with contextlib.nullcontext() if dry_run else changing(chosen):
        try:
            text = read_text(chosen)
        except FileNotFoundError:
            text = default_text()
        for assignment in assignments:
            key, value = parse_assignment(assignment, list_separator)
            text = set_value(text, key, value)
        registry.known(loads(text))  # vendors check their own settings
        if dry_run:
            click.echo(text, nl=False)
        else:
            save(chosen, text)


def changing(path: str) -> contextlib.AbstractContextManager[None]:
    """Lock a configuration against other writers for a block that reads and writes it."""
    host_files.check_way(path)
    return _Changing(os.path.realpath(path)).held()


class _Changing(Lock):
    """The lock of a configuration file, in a folder next to it."""

    def __init__(self, path: str) -> None:
        parent, name = os.path.split(path)
        super().__init__(f"{parent}/.{name}.gpuhook", f"changing {path}", _PATIENCE, ConfigError)
        self._path = path

    def _unusable(self, error: OSError) -> ConfigError:
        return _unwritable(self._path, error)


def save(path: str, text: str, mode: int | None = None) -> None:
    """Write a configuration, keeping its mode if none is given; ConfigError if that fails.

    The file's byte order mark is kept.
    """
    host_files.check_way(path)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        host_files.replace(path, _mark_of(path) + text.encode("utf-8"), mode)
    except OSError as error:
        raise _unwritable(path, error) from None


def _mark_of(path: str) -> bytes:
    """Return the byte order mark of a file, b"" if it has none or doesn't exist."""
    try:
        start = host_files.read_start(path, len(UTF_8_MARK))
    except FileNotFoundError:
        return b""
    return start if start == UTF_8_MARK else b""


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} can't be written: {error.strerror}",
        host_files.remedy(error, "Run this as root, or name another file with --config"),
    )
