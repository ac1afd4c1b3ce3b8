"""config.toml as it is now, for services: they run for months, and a start reads it each time."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from gpuhook.ground.config.loader import PATH_VARIABLE, load
from gpuhook.ground.config.model import DEFAULT_PATH, Config
from gpuhook.ground.config.source import read_text
from gpuhook.ground.errors import ConfigError
from gpuhook.start.inventory.freshness import identity, is_settled


class Followed:
    """The configuration of a service; ``config`` is what was read last.

    ``path`` is as for ``load``. ConfigError where it can't be read at first.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file = path or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH
        self._problem = ""
        self._seen: tuple[int, ...] | None = None
        self._is_settled = False
        self._text: str | None = None
        self.config = Config()
        self.read()

    def read(self) -> bool:
        """Read it again where the file has changed; tell whether it says something else.

        ConfigError for a file that can't be read, at each call until it can be.
        """
        seen = identity(self._file)
        if self._is_settled and seen == self._seen:
            return False
        text = self._read_text()
        config = load(self._path)
        # A file that has just changed may change again without another time.
        self._seen, self._is_settled = seen, seen is None or is_settled(self._file)
        before, self._text = self._text, text
        if text == before:
            return False
        self.config = config
        return True

    def _read_text(self) -> str | None:
        try:
            return read_text(self._file)
        except FileNotFoundError:
            return None

    def check(self, tell: Callable[[str], None]) -> None:
        """Raise Changed where it says something else than before."""
        if self.has_changed(tell):  # protects: settings-followed
            tell("config.toml has changed: starting again")
            raise Changed

    def has_changed(self, tell: Callable[[str], None]) -> bool:
        """Tell whether it says something else than before; ``tell`` why it can't be read, once.

        What was read before counts until the file can be read.
        """
        try:
            changed = self.read()
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                tell(f"{error.cause}: the settings from before count")
            return False
        self._problem = ""
        return changed


class Changed(BaseException):
    """config.toml says something else: the service is to end its children, and start again."""


def start_again() -> NoReturn:
    """Become this program once more, with the words that it was started with."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # what is ignored would stay so
    os.execv("/proc/self/exe", sys.orig_argv)  # noqa: S606 - our own program
