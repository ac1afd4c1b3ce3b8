"""The command line of nvidia-container-cli; the exit status is 0 or 1.

The launcher gpuhook-container-cli, to which the name nvidia-container-cli is a link, starts it.
"""

import os
import sys

from gpuhook import __version__
from gpuhook.base import log
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError, LostDeviceError, UnknownDeviceError, printable
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.model import Device
from gpuhook.core.inventory.selection import select
from gpuhook.core.request.reader import Request
from gpuhook.nvidia_cli import argp, options
from gpuhook.nvidia_cli.argp import CliError, worded
from gpuhook.vendors.nvidia import device_nodes, names, variables
from gpuhook.vendors.nvidia.model import NvidiaInventory, selection
from gpuhook.vendors.nvidia.vendor import VENDOR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.nvidia_cli.argp import Found, Option

_MAX_REQUIREMENTS = 32
_MOST_DIGITS = 10  # of a process id
_COMPAT_MODES = ("mount", "ldconfig", "disabled")
_ABOUT = "Command line utility for manipulating NVIDIA GPU containers."
_LIST_KINDS = {
    "binaries": ("binary",),
    "libraries": ("library",),
    "compat32": ("library32",),
    "ipcs": ("ipc",),
    "firmwares": ("firmware",),
}
# Part of a driver file's path -> the option that leaves it out.
_LEFT_OUT = {
    "nvidia-persistenced": "no-persistenced",
    "nvidia-fabricmanager": "no-fabricmanager",
    "/gsp": "no-gsp-firmware",
}


def main(argv: list[str]) -> "NoReturn":
    """Run a command line and exit."""
    debug = ""
    try:
        given, rest = argp.parse(argv, (*options.GLOBAL, *argp.HELP), in_order=True)
        debug = _last(given, "debug") or ""
        _run(given, rest)
    except argp.UsageError as error:
        _fail(f"{printable(str(error))}\n{_try_help()}", debug)
    except CliError as error:  # its text may come from an image
        _fail(printable(str(error)), debug)
    except GpuhookError as error:
        _fail(printable(worded(error)), debug)
    sys.exit(0)


def _fail(text: str, debug: str) -> "NoReturn":
    sys.stderr.write(f"{argp.PROGRAM}: {text}\n")
    log.append(debug, {"level": "error", "msg": text, "time": log.timestamp()})
    sys.exit(1)


def _try_help() -> str:
    name = argp.PROGRAM
    return f"Try `{name} --help' or `{name} --usage' for more information."


def _run(given: "Found", rest: list[str]) -> None:
    if _answer_help(given, "[OPTION...] COMMAND [ARG...]", options.GLOBAL):
        return
    if not rest:
        raise argp.UsageError("no command given")
    command, *argv = rest
    if command not in _COMMANDS:
        raise argp.UsageError(f"unknown command '{command}'")
    usage, table, run = _COMMANDS[command]
    found, words = argp.parse(argv, (*table, *argp.HELP), in_order=False)
    if _answer_help(found, f"{command} {usage}", table):
        return
    run(_configured(given), found, words)


def _answer_help(found: "Found", usage: str, table: "tuple[Option, ...]") -> bool:
    """Print the text of --help, --usage or --version; tell whether one was given."""
    names = {name for name, _ in found}
    if "help" in names:
        sys.stdout.write(argp.help_text(usage, _ABOUT, table))
    elif "usage" in names:
        sys.stdout.write(f"Usage: {argp.PROGRAM} {usage}\n")
    elif "version" in names:
        version = options.SERVED_VERSION
        sys.stdout.write(f"cli-version: {version}\nlib-version: {version}\nbuild date: \n")
        sys.stdout.write(f"build revision: gpuhook {__version__}\n")
        labels = ("build compiler", "build platform", "build flags")
        sys.stdout.write("".join(f"{label}: \n" for label in labels))
    return not names.isdisjoint({"help", "usage", "version"})


def _last(found: "Found", name: str) -> str | None:
    """Return the value of an option, the last one if it is repeated."""
    values = [value for key, value in found if key == name]
    return values[-1] if values else None


def _items(found: "Found", name: str) -> tuple[str, ...]:
    """Return the non-empty items of all comma lists of an option."""
    lists = [value for key, value in found if key == name and value]
    return tuple(dict.fromkeys(item for item in ",".join(lists).split(",") if item))


def _configured(given: "Found") -> Config:
    """Return the configuration with the changes by global options."""
    config = load()
    named = {name for name, _ in given}
    config.load_kmods = "load-kmods" in named
    root = _last(given, "root")
    if root is not None:
        if not root.startswith("/"):
            raise CliError("initialization error", "invalid argument")
        config.driver_root, config.root, config.driver_roots = root, "", ()
    if "user" in named:
        config.user = _last(given, "user") or f"{os.geteuid()}:{os.getegid()}"
    config.ldcache = _last(given, "ldcache") or config.ldcache
    config.cli_debug = _last(given, "debug") or config.cli_debug
    return config


def _inventory(config: Config, words: "Found") -> NvidiaInventory:
    """Return the inventory as NVML shows it to this process, without files that options exclude."""
    from gpuhook.core.inventory.cache import get_inventory  # noqa: PLC0415 - slow without a cache

    found = get_inventory(config, VENDOR)
    assert isinstance(found, NvidiaInventory)  # noqa: S101 - it is NVIDIA's
    inventory = VENDOR.within_reach(found)
    given = {name for name, _ in words}
    parts = [part for part, option in _LEFT_OUT.items() if option in given]
    kept = tuple(file for file in inventory.files if not any(part in file.path for part in parts))
    return inventory.but(files=kept)


def _select(selectors: tuple[str, ...], inventory: NvidiaInventory) -> tuple[Device, ...]:
    """Return the selected devices; on a host without GPUs, names are ignored."""
    if not inventory.gpus and not inventory.lost:
        return ()
    for selector in selectors:
        try:
            select((selector,), inventory, names)
        except LostDeviceError:
            raise
        except UnknownDeviceError:
            raise CliError("device error", f"{selector}: unknown device") from None
    return select(selectors, inventory, names)


def _mig_management(found: "Found", name: str) -> str | None:
    """Return "all" if MIG management is requested; CliError for other values."""
    items = _items(found, name)
    if items not in ((), ("all",)):
        raise CliError(
            f"{name} error", f"{','.join(items)}: only 'all' devices are currently supported"
        )
    return "all" if items else None


def _no_words(words: list[str]) -> None:
    if words:
        raise argp.UsageError("too many arguments")


def _info(config: Config, found: "Found", words: list[str]) -> None:
    from gpuhook.nvidia_cli import report  # noqa: PLC0415 - each command imports its own

    _no_words(words)
    sys.stdout.write(report.info(_inventory(config, found), csv=bool(found)))


def _list(config: Config, found: "Found", words: list[str]) -> None:
    from gpuhook.nvidia_cli import report  # noqa: PLC0415 - as in _info

    _no_words(words)
    inventory = _inventory(config, found)
    imex_channels = variables.imex_channels(_items(found, "imex-channel"))
    given = {name for name, _ in found}
    if not given or (len(found) == 1 and given == {"imex-channel"}):
        given = set(_LIST_KINDS)
        devices: tuple[str, ...] = ("all",)
    else:
        devices = _items(found, "device")
    kinds = tuple(kind for name, kinds in _LIST_KINDS.items() if name in given for kind in kinds)
    mig = tuple(
        name for name in ("config", "monitor") if _mig_management(found, f"mig-{name}") is not None
    )
    selected = selection(inventory, _select(devices, inventory)) if devices else None
    wanted = report.ListSelection(kinds, selected, imex_channels, mig)
    for path in report.listing(inventory, wanted):
        sys.stdout.write(path + "\n")


def _configure(config: Config, found: "Found", words: list[str]) -> None:
    from gpuhook.nvidia_cli import configure  # noqa: PLC0415 - as in _info

    if len(words) != 1:
        raise argp.UsageError("too many arguments" if words else "a root directory is missing")
    target = configure.ConfigureTarget(_pid(found), configure.checked_root(words[0]))
    config.cuda_compat_mode = _compat_mode(found)
    request = _request(found)
    inventory = _inventory(config, found)
    given = {name for name, _ in found}
    switches = configure.DeviceSwitches(
        devbind="no-devbind" not in given, cgroups="no-cgroups" not in given
    )
    grant = Grant(VENDOR, request, inventory, _select(request.selectors, inventory))
    device_nodes.check_mig_management(grant)
    configure.configure(target, grant, config, switches)


def _pid(found: "Found") -> int | None:
    text = _last(found, "pid")
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MOST_DIGITS:
        raise CliError("input error", f"invalid process id: {text}")
    pid = int(text)
    return pid if pid > 0 else None


def _compat_mode(found: "Found") -> str:
    modes = [value or "" for name, value in found if name == "cuda-compat-mode"]
    for mode in modes:
        if mode not in _COMPAT_MODES:
            raise CliError("container error", f"invalid option: cuda-compat-mode={mode}")
    if "disabled" in modes or any(name == "no-cntlibs" for name, _ in found):
        return "disabled"
    if len(set(modes)) > 1:
        raise CliError("container error", "only one cuda-compat-mode can be specified at a time")
    return modes[0] if modes else "mount"


def _request(found: "Found") -> Request:
    """Return the options of ``configure`` as a request."""
    requirements = tuple(value for name, value in found if name == "require" and value)
    if len(requirements) > _MAX_REQUIREMENTS:
        raise CliError("input error", "too many requirements")
    known = {option.name for option in options.CAPABILITIES}
    devices = _items(found, "device")
    asked = variables.NvidiaOptions(
        capabilities=tuple(sorted({name for name, _ in found if name in known})),
        requirements=requirements,
        imex_channels=variables.imex_channels(_items(found, "imex-channel")),
        mig_config=_mig_management(found, "mig-config"),
        mig_monitor=_mig_management(found, "mig-monitor"),
    )
    return Request(names.NAME, "environment", devices, selectors=devices, options=asked)


_COMMANDS = {
    "info": ("[OPTION...]", options.INFO, _info),
    "list": ("[OPTION...]", options.LIST, _list),
    "configure": ("[OPTION...] ROOTFS", options.CONFIGURE, _configure),
}
