"""The sample of ACME, whose second NPU is split in two."""

from sample import Claim, Order, Sample, changed, created, numbers

from gpuhook.vendors.acme.vendor import CLASS

SAMPLE = Sample(
    count=3,
    settings={"split": 1},
    named=(
        ("0", "0"),
        ("2,0,2", "2 0"),
        ("0-2", "0 1 2"),
        ("a-0002", "2"),
        ("42:00.0", "1"),
        ("1.0", "1.0"),
        ("ACME_VISIBLE_BOARDS=B0", "0 1 1.0 1.1 2"),
        ("acme.example/npu=part1.1", "1.1"),
        ("none", ""),
    ),
    unknown=("3", "acme0", "B1", "1.2"),
    it_has=r"no NPU or part of one .* it has 0 \(A-0000\), 1 \(A-0001\)",
    nothing=("", "void"),
    changes=(
        changed(f"{CLASS}/acme1/state", "in reset\n"),
        created(f"{CLASS}/acme1.0"),
    ),
    node="/dev/acme1",
    other_numbers="has the numbers 9:9, but its driver's are ",
    orders=(
        Order(
            count=12,
            settings={},
            labels=numbers(12),
            last=("/dev/acme11", "/dev/acme_dma11"),
        ),
    ),
    saved={"split": 1, "reset": 2},
    on_pci=False,  # the simulator creates no PCI bus
    claim=Claim(
        driver="acme.example",
        device="npu-a-0000",
        expression='device.attributes["acme.example"].type == "npu"',
        resource="acme.example/npu",
    ),
    spelled=r"ACME_|/dev/acme|acme\.example",
    in_order="ACME's driver 7.1 has 4 devices",
    findings=(({"reset": 1}, "warning", "NPU 1 (A-0001) can't be used: it is in reset"),),
)
