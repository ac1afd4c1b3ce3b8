"""Intel NPUs' cases. Their device nodes are in the same folder as other vendors' nodes."""

from sample import Claim, Order, Sample, created, numbers, removed

from gpuhook.vendors.intel_npu.discover import DRIVER
from gpuhook.vendors.sysfs_devices import driver_folder

_FIRST = f"{driver_folder(DRIVER)}/0000:00:0b.0"

SAMPLE = Sample(
    count=3,
    named=(
        ("0", "0"),
        ("1-2,0", "1 2 0"),
        ("accel2", "2"),
        ("01:0b.0", "1"),
        ("all", "0 1 2"),
        ("intel.com/npu=0", "0"),
        ("intel.com/npu=npu1", "1"),
    ),
    unknown=("3", "card0"),
    it_has=r"no NPU .* it has 0 \(accel0\)",
    changes=(
        removed(_FIRST),
        created(f"{_FIRST}/accel/accel9"),
        removed("/dev/accel/accel0"),
    ),
    node="/dev/accel/accel1",
    other_numbers="has the numbers 9:9, but its driver's are ",
    without_node=({"no_node": 1}, "/dev/accel/accel1"),
    orders=(
        Order(
            count=12,
            settings={"first": 1, "decoy": "yes"},
            labels=numbers(13)[1:],
            last=("/dev/accel/accel12",),
        ),
    ),
    claim=Claim(
        driver="intel.com",
        device="npu-0000-00-0b-0",
        expression='device.attributes["intel.com"].type == "npu"',
        resource="npu.intel.com/accel",
    ),
    spelled=r"INTEL_VISIBLE_NPUS|intel_vpu|intel\.com/npu",
    spelled_in=("vendors/gaudi.py",),  # it simulates a device of the driver intel_vpu, too
    in_order="The driver intel_vpu has 4 NPUs",
    findings=(({"no_node": 0}, "failure", "Intel NPU's driver has no node /dev/accel/accel0"),),
)
