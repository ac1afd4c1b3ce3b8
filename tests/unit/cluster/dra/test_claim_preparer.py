"""Refusals of claims by the ledger's content under its lock, without a kubelet."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError
from gpuhook.cluster.dra.claim_preparer import ClaimPreparer
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.monitor.ledger.records import COMPLETED, MPS, STARTED, HeldDevice, OwnerRecord, Records

HELD = HeldDevice(device="gpu-a", vendor="nvidia", unit="GPU-a", whole="GPU-a")
PART = HeldDevice(device="mig-1", vendor="nvidia", unit="MIG-1", whole="GPU-a")


@pytest.mark.protects("dra-not-shared", "DRA: no claim gets a device that MPS shares")
@pytest.mark.parametrize("held", [HELD, PART], ids=["the GPU", "a part of it"])
def test_a_device_shared_by_mps_meanwhile_is_refused_to_a_claim(
    held: HeldDevice, tmp_path: Path
) -> None:
    """MPS gets the device after the service reads the ledger, and before the claim has the lock."""
    tmp_path.chmod(0o755)
    config = Config()
    config.state_dir = str(tmp_path)
    devices: Any = SimpleNamespace(config=config, look=list)
    claims: Any = None
    handing = ClaimPreparer(devices, claims, DraOptions(), lambda: None)
    records = Records(config.state_dir)
    record = OwnerRecord("gpu.nvidia.com", "u-1", "ns", "a", STARTED, records.boot, (held,))
    with records.locked():
        handing._check_free(record)
        records.write(OwnerRecord("", "", "", "", COMPLETED, records.boot, (HELD,), owner=MPS))
        with pytest.raises(RequestError, match="shared by MPS"):
            handing._check_free(record)
