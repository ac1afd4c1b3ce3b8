"""Costs of an image's requests: start time and memory grow only in proportion to their length.

The tests fill each variable and annotation that holds a list, for each vendor, with difficult
pieces. Linux allows 128 KiB in one variable: one length is an eighth of that, one all of it.
"""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

import declared_vendors
import machines
import paper
import pytest
import steps
from yardstick import of_this_process

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError, RequestError
from gpuhook.base.oci.spec import Spec
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.vendors import registry

LENGTH = 1 << 14
TIMES = 8
BYTES = 1 << 20  # most bytes for a list of LENGTH // 4; measured: less than half of it
SECONDS = 1.0  # processor seconds for a list of LENGTH * TIMES; measured: at most a third
GROWTH = 24  # most times as long for TIMES the length; linear growth is 8, quadratic 64
SURELY = 0.1  # seconds; below it, growth is too small to measure
FILLING = 0.02  # seconds; a faster start can't fill so much memory, so it isn't measured
LONGEST_ERROR = 1500  # characters

DECLARED = """
[[gpuhook.vendors]]
name = "maker"
noun = "NPU"
kind = "maker.com/npu"
variable = "MAKER_VISIBLE_DEVICES"
present = "/proc/driver/maker"
nodes = ["/dev/maker{n}"]
environment = ["MAKER_NUMBERS={n}"]
"""
Inventories = dict[str, Inventory]
Piece = Callable[[int], str]


def letters_of_either_case(word: str, number: int) -> str:
    """Return the word in an upper and lower case spelling that depends on the number."""
    found = []
    for char in word:
        odd = number % 2 if char.isalpha() else 0
        number //= 2 if char.isalpha() else 1
        found.append(char.upper() if odd else char.lower())
    return "".join(found)


# Functions that return a piece of a list, by the piece's number.
SHAPES: dict[str, Piece] = {
    "nothing": lambda _: "",
    "blanks": lambda number: " " * (number % 7),
    "the same": lambda _: "0",
    "short names": lambda number: chr(97 + number % 26),
    "many names": lambda number: f"x{number:06}",
    "zeros": lambda number: "0" * (1 + number % 9),
    "huge numbers": lambda number: str(number % 9 + 1) * 4000,
    "one number": lambda number: "9" * (0 if number else LENGTH),
    "one name": lambda number: "x" * (0 if number else LENGTH),
    "the same range": lambda _: "0-1023",
    "ranges that overlap": lambda number: f"{number}-{number + 1023}",
    "ranges from 0 on": lambda number: f"0-{number}",
    "ranges of 4,000": lambda number: f"{number % 90}-{4095 - number // 90}",
    "ranges with zeros": lambda number: (
        f"{number % 4:0{1 + number // 4 % 9}}-{3:0{1 + number // 36 % 9}}"
    ),
    "huge ranges": lambda number: f"{number}-999999999",
    "endless ranges": lambda number: f"{number}-" + "9" * 30,
    "dashes": lambda number: "-" * (1 + number % 9),
    "sizes": lambda number: f"all={number + 1}KiB",
    "sizes of one": lambda number: f"{number % 8}={number + 1}KiB",
    "versions": lambda number: f"cuda>=1.{number}",
    "versions of all": lambda number: f"arch>=1.{number},brand!=x{number}",
    "ways": lambda number: f"cuda>=99.{number} ",
    "words in a word": lambda number: "comput utilityy " * (1 + number % 9),
    "CDI names": lambda number: f"nvidia.com/gpu=a{number:06}",
    "CDI names of two": lambda number: f"{'amd' if number % 2 else 'intel'}.com/gpu=a{number}",
    "automatic names": lambda number: f"runtime.nvidia.com/gpu=a{number:06}",
    "names of many": lambda number: f"vendor{number}.com/gpu=0",
}


def written(folder: Path, env: list[str], **more: object) -> Spec:
    return Spec(str(folder / "config.json"), json.dumps(paper.spec_with(*env, **more)))


@dataclass
class Field:
    """The place of a text in a request, with the other entries and settings that it needs.

    ``vendor`` is the only vendor whose devices it names.
    """

    variable: str = ""
    annotation: str = ""
    vendor: str = ""
    before: tuple[str, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)

    def spec(self, text: str, folder: Path) -> Spec:
        env = [*self.before, *([f"{self.variable}={text}"] if self.variable else [])]
        annotations = {self.annotation: text} if self.annotation else {}
        return written(folder, env, annotations=annotations)


ASKS = ("ASCEND_VISIBLE_DEVICES", "MAKER_VISIBLE_DEVICES")
GPU, NPU = "NVIDIA_VISIBLE_DEVICES=all", "ASCEND_VISIBLE_DEVICES=0"
HEARD: dict[str, object] = {"accept_annotations": True}
FIELDS = {
    **{
        name: Field(name, vendor=names.NAME)
        for names in registry.BUILT_IN.values()
        for name in names.VARIABLES
    },
    "of a declared vendor": Field("MAKER_VISIBLE_DEVICES", vendor="maker"),
    "vNPUs": Field("ASCEND_VISIBLE_DEVICES", before=("ASCEND_RUNTIME_OPTIONS=VIRTUAL",)),
    "in mode cdi": Field("NVIDIA_VISIBLE_DEVICES", settings={"mode": "cdi"}),
    "of AMD in mode cdi": Field("AMD_VISIBLE_DEVICES", settings={"mode": "cdi"}),
    "of a swarm": Field("SWARM", settings={"swarm_resource": "SWARM,amd=SWARM"}),
    "annotation": Field(annotation="cdi.k8s.io/a", settings=HEARD),
    "annotation in mode cdi": Field(annotation="cdi.k8s.io/a", settings={"mode": "cdi"}),
    "annotation in mode auto": Field(
        annotation="cdi.k8s.io/a", settings={**HEARD, "mode": "auto"}
    ),
    "annotation of memory": Field(annotation="gpuhook.io/device-memory", before=(GPU,)),
    "requirements of none": Field("NVIDIA_REQUIRE_CUDA"),
    "cores": Field("NEURON_RT_VISIBLE_CORES", before=("AWS_NEURON_VISIBLE_DEVICES=0",)),
    "old images": Field("CUDA_VERSION"),
    **{
        name: Field(name, before=(GPU,))
        for name in (
            "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_IMEX_CHANNELS", "NVIDIA_REQUIRE_CUDA",
            "NVIDIA_REQUIRE_OTHER", "NVIDIA_REQUIRE_JETPACK", "NVIDIA_DISABLE_REQUIRE",
            "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_GDS",
            "CUDA_VERSION", "GPUHOOK_DEVICE_MEMORY",
        )
    },
    **{
        name: Field(name, before=(NPU,))
        for name in (
            "ASCEND_RUNTIME_OPTIONS", "ASCEND_RUNTIME_MOUNTS", "ASCEND_VNPU_SPECS",
            "DISABLE_UB_MOUNT", "MOUNT_BY_RUNTIME_FOR_DP",
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Inventories]:
    """A host with devices of every vendor, and a configuration that declares a vendor."""
    place = tmp_path_factory.mktemp("machine")
    config = loads(DECLARED)
    config.state_dir = str(place / "state")
    config.cdi_spec_dirs = (str(place / "cdi"),)
    found: Inventories = {
        vendor: paper.machine(vendor, place / vendor, 16)
        for vendor in registry.BUILT_IN
        if vendor not in ("nvidia", "ascend")
    }
    found["ascend"] = paper.machine("ascend", place / "ascend", 16, vnpus="116,117")
    gpus = [machines.gpu(i, i) for i in range(7)]
    split = machines.gpu(7, 7, tuple(machines.mig(i, i, 12, 13) for i in range(7)))
    found["nvidia"] = machines.machine(*gpus, split)
    nodes = declared_vendors.simulated(place / "maker", config, "maker", 16).nodes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DeviceNode, "of", lambda path, status, *_: nodes.get(path) if status else None
        )
        found["maker"] = declared_vendors.looked_at(place / "maker", config, "maker")
    programs = place / "bin"
    programs.mkdir()
    (programs / "gpuhook-prestart").touch(mode=0o755)
    return config, found


def folder_of(config: Config) -> Path:
    return Path(config.state_dir).parent


def create(spec: Spec, there: tuple[Config, Inventories]) -> None:
    """Edit config.json as gpu-py's create does."""
    config, inventories = there
    said = ""
    try:
        steps.edit(spec, config, str(folder_of(config) / "bin"), inventories=inventories)
    except GpuhookError as error:
        said = str(error)
    assert len(said) < LONGEST_ERROR


def shapes(inventory: Inventory | None) -> dict[str, Piece]:
    """Return the shapes; if the inventory is known, add spellings of a device name."""
    if inventory is None:
        return SHAPES
    word = max((each.id for each in inventory.devices), key=len)
    return {**SHAPES, "cases": lambda number: letters_of_either_case(word, number)}


@cache
def filled(piece: Piece, length: int) -> str:
    """Return a comma-separated list of pieces with this length."""
    parts: list[str] = []
    left = length
    for number in count():
        if left <= 0:
            break
        parts.append(piece(number))
        left -= len(parts[-1]) + 1
    return ",".join(parts)[:length]


def most_bytes(work: Callable[[str], None], text: str) -> int:
    tracemalloc.start()
    try:
        work(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def time_of(call: Callable[[], None], most: float) -> float:
    """Return a call's time, or the least of three if it reaches ``most``.

    Other work on the host disturbs some of many calls.
    """
    took = of_this_process(call)
    return took if took < most else min(took, of_this_process(call), of_this_process(call))


def check(start: Callable[[str], None], piece: Piece, what: str) -> None:
    """Check that a start's cost is in proportion to the length of a list of such pieces."""
    shortest, short, long = (filled(piece, n) for n in (LENGTH // 4, LENGTH, LENGTH * TIMES))
    took = time_of(lambda: start(long), SECONDS)
    assert took < SECONDS, f"{what}: {took:.2f} s"
    if took > FILLING:
        memory = most_bytes(start, shortest)
        assert memory < BYTES, f"{what}: {memory >> 10} KiB"
    if took > SURELY:
        most = GROWTH * of_this_process(lambda: start(short))
        took = took if took < most else time_of(lambda: start(long), most)
        assert took < most, f"{what}: {took:.2f} s, and {most:.2f} s would grow with the length"


@pytest.mark.parametrize("name", FIELDS)
def test_request_cost_grows_only_with_its_length(
    name: str, there: tuple[Config, Inventories], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, inventories = there
    where = FIELDS[name]
    for key, value in where.settings.items():
        monkeypatch.setattr(config, key, value)

    def start(text: str) -> None:
        create(where.spec(text, folder_of(config)), there)

    start("0")  # one-time imports must not be measured
    for shape, piece in shapes(inventories.get(where.vendor)).items():
        check(start, piece, shape)


# Functions that return an entry of a list in config.json itself, by the entry's number.
ENTRIES: dict[str, Piece] = {
    "requirements": lambda number: f"NVIDIA_REQUIRE_{number}=cuda>=1.{number}",
    "requests": lambda number: f"NVIDIA_VISIBLE_DEVICES={number % 8}",
    "what is replaced": lambda _: "ASCEND_DOCKER_RUNTIME=x",
    "what a declared vendor replaces": lambda _: "MAKER_NUMBERS=x",
    "sizes": lambda number: f"GPUHOOK_DEVICE_MEMORY={number}KiB",
    "names alone": lambda number: f"X{number}",
}
FOLDER = "/var/run/nvidia-container-devices"
MOUNTS: dict[str, Piece] = {
    "devices": lambda number: f"{FOLDER}/{number}",
    "channels": lambda number: f"{FOLDER}/imex/{number}",
    "CDI devices": lambda number: f"{FOLDER}/cdi/nvidia.com/gpu/{number}",
    "what can't be read": lambda number: f"{FOLDER}/cdi/{number}",
    "deep": lambda number: f"{FOLDER}{'/..' * number}",
}


@pytest.mark.parametrize("name", ENTRIES)
def test_many_variables_cost_only_linear_time_and_memory(
    name: str, there: tuple[Config, Inventories]
) -> None:
    asked = [f"{variable}=0" for variable in ("NVIDIA_VISIBLE_DEVICES", *ASKS)]

    def start(text: str) -> None:
        create(written(folder_of(there[0]), [*asked, *text.split(",")]), there)

    start("X=1")
    check(start, ENTRIES[name], name)


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("name", MOUNTS)
def test_many_mounts_cost_only_linear_time_and_memory(
    name: str, heard: bool, there: tuple[Config, Inventories], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(there[0], "accept_volume_mounts", heard)

    def start(text: str) -> None:
        mounts = [{"source": "/dev/null", "destination": each} for each in text.split(",")]
        create(written(folder_of(there[0]), [], mounts=mounts), there)

    start(f"{FOLDER}/0")
    check(start, MOUNTS[name], name)


@pytest.mark.protects(
    "most-names",
    "a request can't name more devices than any machine has",
    only="machine_has and devices",
)
@pytest.mark.protects(
    "most-vnpus",
    "a request can't contain more vNPUs by ranges than any machine has",
    only="machine_has and vNPUs",
)
@pytest.mark.protects(
    "most-lists",
    "a request can't name more file lists than any machine has",
    only="machine_has and lists",
)
@pytest.mark.protects(
    "most-sizes",
    "a setting can't contain more memory sizes than any machine has devices",
    only="machine_has and sizes",
)
@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["NVIDIA_VISIBLE_DEVICES={}"], "names 5000 NVIDIA devices; the maximum is 4096"),
        (
            ["ASCEND_VISIBLE_DEVICES=0-1023,1-1024,2-1025,3-1026,4-1027", "{VIRTUAL}"],
            "more than 4096 vNPUs by ranges of numbers",
        ),
        (
            ["ASCEND_VISIBLE_DEVICES=0-999999999", "{VIRTUAL}"],
            "more than 4096 vNPUs by ranges of numbers",
        ),
        (
            ["ASCEND_VISIBLE_DEVICES=0", "ASCEND_RUNTIME_MOUNTS={}"],
            "names 5000 lists of files; the maximum is 64",
        ),
        (
            ["NVIDIA_VISIBLE_DEVICES=0", "GPUHOOK_DEVICE_MEMORY={sizes}"],
            "has 5000 memory sizes; the maximum is 1024",
        ),
    ],
)
def test_more_than_any_machine_has(
    entries: list[str], words: str, there: tuple[Config, Inventories]
) -> None:
    numbers = [str(number) for number in range(5000)]
    options = {"VIRTUAL": "ASCEND_RUNTIME_OPTIONS=VIRTUAL"}
    sizes = ",".join(f"{number}=1KiB" for number in numbers)
    env = [each.format(",".join(numbers), sizes=sizes, **options) for each in entries]
    config, inventories = there
    folder = folder_of(config)
    spec, programs = written(folder, env), str(folder / "bin")
    with pytest.raises(RequestError, match=words):
        steps.edit(spec, config, programs, inventories=inventories)
