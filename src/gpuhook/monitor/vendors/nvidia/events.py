"""A listener for NVML's events, in a child that reports them in lines of JSON.

The child lives as long as its parent wants, and keeps NVML open: before the driver can be unloaded,
it has to exit. Like the child of ``nvml`` it runs with the driver root as its root, without
privileges. NVML may hang in it. So it reports which GPU it is about to query, and sends a heartbeat
every few seconds:

    {"asking": UUID}                          the next response depends on this GPU
    {"watched": 7, "unwatched": {UUID: why}}  it listens now; the others have no events
    {"xid": 79, "gpu": UUID, "gi": 1, "ci": 0}  an error; "gi" and "ci" if it is an instance's;
                                              "recovery" is NVML's recovery action for the GPU
    {"lost": UUID, "why": text}               this GPU can't be reached any more
    {"beat": 1}
    {"error": text}                           it can't listen, and exits
"""

import time

from gpuhook.base.container import kernel
from gpuhook.monitor.vendors.nvidia import xids
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.inventory.model import Device
    from gpuhook.monitor.host.child import Work
    from gpuhook.vendors.nvidia.model import NvidiaInventory

    Say = Callable[[dict[str, Any]], None]

BEAT = 10.0  # seconds between two heartbeats when there are no events

_NO_INSTANCE = 0xFFFFFFFF  # nvmlEventData_t in nvml.h: the event is about the whole GPU
_MOST = 1000  # events that are fetched at once
_PAUSES = (1.0, 30.0)  # seconds; the first and the longest one after a wait that failed


def begin(config: "Config", inventory: "NvidiaInventory", but: "Collection[str]") -> "Work":
    """Return the function of a listening child; DriverError if there is no NVML.

    ``but`` are UUIDs of GPUs to skip.
    """
    uid, gid = nvml.ids(config.user)
    path = library(config)
    uuids = [gpu.uuid for gpu in inventory.gpus if gpu.uuid and gpu.uuid not in but]
    return lambda talk: _say_all(
        lambda: nvml.start(inventory.root, path, uid, gid), uuids, talk.say
    )


def can_listen(inventory: "NvidiaInventory") -> bool:
    """Tell whether there are events to receive: only NVIDIA's driver for Linux has them."""
    return bool(inventory.gpus) and not inventory.platform


def concerned(inventory: "NvidiaInventory", event: "Mapping[str, Any]") -> "list[Device]":
    """Return the devices that an event is about: a GPU, or the instances that it names.

    A GPU's instances have the health of the GPU, and aren't returned in addition to it. For a GPU
    or an instance that no longer exists, nothing is returned.
    """
    uuid, gi, ci = event["gpu"], event.get("gi"), event.get("ci")
    if gi is None:
        return [device for device in inventory.devices if device.id == uuid]
    found = {mig.uuid for gpu in inventory.gpus if gpu.uuid == uuid
             for mig in gpu.mig if mig.gi == gi and ci in (None, mig.ci)}  # fmt: skip
    return [device for device in inventory.devices if device.id in found]


def is_error(line: "Mapping[str, Any]") -> bool:
    """Tell whether a line is a valid error: the driver's own code runs in the child."""
    numbers = (line.get("xid"), line.get("gi", 0), line.get("ci", 0), line.get("recovery", 0))
    return isinstance(line.get("gpu"), str) and all(isinstance(each, int) for each in numbers)


def judge(event: "Mapping[str, Any]", chosen: "Any") -> tuple[str, str]:
    """Return an XID's effect on its device, and its description."""
    actions = chosen.xids if chosen else {}
    return xids.action(event["xid"], actions), xids.describe(event["xid"])


# In the child -------------------------------------------------------------------------------


def _say_all(start: "Callable[[], Any]", uuids: list[str], say: "Say") -> None:
    """Listen until the process ends."""
    kernel.set_name("gpuhook-events")
    try:
        pynvml = start()
    except OSError as error:
        say({"error": f"NVML can't be loaded: {error}"})
        return
    try:
        pynvml.nvmlInit()
        EventSet(pynvml, say).listen(uuids)
    except pynvml.NVMLError as error:
        say({"error": f"NVML failed: {error}"})


class EventSet:
    """An NVML event set and its GPUs."""

    def __init__(self, nvml: "Any", say: "Say") -> None:
        self._nvml = nvml
        self._say = say
        self._handles: dict[str, Any] = {}  # of GPUs in the set
        self._seen: dict[str, Any] = {}  # also of those that were in an earlier set
        self._events: Any = None  # None if NVML has no event sets, or no GPU has events
        self._failed: list[str] = []  # GPUs to be registered again
        self._gone = (nvml.NVML_ERROR_GPU_IS_LOST, getattr(nvml, "NVML_ERROR_RESET_REQUIRED", 16))
        self._lacking = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def listen(self, uuids: list[str]) -> None:
        """Report the events of these GPUs, without end."""
        self._events = self._register(uuids)
        pause, longest = _PAUSES
        while self._events is not None:
            try:
                data = self._nvml.nvmlEventSetWait_v2(self._events, int(BEAT * 1000))
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                    self._say({"beat": 1})
                elif not self._renew(error):
                    time.sleep(pause)
                    pause = min(2 * pause, longest)
                continue
            pause = _PAUSES[0]
            self._tell(self._event(data))
        self._nvml.nvmlShutdown()  # there will be no events, and the driver needn't stay open
        while True:
            time.sleep(BEAT)
            self._say({"beat": 1})

    def register(self, uuids: list[str]) -> None:
        """Register these GPUs for ``poll``; if that fails, they have no events."""
        try:
            self._events = self._register(uuids)
        except self._nvml.NVMLError as error:
            self._give_up(uuids, error)

    def poll(self) -> None:
        """Report the events since the last call, without waiting."""
        if self._failed:
            self.register(self._failed)
        for event in self._heard(self._events, self._renew_or_give_up):
            self._tell(event)

    def _renew_or_give_up(self, error: Exception) -> None:
        uuids = [*self._handles]
        try:
            self._renew(error)
        except self._nvml.NVMLError as problem:
            self._give_up(uuids, problem)

    def _heard(
        self, events: "Any", fails: "Callable[[Any], object]" = lambda _: None
    ) -> "Iterator[dict[str, Any]]":
        """Yield a set's pending events; ``fails`` is called if waiting for more fails."""
        for _ in range(_MOST if events is not None else 0):
            try:
                data = self._nvml.nvmlEventSetWait_v2(events, 0)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    fails(error)
                return
            if event := self._event(data):
                yield event

    def _renew(self, error: "Any") -> bool:
        """Replace the set by one without lost GPUs; tell whether any is lost.

        One lost GPU makes the wait fail for all. The new set is created before the old one is
        freed, so that no other GPU's event is missed; events in both count once.
        """
        if error.value in self._lacking:
            self._give_up([*self._handles], error)
            return True
        lost = self._find_lost()
        old = self._events
        self._events = self._register([uuid for uuid in self._handles if uuid not in lost])
        missed = [*self._heard(old)]
        known = [*missed]
        for event in self._heard(self._events):
            if event in known:
                known.remove(event)
            else:
                missed.append(event)
        for event in missed:
            self._tell(event)
        self._nvml.nvmlEventSetFree(old)
        return bool(lost)

    def _register(self, uuids: list[str]) -> "Any":
        """Return a new event set with these GPUs; None if that fails, or it is empty."""
        self._handles, self._failed = {}, []
        try:
            events = self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError as error:
            if error.value not in self._lacking:
                raise
            self._give_up(uuids, error)
            return None
        unwatched = {}
        for uuid in uuids:
            self._say({"asking": uuid})
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                wanted = self._wanted() & self._nvml.nvmlDeviceGetSupportedEventTypes(handle)
                self._nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
            except self._nvml.NVMLError as error:
                if error.value in self._gone:
                    self._lose(uuid, error)
                else:
                    unwatched[uuid] = str(error)
                continue
            self._handles[uuid] = handle
        self._seen.update(self._handles)
        self._say({"watched": len(self._handles), "unwatched": unwatched})
        if not self._handles:
            self._nvml.nvmlEventSetFree(events)
            return None
        return events

    def _give_up(self, uuids: list[str], error: Exception) -> None:
        """Stop listening to these GPUs, and report the reason."""
        self._handles, self._events = {}, None
        self._failed = [] if getattr(error, "value", 0) in self._lacking else uuids
        self._say({"watched": 0, "unwatched": dict.fromkeys(uuids, str(error))})

    def _wanted(self) -> int:
        nvml = self._nvml
        ecc: int = nvml.nvmlEventTypeDoubleBitEccError | nvml.nvmlEventTypeSingleBitEccError
        return ecc | int(nvml.nvmlEventTypeXidCriticalError)

    def _find_lost(self) -> set[str]:
        """Query each GPU for a value that its hardware must provide; return the lost ones."""
        found = set()
        for uuid, handle in self._handles.items():
            self._say({"asking": uuid})
            try:
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as error:
                if error.value in self._gone:
                    self._lose(uuid, error)
                    found.add(uuid)
        return found

    def _lose(self, uuid: str, error: Exception) -> None:
        self._say({"lost": uuid, "why": str(error)})

    def _tell(self, event: "dict[str, Any] | None") -> None:
        if event is not None:
            self._say(event)

    def _event(self, data: "Any") -> "dict[str, Any] | None":
        """Return an event as a line; None for events other than XIDs."""
        if data.eventType != self._nvml.nvmlEventTypeXidCriticalError:
            return None
        uuid = self._uuid(data.device)
        event = {"xid": int(data.eventData), "gpu": uuid, **self._recovery(data.device, uuid)}
        instances = {"gi": data.gpuInstanceId, "ci": data.computeInstanceId}
        given = {name: number for name, number in instances.items() if number != _NO_INSTANCE}
        return {**event, **given} if "gi" in given else event

    def _recovery(self, handle: "Any", uuid: str) -> dict[str, int]:
        """Return NVML's recovery action for a GPU, {} if NVML or the driver doesn't report it."""
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None or not uuid:
            return {}
        self._say({"asking": uuid})
        try:
            [answer] = self._nvml.nvmlDeviceGetFieldValues(handle, [field])
        except self._nvml.NVMLError:
            return {}
        known = answer.nvmlReturn == self._nvml.NVML_SUCCESS
        return {"recovery": int(answer.value.uiVal)} if known else {}

    def _uuid(self, handle: "Any") -> str:
        """Return the UUID of a handle; a lost GPU may not report its own."""
        import ctypes  # noqa: PLC0415 - pynvml has it

        place = ctypes.cast(handle, ctypes.c_void_p).value
        for uuid, known in self._seen.items():
            if ctypes.cast(known, ctypes.c_void_p).value == place:
                return uuid
        try:
            return nvml.text_of(self._nvml.nvmlDeviceGetUUID(handle))
        except self._nvml.NVMLError:
            return ""
