"""Cores near a device: by Slurm's numbers, which aren't the kernel's."""

from pathlib import Path

from gpuhook.tools.slurm.cores import Cores, parse

GPU = "0000:1b:00.0"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(sys: Path, sockets: list[str], threads: dict[int, str], local: str) -> Cores:
    """Write a machine's /sys: the CPUs of each socket, those of each core, and a GPU's."""
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


def test_cpus_that_alternate_between_sockets(tmp_path: Path) -> None:
    cores = machine(tmp_path, ["0,2,4,6", "1,3,5,7"], {}, "1,3,5,7")
    assert cores.near(GPU) == "4-7"


def test_two_threads_are_one_core(tmp_path: Path) -> None:
    threads = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    cores = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], threads, "2-3,6-7")
    assert cores.near(GPU) == "2-3"


def test_all_cores_are_not_written(tmp_path: Path) -> None:
    assert machine(tmp_path, ["0-3"], {}, "0-3").near(GPU) == ""


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    cores = machine(tmp_path, ["0-3", "4-7"], {}, "junk")
    assert cores.near(GPU) == cores.near("") == cores.near("0000:ff:00.0") == ""
    assert Cores(str(tmp_path / "none")).near(GPU) == ""


def test_the_node_of_memory_says_it_as_well(tmp_path: Path) -> None:
    cores = machine(tmp_path / "sys", ["0-3", "4-7"], {}, "")
    write(tmp_path / f"driver/sys/bus/pci/devices/{GPU}/numa_node", "1")
    assert cores.near(GPU, (f"{tmp_path}/driver",)) == "4-7"
    write(tmp_path / f"driver/sys/bus/pci/devices/{GPU}/numa_node", "-1")
    assert cores.near(GPU, (f"{tmp_path}/driver",)) == ""


def test_lists() -> None:
    assert parse("0-2,5") == {0, 1, 2, 5}
    for text in ("", "x", "1-", "-1", "0-99999999", "1,,2", "\u0663"):
        assert parse(text) == set()
