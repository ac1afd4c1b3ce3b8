"""Ledger record of the devices that ``gpuhook mps`` shares, and their compute modes.

In the mode EXCLUSIVE_PROCESS, a program that bypasses MPS can't use the GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, RequestError
from gpuhook.monitor.ledger.records import (
    CLAIM,
    COMPLETED,
    MPS,
    POD,
    ChangedSetting,
    HeldDevice,
    Ids,
    OwnerRecord,
    Records,
    first_busy,
    in_the_way,
    now,
)
from gpuhook.monitor.ledger.settings import SettingsLedger
from gpuhook.monitor.vendors.nvidia.settings import MODE
from gpuhook.vendors.nvidia import mps
from gpuhook.vendors.nvidia import names as nvidia

DEFAULT, EXCLUSIVE_PROCESS = 0, 3  # nvmlComputeMode_t in nvml.h
_WANTED = {MODE: EXCLUSIVE_PROCESS}


class MpsDevices:
    """The record of ``gpuhook mps``; ``inventory`` returns NVIDIA's inventory.

    ``in_use`` returns the ids of all devices that pods have by the kubelet.
    """

    def __init__(self, config: Config, inventory: Callable[[], Any], in_use: Ids) -> None:
        self._in_use = in_use
        self._records = Records(config.state_dir)
        self._settings = SettingsLedger(config, lambda _: inventory())

    def check(self, devices: Sequence[mps.SharedDevice]) -> None:
        """Raise RequestError if a claim or a pod of the device plugin has one of these devices."""
        with self._records.locked():
            self._check(_held(devices))

    def hold(self, devices: Sequence[mps.SharedDevice]) -> None:
        """Record these devices, set their compute mode, and restore that of dropped devices.

        RequestError as in ``check``; DriverError if a mode can't be set.
        """
        held = _held(devices)
        with self._records.locked():
            self._check(held)
            record = self._records.mps() or self._new()
            wanted = {each.uuid: _WANTED for each in devices}
            settings = self._settings.planned(nvidia.NAME, wanted, record.settings)
            dropped = tuple(each for each in record.settings if each.device not in wanted)
            record = replace(record, devices=held, settings=(*settings, *dropped))
            self._records.write(record)  # protects: mps-mode-written
            self._settings.apply(settings)
            if dropped:
                self._put_back(record, dropped, settings)

    def are_held(self) -> bool:
        """Return whether there is a record of shared devices."""
        return self._records.mps() is not None or self.are_unknown()

    def are_unknown(self) -> bool:
        """Return whether the record is unreadable, so that the original modes are unknown."""
        return self._records.is_mps_unknown()

    def release(self) -> None:
        """Restore the compute modes and remove the record; DriverError on failure."""
        with self._records.locked():
            record = self._records.mps()
            if record is not None and record.settings:
                self._put_back(record, record.settings)
            self._records.forget(self._new().key)

    def _check(self, held: tuple[HeldDevice, ...]) -> None:
        # The original mode is only in the record: the driver would report the mode set by MPS.
        self._records.check_readable(owners=(CLAIM, MPS))  # protects: mps-unreadable
        current = self._records.current()
        claims = [each for each in current if each.owner == CLAIM]
        for ours, _, record in in_the_way(held, claims):  # protects: mps-not-a-claims
            raise RequestError(
                f"GPU {ours.device} is {record}'s, so MPS can't share it",
                "Wait until that claim's pods have ended, or leave the GPU out of [gpuhook.mps]",
            )
        pods = [each for each in current if each.owner == POD]
        self._check_pods(in_the_way(held, pods))

    def _check_pods(self, taken: Sequence[tuple[HeldDevice, HeldDevice, OwnerRecord]]) -> None:
        """Raise RequestError if a pod has one of these devices, and not as a client of MPS.

        Devices that no pod has any more are freed.
        """
        others = [each for each in taken if each[1].share != MPS]  # protects: mps-clients-stay
        busy = first_busy(others, self._in_use)
        if busy is not None:  # protects: mps-not-a-pods
            raise RequestError(
                f"GPU {busy.ours.device} is allocated to {busy.record} by gpuhook device-plugin"
                f"{busy.doubt}, so MPS can't share it",
                "Wait until that pod has ended, or leave the GPU out of [gpuhook.mps]",
            )
        for _, _, record in others:
            self._records.forget(record.key)

    def _put_back(
        self,
        record: OwnerRecord,
        settings: Sequence[ChangedSetting],
        kept: Sequence[ChangedSetting] = (),
    ) -> None:
        """Restore settings; record those that can't be restored, and raise DriverError for them."""
        failures = self._settings.restore(settings)
        left = tuple(setting for setting, _ in failures)
        self._records.write(replace(record, settings=(*kept, *left)))
        if failures:
            raise DriverError(failures[0][1].cause, failures[0][1].remedy)

    def _new(self) -> OwnerRecord:
        return OwnerRecord("", "", "", "", COMPLETED, self._records.boot, at=now(), owner=MPS)


def _held(devices: Sequence[mps.SharedDevice]) -> tuple[HeldDevice, ...]:
    return tuple(
        HeldDevice(device=str(each.index), vendor=nvidia.NAME, unit=each.uuid, whole=each.uuid)
        for each in devices
    )
