"""Environment variables that Docker sets in a container for ``--gpus``.

Source: GpuOpts of docker/cli (opts/gpus.go) and moby's daemon/nvidia_linux.go.
"""

import csv
from typing import Any

from gpuhook.base.errors import listed, shown
from gpuhook.vendors.nvidia.names import NAME, VARIABLES
from gpuhook.vendors.nvidia.variables import DRIVER_CAPABILITIES

_CAPABILITIES = ("compute", "compat32", "graphics", "utility", "video", "display")
_OF_ANY_GPU = ("gpu", NAME)  # capabilities of Docker's driver without a variable
_KEYS = ("driver", "count", "device", "capabilities", "options")
_COUNT = "count"


def variables(value: str) -> list[str]:
    """Return the variables, NAME=VALUE; ValueError, with a sentence, for a refused value."""
    given = _fields(value)
    if given.get("driver", NAME) != NAME:
        raise ValueError(f"Docker has no driver {shown(given['driver'])} for --gpus")
    if _COUNT in given and "device" in given:
        raise ValueError(
            "--gpus takes a number or names; several names need extra quotes, as in "
            "--gpus '\"device=0,1\"'"
        )
    name = next(iter(VARIABLES))
    devices = given.get("device")
    found = [f"{name}={_counted(given.get(_COUNT, '1')) if devices is None else devices}"]
    capabilities = [word for word in given.get("capabilities", "").split(",") if word]
    unknown = [each for each in capabilities if each not in (*_CAPABILITIES, *_OF_ANY_GPU)]
    if unknown:
        raise ValueError(
            f"Docker has no driver with the capability {listed([*map(shown, unknown)], 4)} for "
            f"--gpus: there are {', '.join(_CAPABILITIES)}"
        )
    asked = [each for each in capabilities if each in _CAPABILITIES]
    return [*found, f"{DRIVER_CAPABILITIES}={','.join(asked)}"] if asked else found


def of_requests(requests: list[Any]) -> list[str]:
    """Return the variable that Docker sets for DeviceRequests of its API, [] for none.

    A request with names is for these devices, one without for a count, a negative count for all.
    """
    found = []
    for each in requests:
        if not isinstance(each, dict) or each.get("Driver") not in ("", None, NAME):
            continue
        devices = each.get("DeviceIDs") or []
        names = ",".join(str(device) for device in devices)
        found.append(f"{next(iter(VARIABLES))}={names or _counted(str(each.get('Count', 0)))}")
    return found


def cdi_names(requests: list[Any]) -> list[str]:
    """Return the CDI devices in DeviceRequests."""
    ours = [each for each in requests if isinstance(each, dict) and each.get("Driver") == "cdi"]
    return [str(name) for each in ours for name in each.get("DeviceIDs") or ()]


def _fields(value: str) -> dict[str, str]:
    """Return the keys and values of a CSV line; a word without a key is the count."""
    try:
        [fields] = csv.reader([value], strict=True)
    except (csv.Error, ValueError):
        fields = []
    found: dict[str, str] = {}
    for field in fields:
        key, equals, text = field.partition("=")
        key, text = (key, text) if equals else (_COUNT, key)
        if key not in _KEYS:
            raise ValueError(f"--gpus has no key {shown(key)}: there are {', '.join(_KEYS)}")
        if key in found:
            raise ValueError(f"--gpus has {key} twice in {shown(value)}")
        found[key] = text
    if not found:
        raise ValueError(f"--gpus takes all, a number or names, not {shown(value)}")
    return found


def _counted(count: str) -> str:
    """Return a list of the first devices, as Docker counts them; void for a count of 0."""
    if count == "all":
        return "all"
    try:
        number = int(count)
    except ValueError:
        raise ValueError(f"--gpus takes all or a number, not {shown(count)}") from None
    if number < 0:
        return "all"
    return ",".join(map(str, range(number))) if number else "void"
