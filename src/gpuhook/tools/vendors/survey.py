"""Ask every vendor something, as far as this machine has it."""

from collections.abc import Callable
from typing import TypeVar

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverError, NoDriverError
from gpuhook.start.contract import Vendor, load
from gpuhook.vendors.registry import known

T = TypeVar("T")


def examine(
    config: Config, ask: Callable[[Vendor], T]
) -> tuple[dict[str, T], dict[str, NoDriverError], dict[str, DriverError]]:
    """Return what ``ask`` says of each vendor, which ones aren't there, and which drivers fail."""
    found, absent, failed = {}, {}, {}
    for name, names in known(config).items():
        try:
            found[name] = ask(load(names))
        except NoDriverError as error:
            absent[name] = error
        except DriverError as error:
            failed[name] = error
    return found, absent, failed


def present(config: Config, ask: Callable[[Vendor], T]) -> tuple[list[T], list[DriverError]]:
    """Return what ``ask`` says of each vendor that this machine has, and which drivers fail.

    Where there is nothing of any vendor, DriverError of the first driver that fails, or of the
    first that isn't there.
    """
    found, absent, failed = examine(config, ask)
    if not found:
        raise [*failed.values(), *absent.values()][0]
    return [*found.values()], [*failed.values()]
