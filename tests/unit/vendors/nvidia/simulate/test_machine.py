"""The simulated machine: numbers of GPUs and MIG devices, and files of the kernel module."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.vendors.nvidia.devices import DRIVERS, FEATURE_NODES
from gpuhook_simulate.vendors.nvidia.driver import with_soname
from gpuhook_simulate.vendors.nvidia.kernel_files import mig_minors_text, version_text
from gpuhook_simulate.vendors.nvidia.machine import cap_minor, make_machine, place
from gpuhook_simulate.vendors.nvidia.models import MigProfile, find_model
from gpuhook_simulate.vendors.nvidia.options import FEATURES, Failure, Options
from gpuhook_simulate.vendors.nvidia.tables import generated_header, generated_source


def test_gpus_have_distinct_uuids_serials_and_bus_ids() -> None:
    gpus = make_machine(Options(root="/x", gpus=64)).gpus
    assert len({gpu.uuid for gpu in gpus}) == 64
    assert len({gpu.serial for gpu in gpus}) == 64
    assert [gpu.pci_bus_id for gpu in gpus] == sorted({gpu.pci_bus_id for gpu in gpus})
    assert gpus[0].pci_bus_id == "00000000:1B:00.0"
    assert gpus[0].proc_bus_id == "0000:1b:00.0"
    assert gpus[9].proc_bus_id == "0001:43:00.0"


def test_identity_survives_rebuilding_and_unplugging() -> None:
    before = make_machine(Options(root="/x", gpus=4)).gpus
    after = make_machine(Options(root="/y", gpus=4, unplugged=frozenset({1}))).gpus
    assert [gpu.uuid for gpu in after] == [before[index].uuid for index in (0, 2, 3)]
    assert [gpu.minor for gpu in after] == [0, 2, 3]
    other = make_machine(Options(root="/x", gpus=4, seed="other")).gpus
    assert not {gpu.uuid for gpu in other} & {gpu.uuid for gpu in before}


def test_given_minors_and_models_are_used() -> None:
    gpus = make_machine(Options(root="/x", gpus=2, minors=(5, 2), models=("T4", "L4"))).gpus
    assert [(gpu.minor, gpu.model.name) for gpu in gpus] == [(5, "Tesla T4"), (2, "NVIDIA L4")]


@pytest.mark.parametrize(
    ("version", "module"),
    [("535.309.01", "535.309.00"), ("580.65.06", "580.65.05"), ("570.00", "570.01")],
)
def test_a_version_mismatch_changes_the_module_version_only(version: str, module: str) -> None:
    options = Options(root="/x", driver_version=version, failure=Failure.VERSION_MISMATCH)
    machine = make_machine(options)
    assert (machine.driver_version, machine.module_version) == (version, module)
    assert module in version_text(machine)


def test_module_version_text_names_the_open_module_where_used() -> None:
    closed = version_text(make_machine(Options(root="/x", driver_version="535.309.01")))
    assert "NVIDIA UNIX x86_64 Kernel Module  535.309.01  " in closed.replace("aarch64", "x86_64")
    opened = version_text(make_machine(Options(root="/x", driver_version="580.65.06")))
    assert "Open Kernel Module" in opened
    volta = make_machine(Options(root="/x", driver_version="580.65.06", models=("V100",)))
    assert "Open Kernel Module" not in version_text(volta)


# Instance ids with their first memory slices, as nvidia-smi shows them on real GPUs.
PLACEMENTS = [
    ("7g.141gb", [(0, 0)]),
    ("3g.71gb,3g.71gb", [(1, 4), (2, 0)]),
    ("4g.71gb,3g.71gb", [(1, 0), (2, 4)]),
    ("3g.71gb,4g.71gb", [(2, 4), (1, 0)]),
    ("1g.18gb," * 7, [(7 + n, n) for n in range(7)]),
    ("1g.35gb," * 4, [(3 + n, 2 * n) for n in range(4)]),
    ("2g.35gb,2g.35gb,2g.35gb,1g.18gb", [(3, 0), (4, 2), (5, 4), (7, 6)]),
    ("1g.18gb,3g.71gb,1g.18gb,2g.35gb", [(7, 2), (1, 4), (8, 3), (3, 0)]),
    ("1g.18gb+me,1g.18gb", [(7, 0), (8, 1)]),
]


@pytest.mark.parametrize(("names", "places"), PLACEMENTS)
def test_mig_profiles_are_placed_as_by_the_driver(
    names: str, places: list[tuple[int, int]]
) -> None:
    model = find_model("H200")
    assert place([model.profile(name) for name in names.strip(",").split(",")], 0) == places


@pytest.mark.parametrize(
    "names",
    ["7g.141gb,1g.18gb", "4g.71gb,4g.71gb", "3g.71gb,3g.71gb,1g.18gb", "1g.18gb+me,1g.18gb+me"],
)
def test_mig_profiles_that_do_not_fit_are_refused(names: str) -> None:
    model = find_model("H200")
    with pytest.raises(SimulateError, match="don't fit on GPU 5"):
        place([model.profile(name) for name in names.split(",")], 5)


@given(st.lists(st.sampled_from(find_model("A100").mig), max_size=8))
def test_placements_never_overlap(profiles: list[MigProfile]) -> None:
    try:
        placed = place(profiles, 0)
    except SimulateError:
        return
    slices: set[int] = set()
    for profile, (_, start) in zip(profiles, placed, strict=True):
        covered = set(range(start, start + profile.memory_slices))
        assert covered <= set(range(8))
        assert not covered & slices
        slices |= covered
    assert len({instance for instance, _ in placed}) == len(placed)


def test_mig_devices_get_instance_and_capability_numbers() -> None:
    options = Options(root="/x", gpus=2, minors=(1, 0), mig={1: ("1g.18gb", "2g.35gb"), 0: ()})
    empty, split = make_machine(options).gpus
    assert (empty.mig_enabled, empty.migs) == (True, ())
    assert [(mig.gi, mig.gi_cap, mig.ci_cap) for mig in split.migs] == [(7, 66, 67), (3, 30, 31)]
    assert all(mig.uuid.startswith("MIG-") for mig in split.migs)


def test_mig_needs_a_model_with_mig() -> None:
    with pytest.raises(SimulateError, match="Tesla T4 has no MIG"):
        make_machine(Options(root="/x", models=("T4",), mig={0: ()}))


def test_capability_minors_match_the_driver() -> None:
    lines = mig_minors_text().splitlines()
    assert lines[:4] == ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4"]
    assert "gpu0/gi7/access 66" in lines
    assert "gpu0/gi14/ci7/access 137" in lines
    assert "gpu1/gi0/access 138" in lines
    assert cap_minor(1, 0) == 138
    assert [int(line.split()[1]) for line in lines] == list(range(1, len(lines) + 1))


def test_features_have_nodes() -> None:
    assert set(FEATURE_NODES) == set(FEATURES)
    assert {driver for nodes in FEATURE_NODES.values() for _, driver, _ in nodes} <= set(DRIVERS)


def test_generated_source_lists_each_gpu_and_model() -> None:
    assert "SIM_GPU_COUNT 0\n" in generated_header(
        make_machine(Options(root="/x", gpus=0)), None, "/l"
    )
    machine = make_machine(Options(root="/x", gpus=3, models=("T4", "H200", "T4")))
    source = generated_source(machine)
    assert source.count("static const struct sim_profile") == 2
    assert source.count(".uuid = ") == 3


def test_soname_is_patched_in_place() -> None:
    placeholder = b"gpuhook-placeholder-for-a-soname-of-a-driver-library.so.000.000.00\0"
    patched = with_soname(b"\x7fELF..." + placeholder + b"rest", "libx.so.1")
    assert patched.startswith(b"\x7fELF...libx.so.1\0")
    assert patched.endswith(b"\0rest")
    assert len(patched) == len(placeholder) + 11


def test_sonames_are_unique() -> None:
    from gpuhook_simulate.vendors.nvidia import stock  # noqa: PLC0415 - the module is data for this test alone

    names = [library.soname_of("580.65.06") for library in stock.LIBRARIES]
    assert len(set(names)) == len(names)
    assert all(len(name) < 64 for name in names)
    version = "535.309.01"
    for library in stock.LIBRARIES:
        has_version = library.file_name(version).endswith(version)
        assert has_version != library.unversioned
