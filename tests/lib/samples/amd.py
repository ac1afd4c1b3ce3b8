"""AMD's cases. The second GPU is divided into four parts with one id."""

from sample import Claim, Sample, changed

from gpuhook.vendors.amd.vendor import TOPOLOGY

SAMPLE = Sample(
    count=3,
    settings={"split": 1, "partitions": 4, "ids": "shared"},
    named=(
        ("0", "0"),
        ("5,0,5", "5 0"),
        ("0-2,1", "0 1 2"),
        ("0x84cafeae17e7620", "5"),
        ("84CAFEAE17E7620", "5"),
        ("0X084cafeae17e7620", "5"),
        ("0x84cafeae17e7610", "1 2 3 4"),
        ("0x84cafeae17e7610:2", "3"),
        ("2,0x84cafeae17e7610", "2 1 3 4"),
        ("0000:0b:00.0", "5"),
        ("08:00.0", "1 2 3 4"),
        ("ALL", "0 1 2 3 4 5"),
        (" 0 , 2,0 ", "0 2"),
        ("0,ALL", "0 1 2 3 4 5"),
        ("None", ""),
        ("amd.com/gpu=0", "0"),
    ),
    unknown=("6", "4-6", "0x84cafeae17e76", "card0", "0000:0c:00.0", "-1"),
    it_has=r"This host has no AMD GPU .* it has 0 \(0x84cafeae17e7600\), 1 \(0x84c.*10:0\)",
    nothing=(
        "0,Void",
        "",
        " , ",
        "ROCR_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=0 GPU=0",
        "AMD_VISIBLE_DEVICES_X=0 DOCKER_RESOURCE_GPU=0x1",
    ),
    changes=(changed(f"{TOPOLOGY}/generation_id", "3\n"),),
    node="/dev/dri/card1",
    other_numbers="is another device's node (9:9, not ",
    saved={"model": "AMD Instinct MI308X"},
    claim=Claim(
        driver="gpu.amd.com",
        device="gpu-0x84cafeae17e7600",
        expression='device.attributes["gpu.amd.com"].type == "amdgpu" && '
        'device.attributes["gpu.amd.com"].driverVersion.compareTo(semver("6.0.0")) > 0 && '
        'device.capacity["gpu.amd.com"].memory.compareTo(quantity("100Gi")) >= 0 && '
        'device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:00"',
        resource="amd.com/gpu",
    ),
    spelled=r"AMD_|/dev/kfd|amdgpu|amd\.com",
)
