"""Devices that containers share by MPS, with their daemon and limits.

``gpuhook mps`` controls the daemon and saves its state in the state folder; a container start reads
that. Loaded only if [gpuhook.mps] names devices. Source: NVIDIA's MPS guide of release 615.
"""

from gpuhook.base.config.mps import bytes_of
from gpuhook.base.errors import DriverError, RequestError, listed
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.records import records
from gpuhook.core.request.reader import effective_mode
from gpuhook.vendors.nvidia.model import WSL
from gpuhook.vendors.nvidia.variables import MPS_LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import Device

STATE = "mps.json"  # in the state folder, like the folder below
FOLDER = "mps"
PIPE, SHM, LOG, CLAIMS = "pipe", "shm", "log", "claims"  # in that folder
PLACE = "/run/nvidia-mps"  # the pipe folder in containers
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_THREADS, _MEMORY = MPS_LIMITS
_MEGA = 1 << 20
_DIGITS = 4  # of a device's ordinal, in a container's own limits
START = "Start it (systemctl start gpuhook-mps, or gpuhook mps start)"


class MpsRequest(Record):
    """Request for MPS: the shared ``devices`` of config.toml, the state folder, and limits."""

    devices: str
    state_dir: str
    mode: str
    threads: str
    memory: str


class SharedDevice(Record):
    """A device that is shared now.

    ``memory`` is a container's memory limit in bytes, 0 for none, ``total`` the device's memory.
    """

    uuid: str
    index: int
    memory: int = 0
    total: int = 0


class MpsState(Record, devices=SharedDevice):
    """Saved state of MPS: interface ``version`` and shared ``devices``.

    ``daemon`` is the control daemon's process id as in records, "" if there is none. ``threads``
    is a percentage, 0 for no limit; at most ``clients`` containers share a device. ``places`` are
    folders of namespaces below the pipe folder, one for each container (version 3). ``ready``
    means that the daemon has its limits and namespaces.
    """

    version: int
    devices: tuple[SharedDevice, ...]
    daemon: str = ""
    threads: int = 0
    clients: int = 1
    places: tuple[str, ...] = ()
    ready: bool = False

    def device(self, uuid: str) -> SharedDevice | None:
        """Return one of the devices, None if it isn't shared."""
        return next((each for each in self.devices if each.uuid == uuid), None)


def read(state_dir: str) -> MpsState | None:
    """Return the state that root saved; None if there is none that can be trusted."""
    folder = StateDirectory.open(state_dir)
    if folder is None:
        return None
    try:
        with folder:
            found = folder.read_checked(STATE)
        return MpsState.from_json(jsontext.loads(found[0])) if found is not None else None
    except (ValueError, KeyError, TypeError):
        return None


def lives(state: MpsState) -> bool:
    """Return whether the control daemon's process is running."""
    return bool(state.daemon) and not records.is_gone(state.daemon)


def is_meant(devices: str, device: "Device") -> bool:
    """Return whether the setting includes a device: all, or one of its names."""
    words = {word.strip() for word in devices.split(",")}
    return "all" in words or any(not words.isdisjoint(each) for each in device.names.values())


def is_shared(grant: "Grant") -> bool:
    """Return whether granted devices are shared by MPS; ``check`` requires that all are."""
    mps = grant.request.options.mps
    return bool(mps) and any(_is_among(mps[0], grant, device) for device in grant.devices)


def shares(config: "Config", grant: "Grant", device: "Device") -> bool:
    """Return whether the configuration shares a granted device, in any mode."""
    return _is_among(config.mps_devices, grant, device)


def _is_among(devices: str, grant: "Grant", device: "Device") -> bool:
    """Return whether a setting includes a device, or the device that it is part of."""
    whole = next((each for each in grant.inventory.devices if each.id == device.parent), device)
    return is_meant(devices, whole)


def check(grant: "Grant") -> None:
    """Raise a RequestError or DriverError for shared devices that can't be given now."""
    if not is_shared(grant):
        return
    wish = MpsRequest(*grant.request.options.mps)
    _check_ways(grant, wish)
    state = read(wish.state_dir)
    wanted = [f"GPU {device.label}" for device in grant.devices]
    if state is None or not lives(state):  # protects: mps-daemon
        raise DriverError(
            f"{listed(wanted)} is shared by MPS here, and no control daemon of MPS is running",
            START,
        )
    if not state.ready:  # protects: mps-not-ready
        raise DriverError(
            f"{listed(wanted)} is shared by MPS here, whose control daemon has no limits yet",
            f"Try it again in a moment. {START}",
        )
    others = [device.label for device in grant.devices if state.device(device.id) is None]
    if others:
        raise RequestError(
            f"GPU {listed(others)} isn't among the devices that MPS serves now, and a container "
            "uses MPS for all of its devices or for none",
            "Ask for other devices, or run gpuhook mps start after a change of [gpuhook.mps]",
        )


def _check_ways(grant: "Grant", wish: MpsRequest) -> None:
    """Raise RequestError if MPS isn't possible for these devices or in this mode."""
    if grant.inventory.platform == WSL:
        raise RequestError(
            "[gpuhook.mps] shares devices, and WSL2 has no MPS", "Remove gpuhook.mps.devices"
        )
    gpus = {gpu.uuid: gpu for gpu in grant.inventory.gpus}
    for device in grant.devices:
        if device.parent or gpus[device.id].mig_enabled:  # protects: mps-mig
            raise RequestError(
                f"GPU {device.label} is in MIG mode, and gpuhook shares no such GPU by MPS",
                "Remove it from gpuhook.mps.devices, or disable its MIG mode",
            )
    if effective_mode(wish.mode, [grant.request]) == "spec":
        raise RequestError(
            "A device that is shared by MPS can't be given in mode spec: its MPS namespace is "
            "chosen when the container starts",
            "Set mode = hook, or remove the device from gpuhook.mps.devices",
        )


def environment(grant: "Grant") -> "list[EnvironmentSetting]":
    """Return the variables of a client: its folder, and the administrator's limits.

    A smaller limit that the container requests is kept; others are replaced.
    """
    if not is_shared(grant):
        return []
    wish = MpsRequest(*grant.request.options.mps)
    state = read(wish.state_dir)
    if state is None:
        return []
    found = [EnvironmentSetting(PIPE_VARIABLE, PLACE, "the socket folder of MPS")]
    if state.threads:
        threads = smaller_percentage(wish.threads, state.threads)
        found.append(
            EnvironmentSetting(_THREADS, threads, f"at most {state.threads} % of the threads")
        )
    limits = {
        place: shared.memory
        for place, device in enumerate(grant.devices)
        if (shared := state.device(device.id)) is not None and shared.memory
    }
    if limits:
        ids = {device.id: place for place, device in enumerate(grant.devices)}
        memory = smaller_memory(wish.memory, limits, ids)
        found.append(EnvironmentSetting(_MEMORY, memory, "the memory limit of each device"))
    return found


def smaller_percentage(asked: str, most: int) -> str:
    """Return the requested percentage if it is less than ``most``, else ``most``."""
    digits = asked.replace(".", "", 1)
    plain = digits.isascii() and digits.isdecimal() and len(asked) <= 16
    # protects: mps-threads
    return asked if plain and 0 < float(asked) < most else str(most)


def smaller_memory(asked: str, most: "Mapping[int, int]", ids: "Mapping[str, int]") -> str:
    """Return limits such as 0=8192M,1=4096M, at most ``most`` bytes, by the device's ordinal.

    ``asked`` has such limits by ordinal or UUID, ``ids`` the ordinals by UUID; invalid entries are
    ignored.
    """
    limits = dict(most)
    for part in asked.split(","):
        name, _, size = part.strip().partition("=")
        is_number = name.isascii() and name.isdecimal() and len(name) <= _DIGITS
        place = ids.get(name, int(name) if is_number else -1)
        wanted = bytes_of(size, 0)
        if place in limits and wanted is not None and wanted >= _MEGA:
            limits[place] = min(limits[place], wanted)  # protects: mps-memory
    return ",".join(f"{place}={size // _MEGA}M" for place, size in limits.items())
