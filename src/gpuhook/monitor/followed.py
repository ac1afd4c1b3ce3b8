"""Services: the current config.toml, which a start reads each time, restart, and readiness."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from gpuhook.base.config.loader import PATH_VARIABLE, load
from gpuhook.base.config.model import DEFAULT_PATH, Config
from gpuhook.base.config.source import read_text
from gpuhook.base.errors import ConfigError
from gpuhook.core.inventory.fingerprint import identity, is_settled


class FollowedConfig:
    """The configuration of a service; ``config`` is the last one that was read.

    ``path`` is as for ``load``. ConfigError if it can't be read at first.
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
        """Read the file again if it has changed; tell whether the settings differ.

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
        """Raise ConfigChanged if the settings differ from before."""
        if self.has_changed(tell):  # protects: settings-followed
            tell("config.toml has changed: starting again")
            raise ConfigChanged

    def has_changed(self, tell: Callable[[str], None]) -> bool:
        """Tell whether the settings differ from before; ``tell`` why the file can't be read, once.

        The previous settings apply until the file can be read.
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


class ConfigChanged(BaseException):
    """A change of config.toml: the service is to end its children, and start again."""


def start_again() -> NoReturn:
    """Execute this program again, with the same arguments."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored
    os.execv("/proc/self/exe", sys.orig_argv)  # noqa: S606 - our own program


def report_ready() -> None:
    """Report to systemd that the service is ready, if it has asked for that; sd_notify(3)."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect(address.replace("@", "\0", 1))
            notify.send(b"READY=1")
