"""Gaudi's cases. The devices have the seats 3 2 1 0 7 6 5 4."""

from sample import Claim, Order, Sample, changed, created, numbers, removed

from gpuhook.vendors.gaudi.names import VARIABLES
from gpuhook.vendors.gaudi.vendor import DRIVER

_DEVICES, _MODULES, _BUS_IDS = VARIABLES
_SECOND = f"{DRIVER}/0000:1a:00.0"
_ALL = " ".join(numbers(8))

SAMPLE = Sample(
    count=8,
    named=(
        ("ALL", _ALL),
        ("none", ""),
        ("4-6, 1 ,,4", "4 5 6 1"),
        ("0000:19:00.0,1A:00.0", "0 1"),
        (f"{_MODULES}=0", "3"),
        (f"{_MODULES}=0-3", "3 2 1 0"),
        (f"{_MODULES}=7,6", "4 5"),
        (f"{_BUS_IDS}=0000:20:00.0", "7"),
        (f"{_DEVICES}=all {_MODULES}=0,1", "3 2"),
        (f"{_DEVICES}=all {_MODULES}=all {_BUS_IDS}=19:00.0", "0"),
        (f"{_DEVICES}=all {_MODULES}= {_BUS_IDS}=", _ALL),
        (f"{_DEVICES}=2 {_MODULES}=0", "2"),
        (f"{_DEVICES}=0 {_DEVICES}=1", "1"),
        ("habana.ai/gaudi=2", "2"),
        ("habana.ai/gaudi=accel2", "2"),
        ("habana.ai/gaudi=0000:1b:00.0", "2"),
    ),
    unknown=(
        "8",
        "accel0",
        "0-8",
        f"{_MODULES}=8",
        f"{_MODULES}=0000:19:00.0",
        f"{_BUS_IDS}=0",
        "habana.ai/gaudi=8",
    ),
    it_has=r"no Gaudi .* it has 0(000:19:00\.0| \(0000:19:00\.0\)|, 1, 2, 3 and 4 more\. )",
    nothing=(
        "",
        "void",
        f"{_MODULES}=Void",
        f"{_DEVICES}=all {_MODULES}=void",
        f"{_DEVICES}X=0",
        "VISIBLE",
    ),
    changes=(
        changed(f"{_SECOND}/status", "In reset\n"),
        created(f"{_SECOND}/accel/accel7"),
        created(f"{_SECOND}/infiniband_verbs/uverbs7"),
        created(f"{_SECOND}/net/ens1"),
        removed(_SECOND),
    ),
    node="/dev/accel/accel1",
    other_numbers="is another device (the driver's is ",
    without_node=({"no_node": 1}, "/dev/accel/accel1, /dev/accel/accel_controlD1"),
    orders=(
        Order(
            count=12,
            settings={"gap": 3},
            labels=tuple(each for each in numbers(12) if each != "3"),
            last=("/dev/accel/accel11", "/dev/accel/accel_controlD11", "/dev/infiniband/uverbs11"),
        ),
    ),
    saved={"net": 1, "reset": 2},
    refused=({"type": "GAUDI9"}, "no type 'GAUDI9'"),
    claim=Claim(
        driver="gaudi.intel.com",
        device="0000-19-00-0-0x1020",
        expression='device.attributes["gaudi.intel.com"].model == "Gaudi2" && '
        'device.attributes["gaudi.intel.com"].healthy',
        resource="habana.ai/gaudi",
    ),
    spelled=r"HABANA_|habanalabs|habana\.ai",
    in_order="Intel Gaudi's driver 1.24.0 has 4 devices",
    findings=(
        ({"reset": 1}, "warning", "Gaudi 1 (0000:1a:00.0) can't be used: its status is In reset"),
        ({"no_node": 1}, "failure", "Intel Gaudi's driver has no node /dev/accel/accel1, "),
        ({"no_module": "0,2"}, "warning", "The module id of Gaudi 0, 2 is unknown"),
        ({"net": "0,1"}, "note", "The network ports of Gaudi 0, 1 are moved into no container"),
    ),
)
