"""Ascend's cases. The second NPU is divided into two vNPUs."""

from sample import Claim, Order, Sample, changed, numbers

from gpuhook.vendors.ascend.model import CLASS, DRIVER, LISTS, VERSION

_NPU = "/sys/devices/pci0000:00/0000:01:00.0"
_TWELVE = tuple(each for each in numbers(12) if each != "3")

SAMPLE = Sample(
    count=4,
    settings={"vnpus": "116,117"},
    named=(
        ("0", "0"),
        ("2 - 3, 0,2", "2 3 0"),
        ("npu-2,0", "2 0"),
        ("ascend910-3", "3"),
        ("0000:03:00.0", "2"),
        ("117", "117"),
        ("vnpu-116", "116"),
        ("all", "0 2 3 116 117"),
        ("ALL", "0 2 3 116 117"),
        ("ascend.com/npu=vnpu117", "117"),
        ("none", ""),
    ),
    unknown=("9", "npu-0-3"),
    it_has=r"no NPU or vNPU .* it has 0 \(npu-0\)",
    changes=(
        lambda made: made.node("/dev/uburma/ub7", 9, 9),
        lambda made: made.node("/dev/davinci9", 9, 9),
        changed(f"{LISTS}/new.list", "/opt\n"),
        changed(VERSION, "Version=25\n"),
        changed(f"{DRIVER}/lib64/driver/libnew.so", ""),
        changed(f"{CLASS}/vdavinci100/dev", "1:1\n"),
        changed(f"{CLASS}/davinci0/dev", "9:9\n"),
        changed(f"{_NPU}/dev_id", "1\n"),
        changed(f"{_NPU}/devdrv_sysfs_bdf_to_devid", "01:00.0 1 0\n02:00.0 0 0\n"),
    ),
    node="/dev/davinci1",
    other_numbers="has the numbers 9:9, but its driver's are ",
    without_node=({"missing": "davinci1"}, "/dev/davinci1"),
    orders=(
        Order(
            count=0,
            settings={"numbers": ",".join(reversed(_TWELVE))},
            labels=_TWELVE,
            last=("/dev/davinci11",),
        ),
        # Only the sysfs class shows the numbers of these devices.
        Order(
            count=11,
            settings={"pci": "no", "chip": "310B"},
            labels=numbers(11),
            last=("/dev/davinci10",),
        ),
    ),
    saved={"vnpus": "116,117"},
    refused=({"chip": "9"}, "'9' isn't an Ascend chip"),
    has_hooks=True,  # hooks that update the loader's cache
    imported=frozenset({"names", "variables", "model", "vendor"}),
    claim=Claim(
        driver="ascend.com",
        device="npu-0000-01-00-0",
        expression='device.attributes["ascend.com"].type == "npu" && '
        'device.attributes["ascend.com"].model.startsWith("Ascend")',
        resource="huawei.com/Ascend910",
    ),
    spelled=r"ASCEND_|davinci|devdrv|ascend\.com",
)
