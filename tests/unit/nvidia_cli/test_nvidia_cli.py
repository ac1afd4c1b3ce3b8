"""nvidia-container-cli: its output, how it reads its command line, and its caller."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuhook import __version__
from gpuhook.core.inventory.model import DeviceNode, DriverFile
from gpuhook.nvidia_cli import callers
from gpuhook.nvidia_cli.argp import FLAG, OPTIONAL, VALUE, CliError, Option, UsageError, parse
from gpuhook.nvidia_cli.main import _pid, main
from gpuhook.nvidia_cli.report import ListSelection, info, listing
from gpuhook.vendors.nvidia.model import Gpu, Mig, NvidiaInventory, Selection

MIG = Mig(0, "MIG-1", 1, 0, "1g.10gb", 12, 13)
BUS = "00000000:1B:00.0"
GPU = Gpu(0, 3, "GPU-1", BUS, "NVIDIA H100", "9.0", "Nvidia", True, (MIG,))
NODES = (
    DeviceNode("/dev/nvidiactl", 195, 255),
    DeviceNode("/dev/nvidia3", 195, 3),
    DeviceNode("/dev/nvidia-caps/nvidia-cap12", 236, 12),
)
FIRMWARE = "/lib/firmware/nvidia/580.1/gsp_ga10x.bin"
FILES = (
    DriverFile("library", "/usr/lib/libcuda.so.1.2", "libcuda.so.1.2", "compute", "libcuda.so.1"),
    DriverFile("binary", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", "utility"),
    DriverFile("firmware", f"/usr{FIRMWARE}", FIRMWARE, ""),
)
MACHINE = NvidiaInventory(
    "/", "580.1", "13.0", (GPU,), NODES, FILES,
    mig_minors="config 1\nmonitor 2\ngpu3/gi1/access 12\ngpu3/gi1/ci0/access 13\n",
)  # fmt: skip


def test_info_without_gpus_prints_only_the_versions() -> None:
    empty = NvidiaInventory("/", "580.1", "13.0", (), (), ())
    assert info(empty, csv=False) == "NVRM version:   580.1\nCUDA version:   13.0\n"


def test_info_prints_the_bus_id_in_lower_case() -> None:
    assert "Bus Location:   00000000:1b:00.0\n" in info(MACHINE, csv=False)
    assert info(MACHINE, csv=True).splitlines()[-1] == (
        "0,3,NVIDIA H100,Nvidia,GPU-1,00000000:1b:00.0,9.0"
    )


def test_a_mig_device_is_listed_with_its_access_files() -> None:
    selection = Selection((GPU,), ((GPU, MIG),), ("MIG-1",))
    instance = "/proc/driver/nvidia/capabilities/gpu3/mig/gi1"
    assert list(listing(MACHINE, ListSelection(("binary", "library"), selection))) == [
        "/dev/nvidiactl",
        "/dev/nvidia3",
        f"{instance}/access",
        f"{instance}/ci0/access",
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
        "/usr/bin/nvidia-smi",
        "/usr/lib/libcuda.so.1.2",
    ]


def test_mig_management_lists_all_capability_files() -> None:
    assert list(listing(MACHINE, ListSelection((), None, mig=("config",)))) == [
        "/proc/driver/nvidia/capabilities/mig/config",
        "/dev/nvidia-caps/nvidia-cap1",
        "/proc/driver/nvidia/capabilities/gpu3",
        "/dev/nvidia-caps",
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
    ]


def test_imex_channels_are_listed_as_nodes() -> None:
    assert list(listing(MACHINE, ListSelection((), None, imex=(0, 7)))) == [
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/nvidia-caps-imex-channels/channel7",
    ]


def test_firmware_is_listed_by_its_canonical_path() -> None:
    assert list(listing(MACHINE, ListSelection(("firmware",), None))) == [FIRMWARE]


@pytest.mark.protects(
    "list-features",
    "nvidia-container-cli list omits optional libraries, such as those of rdma-core",
    instead="if False:",
)  # fmt: skip
def test_libraries_of_a_feature_are_not_listed() -> None:
    path = "/usr/lib/libibumad.so.3.3.50.0"
    feature = DriverFile("library", path, "libibumad.so.3.3.50.0", "nvswitch", "libibumad.so.3")
    found = listing(MACHINE.but(files=(*FILES, feature)), ListSelection(("library",), None))
    assert list(found) == ["/usr/lib/libcuda.so.1.2"]


# Command lines --------------------------------------------------------------------------------


OPTIONS = (
    Option("device", "d", VALUE),
    Option("debug", "D", VALUE),
    Option("user", "u", OPTIONAL),
    Option("load-kmods", "k", FLAG),
    Option("load", "", FLAG),
    Option("csv", "c", FLAG),
)


@pytest.mark.parametrize(
    ("words", "found", "rest"),
    [
        ([], [], []),
        (["--device", "0"], [("device", "0")], []),
        (["--device=0", "x"], [("device", "0")], ["x"]),
        (["--device=", "x"], [("device", "")], ["x"]),
        (["--dev", "0", "--c"], [("device", "0"), ("csv", None)], []),
        (["--load"], [("load", None)], []),
        (["--load-"], [("load-kmods", None)], []),
        (["-kcd0"], [("load-kmods", None), ("csv", None), ("device", "0")], []),
        (["-kd", "0"], [("load-kmods", None), ("device", "0")], []),
        (["-d", "-k"], [("device", "-k")], []),
        (["-u", "x"], [("user", None)], ["x"]),
        (["-ux:y"], [("user", "x:y")], []),
        (["--user=x", "--user"], [("user", "x"), ("user", None)], []),
        (["x", "-k", "--", "-c"], [("load-kmods", None)], ["x", "-c"]),
        (["-"], [], ["-"]),
    ],
)
def test_options_are_accepted_at_any_position(
    words: list[str], found: list[tuple[str, str | None]], rest: list[str]
) -> None:
    assert parse(words, OPTIONS, in_order=False) == (found, rest)


def test_in_order_the_first_word_ends_the_options() -> None:
    assert parse(["-k", "list", "-c", "--", "x"], OPTIONS, in_order=True) == (
        [("load-kmods", None)],
        ["list", "-c", "--", "x"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "unrecognized option '--nope'"),
        (["--de", "0"], "option '--de' is ambiguous; possibilities: '--device' '--debug'"),
        (["--device"], "option '--device' requires an argument"),
        (["--csv=1"], "option '--csv' doesn't allow an argument"),
        (["-kx"], "invalid option -- 'x'"),
        (["-kd"], "option requires an argument -- 'd'"),
    ],
)
def test_invalid_options_are_refused_with_the_expected_message(
    words: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words, OPTIONS, in_order=False)
    assert str(caught.value) == message


# Who calls ------------------------------------------------------------------------------------


ASK = "import sys; sys.path[:0] = sys.argv[1:]; from gpuhook.nvidia_cli import callers; "
FOLDER = str(Path(callers.__file__).parents[3])


def answer(code: str, *before: str) -> str:
    """Return the output of a Python that the programs ``before`` start below this process."""
    words = [*before, sys.executable, "-c", ASK + code, FOLDER]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_the_caller_is_the_first_ancestor_running_another_program() -> None:
    """Two shell processes stand for the engine, and this Python process called it."""
    shell = ["sh", "-c", '"$0" "$@"; :', "sh", "-c", '"$0" "$@"; :']
    assert answer("print(callers._caller())", *shell) == str(os.getpid())


def test_the_parent_process_is_read_from_proc() -> None:
    assert answer("print(callers.parent())") == str(os.getpid())
    assert callers.parent() == os.getppid()


def test_mount_tables_of_the_caller_and_first_process_are_read() -> None:
    shell = ["sh", "-c", '"$0" "$@"; :']
    lengths = answer("print(*map(len, callers.mount_tables()))", *shell).split()
    assert len(lengths) == 2
    assert int(lengths[0]) == len(Path("/proc/self/mountinfo").read_bytes())


@pytest.mark.parametrize(
    "words",
    [
        ["--x\x1b[31m", "list"],
        ["configure", "--pid=1\x1b[31m", "/"],
        ["\x1b[31m"],
    ],
)
def test_terminal_escapes_in_arguments_are_printed_escaped(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An image chooses some of these arguments."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\\x1b[31m" in said


@pytest.mark.parametrize("text", ["", "x", "-", "٣", "1_0", " 1", "+1", "1.0", "9" * 5000])
def test_an_invalid_process_id_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="invalid process id"):
        _pid([("pid", text)])


def test_a_valid_process_id_is_parsed() -> None:
    found = {text: _pid([("pid", text)]) for text in ("12", "0", "-3", "007")}
    assert found == {"12": 12, "0": None, "-3": None, "007": 7}


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_high_enough_for_scripts(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([option])
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for label in ("cli-version", "lib-version"):
        assert [*map(int, said[label].split("."))] >= [1, 14]  # the lowest version scripts accept
    assert said["build revision"] == f"gpuhook {__version__}"
