"""Neuron's cases. The devices have numbers and serial numbers, and no PCI addresses."""

from sample import Claim, Order, Sample, changed, created, numbers

from gpuhook.vendors.neuron.vendor import CLASS

_ALL = " ".join(numbers(16))

SAMPLE = Sample(
    count=16,
    named=(
        ("all", _ALL),
        ("All", _ALL),
        ("none", ""),
        ("2-4", "2 3 4"),
        (" 3 , 2,,3 ", "3 2"),
        ("9-11", "9 10 11"),
        ("00a1b2c3d4e5000b", "11"),
        ("aws.amazon.com/neuron=2,aws.amazon.com/neuron=3", "2 3"),
        ("aws.amazon.com/neuron=neuron2", "2"),
        ("aws.amazon.com/neuron=all", _ALL),
    ),
    unknown=("16", "0-16", "neuron0", "/dev/neuron0", "1.0", "-1"),
    it_has=r"no Neuron device .* it has 0 \(00a1b2c3d4e50000\), 1 \(00a1b2c3d4e50001\)",
    nothing=("", "void", "VOID", " , "),
    changes=(
        changed(f"{CLASS}/neuron0/dev", "9:9\n"),
        created(f"{CLASS}/neuron2"),
        changed(f"{CLASS}/neuron0/info/serial_number", "00a1b2c3d4e50001\n"),
    ),
    node="/dev/neuron1",
    other_numbers="is another device (the driver's is ",
    without_node=({"no_node": 1}, "/dev/neuron1"),
    orders=(
        Order(
            count=12,
            settings={"gap": 3},
            labels=tuple(each for each in numbers(12) if each != "3"),
            last=("/dev/neuron11",),
        ),
    ),
    saved={"half_made": 1},
    refused=({"family": "Trn9"}, "no family 'Trn9'"),
    on_pci=False,
    claim=Claim(
        driver="neuron.aws.com",
        device="neuron-00a1b2c3d4e50000",
        expression='device.driver == "neuron.aws.com" && '
        'device.attributes["neuron.aws.com"].deviceId < 4 && '
        'device.attributes["neuron.aws.com"].neuronDriverVersion != ""',
        resource="aws.amazon.com/neuron",
    ),
    spelled=r"NEURON_|/dev/neuron|neuron_device|aws\.amazon",
    in_order="AWS Neuron's driver 2.24.7.0 has 4 devices",
    findings=(
        ({"half_made": 1}, "warning", "Neuron device 1 (neuron1) can't be used: "),
        (
            {"no_node": "1,2"},
            "failure",
            "AWS Neuron's driver has no node /dev/neuron1, /dev/neuron2",
        ),
        ({"gap": "1,2"}, "warning", "There is no Neuron device 1-2: no container gets"),
    ),
)
