"""Intel GPUs' cases. The third GPU has two virtual functions."""

import shutil

from sample import Claim, Order, Sample, created, numbers, removed

from gpuhook.vendors.sysfs_devices import driver_folder

SAMPLE = Sample(
    count=3,
    settings={"cards": 1, "vfs": 2, "vm": 2},
    named=(
        ("0", "0"),
        ("0 - 1, 1", "0 1"),
        ("card3", "2"),
        ("2.1", "2.1"),
        ("0000-04-00-0-0x56c0", "1"),
        ("04:00.0", "1"),
        ("all", "0 1 2 2.0 2.1"),
        ("intel.com/gpu=card2", "1"),
        ("intel.com/gpu=gpu0", "0"),
        ("intel.com/gpu=vf2.0", "2.0"),
        ("none", ""),
    ),
    unknown=("3", "card0", "card", "2.2", "renderD129", "0000:06:00.0"),
    it_has=r"it has 0 \(card1\), 1 \(card2\), 2 \(card3\)",
    changes=(
        removed(f"{driver_folder('i915')}/0000:04:00.0"),
        created("/sys/devices/pci0000:00/0000:03:00.0/drm/card7"),
        created(driver_folder("xe")),
        lambda made: shutil.rmtree(made.place / "dev/dri"),
    ),
    node="/dev/dri/renderD129",
    other_numbers="has the numbers 9:9, but its driver's are ",
    without_node=({"no_node": 1}, "/dev/dri/card1"),
    orders=(
        Order(
            count=20,
            settings={"driver": "xe"},
            labels=numbers(20),
            last=("/dev/dri/card19", "/dev/dri/renderD147"),
        ),
    ),
    saved={"cards": 1, "vfs": 2, "vm": 2},
    refused=({"driver": "nouveau"}, "isn't a driver of"),
    has_hooks=True,  # for links
    claim=Claim(
        driver="gpu.intel.com",
        device="0000-03-00-0-0x56c0",
        expression='device.attributes["gpu.intel.com"].family == "Data Center Flex" && '
        'device.attributes["gpu.intel.com"].model == "Flex 170" && '
        'device.attributes["gpu.intel.com"].driver == "i915" && '
        '!device.attributes["gpu.intel.com"].sriov',
        resource="gpu.intel.com/i915",
    ),
    spelled=r"INTEL_VISIBLE_DEVICES|i915|intel\.com/gpu",
    in_order="Intel's driver i915 has 4 GPUs",
    findings=(
        (
            {"no_node": 0},
            "failure",
            "Intel's driver has no node /dev/dri/card0, /dev/dri/renderD128",
        ),
    ),
)
