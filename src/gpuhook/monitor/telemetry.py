"""Queries of a vendor's driver through a child that may hang, with time limits."""

import json
import os
import select
import time
from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError, listed
from gpuhook.monitor import kubelet
from gpuhook.monitor.host.child import Channel, Clock, JsonLineWorker, Work, how_ended

PATIENCE = 4.0  # seconds; Prometheus waits for ten
_SILENCE = 300.0  # seconds for which a device is skipped after the driver hung in it
_MAX_BYTES = 16 << 20  # bytes of one line
_PAIR = 2  # a process id, and what that process uses
_DIGITS = 10  # of a process id
_MOST = 1 << 64  # of any value


class TelemetryWorker(JsonLineWorker):
    """The child of one vendor; ``module`` is the vendor's ``telemetry``.

    A question waits for ``patience`` seconds. ``who`` is the word for the queried program in
    messages.

    ``errors`` counts failures by kind; ``problem`` is the last one, "" if there is none.
    ``xids`` counts errors of devices: (GPU, number) -> how many, the latest number last.
    ``unheard`` says for devices why their errors aren't received; ``note`` is a sentence about it.
    """

    def __init__(
        self,
        module: Any,
        title: str,
        config: Config,
        clock: Clock,
        patience: float = PATIENCE,
        who: str = "driver",
    ) -> None:
        super().__init__(clock, _MAX_BYTES)
        self._who = who
        self._patience = patience
        self._module = module
        self._title = title
        self._config = config
        self._number = 0
        self._ready = False
        self._asking = ""
        self._silent: dict[str, float] = {}
        self._devices: object = None
        self._away = 0.0
        self.errors: Counter[str] = Counter()
        self.xids: dict[tuple[str, int], int] = {}
        self.unheard: dict[str, str] = {}
        self.problem = ""
        self.note = ""

    def ask(
        self, inventory: Any, *, more: bool = False, patience: float | None = None
    ) -> dict[str, Any] | None:
        """Return the child's response, None if there is none in time (``patience``, if given)."""
        if not self._module.can_ask(inventory):
            return None
        self.problem = ""
        self._tend(inventory)
        if not self.pid:
            self.problem = self.problem or f"{self._title}: the {self._who} isn't queried just now"
            return None
        self._number += 1
        self._asking = ""  # protects: innocent-device
        question = json.dumps({"ask": self._number, "more": more}).encode() + b"\n"
        try:
            os.write(self._fd, question)  # never partial, as it is short
        except BlockingIOError:
            self._hangs()  # it has read nothing for a long time
            return None
        except OSError:
            pass  # it has ended, which is handled below
        answer = self._wait(self._clock() + (self._patience if patience is None else patience))
        self.problem = self.problem or self._left_alone(inventory)
        self.note = self._note_on_unheard(inventory)
        return answer

    def _note_on_unheard(self, inventory: Any) -> str:
        by_reason: dict[str, list[str]] = {}
        for each in inventory.devices:
            if each.id in self.unheard:
                by_reason.setdefault(self.unheard[each.id], []).append(each.label)
        said = [f"{listed(labels)} ({why})" for why, labels in by_reason.items()]
        return f"{self._title}: errors (XIDs) aren't counted of {listed(said)}" if said else ""

    def _left_alone(self, inventory: Any) -> str:
        """Return a sentence about devices skipped because the driver hung in them, "" if none."""
        silent = [each.label for each in inventory.devices if each.id in self._silent]
        if not silent:
            return ""
        one = len(silent) == 1
        what = f"device{'' if one else 's'} {listed(silent)} {'is' if one else 'are'} left out"
        return (
            f"{self._title}: {what} for {_SILENCE:.0f} seconds, because the {self._who} hung in "
            f"{'it' if one else 'them'}"
        )

    def facts(self, inventory: Any) -> dict[str, dict[str, Any]]:
        """Return the vendor's own facts about each device, by fields of ``Device``."""
        found: dict[str, dict[str, Any]] = self._module.facts(inventory)
        return found

    def worded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the child's values of a device, with numeric codes replaced by words."""
        return dict(self._module.worded(values))

    def xids_of(self, device: str) -> dict[int, int] | None:
        """Return the count of each error of a device, None if its errors aren't received."""
        found = {xid: count for (each, xid), count in self.xids.items() if each == device}
        return None if device in self.unheard and not found else found

    def _tend(self, inventory: Any) -> None:
        """Start the child if there is none; restart it if the devices have changed."""
        status = self.reap()
        if status is not None:
            while self._has_spoken():  # its last message says why it has ended
                for line in self.lines():
                    self._note(line)
            self._note_loss(how_ended(status))
        now = self._clock()
        forgiven = [uuid for uuid, until in self._silent.items() if now >= until]
        devices = (inventory.root, inventory.version, [each.id for each in inventory.devices])
        if self.pid and (forgiven or devices != self._devices):
            self._stop()
        for uuid in forgiven:
            del self._silent[uuid]
        if self.pid or now < max(self.again or 0.0, self._away):
            return
        try:
            work = self._module.begin(self._config, inventory, self._silent)
        except GpuhookError as error:
            self._fail("failed", str(error))
            self._note_end()
            return
        self._begin(work)
        self._ready, self._asking, self._devices = False, "", devices
        self.unheard = {}

    def _wait(self, deadline: float) -> dict[str, Any] | None:
        while True:
            for line in self.lines():
                if line.get("answer") == self._number:
                    if not _is_sound(line):
                        self._fail(
                            "failed", f"{self._title}: the {self._who} sends an invalid response"
                        )
                        self._give_up()
                        return None
                    for device, why in line.get("failed", {}).items():
                        self._fail("device", f"{self._title}: {device}: {why}")
                    return line
                self._note(line)
            if self._fd < 0:
                self._note_loss(self._how_it_ended())
                return None
            patience = deadline - self._clock()
            if patience <= 0:
                break
            select.select([self._fd], [], [], patience)
        if not self._ready and self._clock() < self._began + self._config.nvml_timeout:
            self.problem = f"{self._title}: the {self._who} isn't ready to answer yet"
            self.errors["starting"] += 1
        else:
            self._hangs()
        return None

    def _note(self, line: dict[str, Any]) -> None:
        if "ready" in line:
            self._ready = True
        elif "asking" in line:
            self._asking = str(line["asking"])
        elif "error" in line:
            self._fail("failed", f"{self._title}: {line['error']}")
        elif isinstance(line.get("unwatched"), dict):
            self.unheard = {device: str(why) for device, why in line["unwatched"].items()}
        elif isinstance(line.get("xid"), int) and isinstance(line.get("gpu"), str):
            key = (line["gpu"], line["xid"])
            self.xids[key] = self.xids.pop(key, 0) + 1

    def _fail(self, kind: str, problem: str) -> None:
        self.errors[kind] += 1
        self.problem = problem

    def _note_loss(self, how: str) -> None:
        """Record that the child has ended on its own."""
        if not self.problem:
            what = f"the process that queries the {self._who} has ended"
            self._fail("ended", f"{self._title}: {what} {how}".rstrip())
        self._close()
        self._note_end()

    def _hangs(self) -> None:
        """Kill a hung child, and skip the device that it hangs in."""
        where = f" in {self._asking}" if self._asking else ""
        self._fail("timeout", f"{self._title}: the {self._who} hangs{where}")
        if self._asking:
            self._silent[self._asking] = self._clock() + _SILENCE
        self._give_up()

    def _stop(self) -> None:
        self._end()
        self.again = 0.0

    def let_go(self, seconds: float = 0.0) -> None:
        """Close the driver for at least ``seconds``."""
        self._silent.clear()
        self._away = self._clock() + seconds
        self._stop()


class FileTelemetry:
    """An adapter for a vendor's ``telemetry`` that reads files: reading a file may hang, too.

    That happens while a GPU is reset or woken, or no longer answers its driver.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def can_ask(self, inventory: Any) -> bool:
        """Tell whether there are devices."""
        return bool(inventory.devices)

    def facts(self, inventory: Any) -> dict[str, dict[str, Any]]:  # noqa: ARG002 - as every vendor's
        """Return the vendor's own facts about each device: none."""
        return {}

    def worded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a device unchanged."""
        return values

    def begin(self, config: Config, inventory: Any, but: Collection[str]) -> Work:  # noqa: ARG002
        """Return the function of a child that answers for all devices ``but`` some."""
        return lambda talk: self._answer_all(inventory, but, talk)

    def _answer_all(self, inventory: Any, but: Collection[str], talk: Channel) -> None:
        kernel.set_name("gpuhook-files")
        talk.say({"ready": 1})

        def asking(device: str) -> bool:
            if device not in but:
                talk.say({"asking": device})
            return device not in but

        for question in talk.asked():
            devices = self._module.read(inventory, asking)
            talk.say({"answer": question["ask"], "devices": devices})


def _is_sound(answer: dict[str, Any]) -> bool:
    """Tell whether a response is valid: a driver's code runs in the child."""
    devices, failed = answer.get("devices", {}), answer.get("failed", {})
    is_whole = isinstance(devices, dict) and isinstance(failed, dict)
    return is_whole and all(isinstance(each, dict) and _is_said(each) for each in devices.values())


def _is_said(values: dict[str, Any]) -> bool:
    """Tell whether the values of one device have the types of ``vendors.nvidia.telemetry``."""
    rest = dict(values)
    processes, sm = rest.pop("processes", []), rest.pop("sm", {})
    readings = rest.pop("readings", {})
    if not (isinstance(processes, list) and isinstance(sm, dict) and isinstance(readings, dict)):
        return False
    pairs = [
        each if isinstance(each, list) and len(each) == _PAIR else ["", ""] for each in processes
    ]
    numbers = [*rest.values(), *sm.values(), *readings.values(), *(pid for pid, _ in pairs)]
    return (
        all(isinstance(each, int | float) and -_MOST <= each <= _MOST for each in numbers)
        and all(used is None or (isinstance(used, int) and used <= _MOST) for _, used in pairs)
        and all(pid.isdecimal() and len(pid) <= _DIGITS for pid in sm)
    )


_KUBELET_PATIENCE = 5.0  # seconds for the start of the child, and for the kubelet's response


def ids_in_use(config: Config, socket: str) -> AbstractSet[str] | None:
    """Return the ids of all devices that pods have, None if the kubelet doesn't answer in time."""
    asking = TelemetryWorker(
        kubelet, "Kubernetes", config, time.monotonic, _KUBELET_PATIENCE, "kubelet"
    )
    try:
        answer = asking.ask(kubelet.KubeletSocket(socket))
    finally:
        asking.let_go()
    if answer is None or "pods" not in answer:
        return None
    return {name for *_, ids in answer["pods"] for _, name in ids}
