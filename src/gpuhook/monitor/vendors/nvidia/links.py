"""Proximity of GPUs: by NVLink, else by their distance on the PCI bus.

The score of two GPUs is the sum of both:

- 100 for each NVLink between them. If NVLinks lead to a switch (NVSwitch), and NVML reports that
  the two reach each other by NVLink, the count is that of the GPU with fewer links.
- a value for their distance on the PCI bus: 60 on one board, 50 behind one switch, 40 behind
  several, 30 at one host bridge, 20 at one processor, 10 across processors.

So any NVLink is better than none, and unknown proximity is 0.
"""

from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.vendors.nvidia.model import NvidiaInventory

PER_LINK = 100
# nvmlGpuTopologyLevel_t in nvml.h: the nearest common ancestor of two GPUs.
LEVELS = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}
_MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS


def links(config: "Config", inventory: "NvidiaInventory") -> dict[str, dict[str, int]]:
    """Return the scores of each GPU with others; DriverError as ``nvml.ask``."""
    uuids = [gpu.uuid for gpu in inventory.gpus]
    if len(uuids) < 2 or inventory.platform:
        return {}
    path = library(config)
    found = nvml.query(
        inventory.root, path, config.user, config.nvml_timeout, lambda it: _ask(it, uuids)
    )
    scores: dict[str, dict[str, int]] = {}
    for one, other, count, level in found["pairs"]:
        score = PER_LINK * count + LEVELS.get(level, 0)
        if score:
            scores.setdefault(one, {})[other] = score
            scores.setdefault(other, {})[one] = score
    return scores


def _ask(it: "Any", uuids: list[str]) -> "dict[str, Any]":
    """Return pairs of UUIDs, each with its number of NVLinks and its nearest common ancestor.

    A GPU that doesn't answer has no pairs.
    """
    gpus = {}
    for uuid in uuids:
        handle = _try(it, None, it.nvmlDeviceGetHandleByUUID, uuid)
        info = _try(it, None, it.nvmlDeviceGetPciInfo, handle) if handle else None
        if info:
            gpus[uuid] = (handle, _bus_id(info), _remotes(it, handle))
    known = {bus_id for _, bus_id, _ in gpus.values()}
    pairs = []
    names = [*gpus]
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            count = _count(it, gpus[one], gpus[other], known)
            level = _level(it, gpus[one][0], gpus[other][0])
            pairs.append([one, other, count, level])
    return {"pairs": pairs}


def _count(it: "Any", one: "Any", other: "Any", known: set[str]) -> int:
    """Return the number of NVLinks between two GPUs, directly or through switches."""
    direct: int = one[2].count(other[1])
    if direct:
        return direct
    index = it.NVML_P2P_CAPS_INDEX_NVLINK
    status = _try(it, None, it.nvmlDeviceGetP2PStatus, one[0], other[0], index)
    if status != it.NVML_P2P_STATUS_OK:
        return 0
    return min(sum(end not in known for end in gpu[2]) for gpu in (one, other))


def _remotes(it: "Any", handle: "Any") -> list[str]:
    """Return the bus ids of the remote ends of a GPU's active NVLinks."""
    found = []
    for link in range(_MOST_LINKS):
        state = _try(it, 0, it.nvmlDeviceGetNvLinkState, handle, link)
        if state == it.NVML_FEATURE_ENABLED:
            end = _try(it, None, it.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            found += [_bus_id(end)] if end else []
    return found


def _level(it: "Any", one: "Any", other: "Any") -> int:
    level: int = _try(it, -1, it.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return level


def _bus_id(info: "Any") -> str:
    return nvml.text_of(info.busId).upper()


def _try(it: "Any", default: "Any", ask: "Callable[..., Any]", *arguments: "Any") -> "Any":
    """Return NVML's result, ``default`` on an error: one faulty GPU doesn't affect the others."""
    try:
        return ask(*arguments)
    except it.NVMLError:
        return default
