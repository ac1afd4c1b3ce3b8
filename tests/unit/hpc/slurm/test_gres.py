"""Lines of gres.conf: Slurm reads from them the devices that the host has, whatever their names."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import ConfigError
from gpuhook.hpc.slurm.cores import Cores, parse
from gpuhook.hpc.slurm.gres import GresEntry, ranges, text, word

HOSTILE = (
    "H100:8", "H100,gpu:a100:8", "x File=/dev/sda", "a\nNodeName=evil", "#", "", "4090", "8k",
    "(null)", "no_consume", "NVIDIA", "nvidia_none", "Ünicode GPU", "[0-7]", "a" * 500,
    "\x00\x1b[2J", '"', "-",
)  # fmt: skip
PATHS = st.builds(
    "/dev/{}{}".format, st.text("abcdef", min_size=1, max_size=8), st.integers(0, 999)
)
ENTRIES = st.builds(
    GresEntry,
    vendor=st.sampled_from(("nvidia", "amd", "gaudi", "intel_gpu")),
    type=st.sampled_from(("h100", "a100", "gaudi2", "mi300x")),
    files=st.lists(PATHS, min_size=1, max_size=3, unique=True).map(tuple),
    cores=st.sampled_from(("", "0-7", "0,2")),
)


def devices(written: str) -> list[dict[str, str]]:
    """Return the lines about devices as Slurm reads them: names and values, separated by blanks."""
    lines = [line for line in written.splitlines() if " Name=" in line]
    return [dict(part.split("=", 1) for part in line.split(" ")) for line in lines]


@pytest.mark.parametrize(
    ("model", "vendor", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "nvidia", "a100-sxm4-40gb"),
        ("NVIDIA H100 80GB HBM3", "nvidia", "h100_80gb_hbm3"),
        ("NVIDIA H200 MIG 1g.18gb", "nvidia", "h200_1g.18gb"),
        ("AMD Instinct MI300X", "amd", "instinct_mi300x"),
        ("4090", "nvidia", "nvidia_4090"),
        ("", "gaudi", "gaudi"),
    ],
)
def test_model_names_become_single_words(model: str, vendor: str, expected: str) -> None:
    assert word(model, vendor) == expected


@given(st.text() | st.sampled_from(HOSTILE), st.sampled_from(("nvidia", "amd", "intel_gpu")))
def test_any_model_name_becomes_a_single_safe_word(model: str, vendor: str) -> None:
    found = word(model, vendor)
    assert re.fullmatch(r"[a-z][a-z0-9_.-]{0,80}", found)
    assert found not in ("no_consume", "mig", "none", "null")
    line = devices(text([GresEntry(vendor, found, ("/dev/x0",))], "n1"))[0]
    assert line["Type"] == found
    assert line["File"] == "/dev/x0"


@given(st.lists(ENTRIES, max_size=8))
def test_gres_lines_describe_exactly_the_given_devices(entries: list[GresEntry]) -> None:
    written = text(entries, "n1")
    found = devices(written)
    assert len(found) == len(entries)
    for line in found:
        assert (line["NodeName"], line["Name"]) == ("n1", "gpu")
        assert ("MultipleFiles" in line) != ("File" in line)
        assert ("MultipleFiles" in line) == ("," in line.get("MultipleFiles", ""))
    assert written.splitlines()[3] == "NodeName=n1 AutoDetect=off"
    assert text(entries, "n1") == written


@given(st.lists(ENTRIES, min_size=1, max_size=8))
def test_slurm_numbers_devices_in_the_order_of_their_lines(entries: list[GresEntry]) -> None:
    """Slurm takes the types of slurm.conf one by one, and the lines of each type in their order."""
    written = text(entries, "n1")
    found = devices(written)
    line = re.search(r"NodeName=n1 Gres=(\S+)", written)
    assert line is not None
    parts = [part.split(":") for part in line[1].split(",")]
    numbered = [each for _, kind, _ in parts for each in found if each["Type"] == kind]
    assert numbered == found
    counts = {kind: int(count) for _, kind, count in parts}
    assert counts == {kind: [each.type for each in entries].count(kind) for kind in counts}
    for kind in counts:
        files = [each.files[0] for each in entries if each.type == kind]
        firsts = [
            each.get("File", each.get("MultipleFiles", ""))
            for each in found
            if each["Type"] == kind
        ]
        assert [first.split(",")[0] for first in firsts] == files


def test_links_are_written_in_the_order_of_slurms_numbers() -> None:
    """Slurm groups devices by type, so its numbers differ from the order of the entries."""
    pair = [
        GresEntry("nvidia", "h100", ("/dev/x0",), id="a", links={"c": 4}),
        GresEntry("nvidia", "a100", ("/dev/x1",), id="b"),
        GresEntry("nvidia", "h100", ("/dev/x2",), id="c", links={"a": 4, "gone": 2}),
    ]
    found = {line["File"]: line.get("Links") for line in devices(text(pair, "n1"))}
    assert found == {"/dev/x0": "-1,4,0", "/dev/x2": "4,-1,0", "/dev/x1": None}


def test_each_vendors_line_has_its_own_environment_flag() -> None:
    entries = [
        GresEntry(vendor, "x", ("/dev/x0",)) for vendor in ("nvidia", "amd", "intel_gpu", "gaudi")
    ]
    assert [line["Flags"] for line in devices(text(entries, "n1"))] == [
        "nvidia_gpu_env", "amd_gpu_env", "intel_gpu_env", "no_gpu_env",
    ]  # fmt: skip


def test_a_machine_without_devices_gets_no_gres_lines() -> None:
    written = text([], "n1")
    assert devices(written) == []
    assert "Gres=" not in written


@pytest.mark.parametrize(
    "path", ["/a b/nvidia0", "/d[0-7]/x", "/d,/dev/sda", '/"/x', "/#/x", "/a\n/x"]
)
def test_paths_that_gres_conf_cannot_express_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="can't express the path"):
        text([GresEntry("nvidia", "h100", (path,))], "n1")


@pytest.mark.parametrize("node", ["", "a b", "n1\nx", "n#1", "-n", "n=1"])
def test_invalid_node_names_are_refused(node: str) -> None:
    with pytest.raises(ConfigError, match="NodeName"):
        text([], node)


@given(st.sets(st.integers(0, 300)))
def test_written_ranges_stand_for_exactly_the_given_numbers(numbers: set[int]) -> None:
    found: set[int] = set()
    for part in ranges([*numbers]).split(",") if numbers else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    assert found == numbers


# Cores ----------------------------------------------------------------------------------------


GPU = "0000:1b:00.0"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(sys: Path, sockets: list[str], threads: dict[int, str], local: str) -> Cores:
    """Write a host's /sys: the CPUs of each socket, of each core, and those near a GPU."""
    cpu = sys / "devices/system/cpu"
    write(cpu / "online", ",".join(sockets))
    write(sys / "devices/system/node/online", f"0-{len(sockets) - 1}")
    for number, cpus in enumerate(sockets):
        write(sys / f"devices/system/node/node{number}/cpulist", cpus)
        for one in parse(cpus):
            write(cpu / f"cpu{one}/topology/package_cpus_list", cpus)
            write(cpu / f"cpu{one}/topology/core_cpus_list", threads.get(one, str(one)))
    write(sys / f"bus/pci/devices/{GPU}/local_cpulist", local)
    return Cores(str(sys))


def test_alternating_cpus_are_numbered_by_core_as_slurm_does(tmp_path: Path) -> None:
    cores = machine(tmp_path, ["0,2,4,6", "1,3,5,7"], {}, "1,3,5,7")
    assert cores.near(GPU) == "4-7"


def test_two_threads_are_one_core(tmp_path: Path) -> None:
    threads = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    cores = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], threads, "2-3,6-7")
    assert cores.near(GPU) == "2-3"


def test_cores_are_omitted_when_all_are_near(tmp_path: Path) -> None:
    assert machine(tmp_path, ["0-3"], {}, "0-3").near(GPU) == ""


def test_unknown_gpu_locality_gives_no_cores(tmp_path: Path) -> None:
    cores = machine(tmp_path, ["0-3", "4-7"], {}, "junk")
    assert cores.near(GPU) == cores.near("") == cores.near("0000:ff:00.0") == ""
    assert Cores(str(tmp_path / "none")).near(GPU) == ""


def test_near_cores_are_found_by_the_numa_node_too(tmp_path: Path) -> None:
    cores = machine(tmp_path / "sys", ["0-3", "4-7"], {}, "")
    write(tmp_path / f"driver/sys/bus/pci/devices/{GPU}/numa_node", "1")
    assert cores.near(GPU, (f"{tmp_path}/driver",)) == "4-7"
    write(tmp_path / f"driver/sys/bus/pci/devices/{GPU}/numa_node", "-1")
    assert cores.near(GPU, (f"{tmp_path}/driver",)) == ""


def test_cpu_lists_are_parsed_and_malformed_ones_are_empty() -> None:
    assert parse("0-2,5") == {0, 1, 2, 5}
    for odd in ("", "x", "1-", "-1", "0-99999999", "1,,2", "\u0663"):
        assert parse(odd) == set()
