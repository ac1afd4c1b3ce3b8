"""``gpuhook config``: show, check and change config.toml."""

import contextlib
import os
import sys
from collections.abc import Callable
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
from gpuhook.tools.config.edit import (
    check_key,
    parse_assignment,
    set_value,
    similar_keys,
    unset,
)
from gpuhook.tools.config.render import as_toml, value_of
from gpuhook.tools.engines.lock import FolderLock
from gpuhook.vendors import registry

_PATIENCE = 20.0  # seconds; a change takes less than one
_FILE = click.option(
    "--config",
    "path",
    metavar="FILE",
    help=f"Configuration file.  [default: ${PATH_VARIABLE} or {DEFAULT_PATH}]",
)
_DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="Print the changed file without writing it."
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
        "gpuhook config get nvidia-container-runtime.mode": "Print the mode in effect",
    },
)
@click.argument("key", shell_complete=completing.keys)
@_FILE
def get(key: str, path: str | None) -> None:
    """Print the value of a setting in effect: the file's, or the default.

    Write a key with its section. Strings are printed without quotes, lists as in TOML.
    """
    check_key(key)
    say(value_of(load(path), key))


@config.command(
    "path",
    examples={
        "gpuhook config path": "Print the path of the file in use",
    },
)
@_FILE
def path_(path: str | None) -> None:
    """Print the path of the configuration file, which may not exist yet."""
    say(chosen_file(path))


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
        registry.all_vendors(settings)
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
@_DRY_RUN
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

    def change(text: str) -> str:
        for assignment in assignments:
            key, value = parse_assignment(assignment, list_separator)
            text = set_value(text, key, value)
        return text

    _change(chosen_file(path), change, dry_run=dry_run)


@config.command(
    "unset",
    examples={
        "gpuhook config unset nvidia-container-runtime.mode": "Return to the default mode",
    },
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, shell_complete=completing.keys)
@_FILE
@_DRY_RUN
def unset_(keys: tuple[str, ...], path: str | None, dry_run: bool) -> None:
    """Remove settings from the configuration file, so that they have their defaults.

    Write a key with its section. The rest of the file is kept. A key that isn't set isn't an error.
    """

    def change(text: str) -> str:
        for key in keys:
            text = unset(text, key)
        return text

    _change(chosen_file(path), change, dry_run=dry_run)


def _change(chosen: str, change: Callable[[str], str], *, dry_run: bool) -> None:
    """Write the result of a change of the file's text, or print it."""
    with contextlib.nullcontext() if dry_run else changing(chosen):
        found = _text_of(chosen)
        before = default_text() if found is None else found
        text = change(before)
        registry.all_vendors(loads(text))  # vendors check their own settings
        if dry_run:
            click.echo(text, nl=False)
        elif text != before:
            save(chosen, text)


def _text_of(path: str) -> str | None:
    try:
        return read_text(path)
    except FileNotFoundError:
        return None


@config.command(
    examples={
        "gpuhook config edit": "Edit the file in use, or the commented default as a new one",
    },
)
@_FILE
def edit(path: str | None) -> None:
    """Open the configuration file in an editor, and save it if it has no error.

    The editor is that of VISUAL or EDITOR, else one that is installed. It gets a copy: a file
    with an error isn't saved, and can be edited again.
    """
    chosen = chosen_file(path)
    before = _text_of(chosen)
    text = before if before is not None else default_text()
    edited = text
    while True:
        edited = click.edit(edited, extension=".toml", require_save=False) or ""
        if edited == text:
            say(f"{chosen}: unchanged")
            return
        errors = _errors(edited)
        if not errors:
            break
        for error in errors:
            click.echo(f"error: {error}", err=True)
        if not (sys.stdin.isatty() and click.confirm("Edit it again?", default=True)):
            raise ConfigError(f"{chosen} is unchanged: the edited text has errors", "See above")
    with changing(chosen):
        if _text_of(chosen) != before:
            raise ConfigError(
                f"{chosen} was changed by another program while you edited it",
                "Edit it again",
            )
        save(chosen, edited)
    say(f"wrote {chosen}")


def _errors(text: str) -> list[ConfigError]:
    """Return all errors of a configuration, those of vendors last."""
    try:
        settings, errors = examine(text)
    except ConfigError as error:
        return [error]
    try:
        registry.all_vendors(settings)
    except ConfigError as error:
        errors.append(error)
    return errors


def changing(path: str) -> contextlib.AbstractContextManager[None]:
    """Lock a configuration against other writers for a block that reads and writes it."""
    host_files.check_way(path)
    return _ConfigLock(os.path.realpath(path)).held()


class _ConfigLock(FolderLock):
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
