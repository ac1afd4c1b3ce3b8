"""Selectors on a host with three GPUs, one of them split by MIG."""

import pytest

from gpuhook.base.errors import LostDeviceError, UnknownDeviceError
from gpuhook.core.inventory import model
from gpuhook.core.inventory.model import NOBODY, Device, DeviceNode
from gpuhook.core.inventory.selection import select
from gpuhook.vendors.nvidia import names
from gpuhook.vendors.nvidia.model import Gpu, Mig, NvidiaInventory, Selection, selection

A, B, C = (
    "GPU-8f3a1c00-0000-4000-8000-00000000000a",
    "GPU-8f3b2d00-0000-4000-8000-00000000000b",
    "GPU-c0ffee00-0000-4000-8000-00000000000c",
)
M0, M1 = "MIG-1111aaaa-0000-5000-8000-000000000000", "MIG-1111bbbb-0000-5000-8000-000000000001"


def gpu(index: int, uuid: str, bus: str, mig: tuple[Mig, ...] = ()) -> Gpu:
    return Gpu(index, 7 - index, uuid, bus, "NVIDIA H200", "9.0", "Nvidia", bool(mig), mig)


def machine(*gpus: Gpu, lost: tuple[int, ...] = ()) -> NvidiaInventory:
    return NvidiaInventory("/", "580.65.06", "13.0", gpus, (), (), lost)


MACHINE = machine(
    gpu(0, A, "00000000:1B:00.0"),
    gpu(1, B, "0001A2B3:43:0A.0"),
    gpu(
        2,
        C,
        "00000000:C1:00.0",
        (Mig(0, M0, 7, 0, "1g.18gb", 12, 13), Mig(1, M1, 8, 1, "1g.18gb", 21, 22)),
    ),
)


def selected(*selectors: str, inventory: NvidiaInventory = MACHINE) -> Selection:
    return selection(inventory, select(selectors, inventory, names))


@pytest.mark.parametrize(
    ("selectors", "uuids"),
    [
        ([], []),
        (["all"], [A, B, C, M0, M1]),
        (["ALL"], [A, B, C, M0, M1]),
        (["0"], [A]),
        (["2", "0"], [C, A]),
        (["01"], [B]),
        (["0-1"], [A, B]),
        (["1-1"], [B]),
        (["0-2"], [A, B, C]),
        (["1-2", "0"], [B, C, A]),
        ([A], [A]),
        ([A.upper()], [A]),
        ([A.lower()], [A]),
        (["GPU-8f3a"], [A]),
        (["gpu-C"], [C]),
        (["00000000:1B:00.0"], [A]),
        (["0000:1b:00.0"], [A]),
        (["0:1b:0.0"], [A]),
        (["1b:00.0"], [A]),
        (["0001a2b3:43:0a.0"], [B]),
        (["1a2b3:43:a.0"], [B]),
        (["2:0"], [M0]),
        (["gpu1"], [B]),
        (["mig2:1"], [M1]),
        (["2:1", "2:0"], [M1, M0]),
        ([M1], [M1]),
        ([M1.upper()], [M1]),
        (["MIG-1111b"], [M1]),
        ([f"MIG-{C}/7/0"], [M0]),
        ([f"mig-{C.upper()}/8/1"], [M1]),
    ],
)
def test_each_selector_form_selects_the_right_devices(
    selectors: list[str], uuids: list[str]
) -> None:
    assert list(selected(*selectors).uuids) == uuids


def test_an_index_follows_enumeration_and_selects_no_mig_devices() -> None:
    assert selected("0").gpus[0].minor == 7
    assert selected("2").migs == ()


def test_duplicate_selectors_of_any_form_select_one_device() -> None:
    selection = selected("1", B, "1a2b3:43:a.0", "1-1", "GPU-8f3b", "1")
    assert selection.uuids == (B,)
    assert [found.uuid for found in selection.gpus] == [B]


def test_all_beside_others_selects_everything_once() -> None:
    assert selected("2:1", "all", "0").uuids == (M1, A, B, C, M0)


def test_a_mig_device_adds_its_gpu_but_only_its_own_uuid() -> None:
    selection = selected("2:1", "0", M0)
    assert [found.uuid for found in selection.gpus] == [C, A]
    assert [(found.uuid, mig.uuid) for found, mig in selection.migs] == [(C, M1), (C, M0)]
    assert selection.uuids == (M1, A, M0)


@pytest.mark.parametrize(
    "selector",
    [
        "3", "4294967296", "9" * 256, "-1", "+1", "0x1", "1.0", "²", "٣", "0-3", "2-0", "0-",
        "-2", "0-999999999", "0-1-2", "none", "void", "gpu9", "GPU-", "GPU-8f3c", A + "0", A[4:],
        "MIG-", "MIG-1111c", f"MIG-{C}/7", f"MIG-{C}/7/1", f"MIG-{A}/7/0", "0:0", "2:2", "3:0",
        ":", "2:", ":0", "2:0:0", "1b:00", "0000:1b:00.1", "0000:1b:00", "0000:1g:00.0",
        "0000:1b:01.0", "000000000:1b:00.0", "::.0",
    ],
)  # fmt: skip
def test_an_unknown_device_error_lists_existing_devices(selector: str) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        selected("0", selector)
    assert ascii(selector)[:10] in str(caught.value)
    assert A in str(caught.value)
    assert M0 in str(caught.value)
    assert "and 1 more. " in str(caught.value)
    assert caught.value.code == "unknown-device"


@pytest.mark.parametrize("lost", [(), tuple(range(16, 40))])
@pytest.mark.parametrize("selector", ["99:9", "MIG-9", "0-99", "x" * 10**5, "\U0001f600" * 40])
def test_an_unknown_device_error_is_short_on_any_machine(
    selector: str, lost: tuple[int, ...]
) -> None:
    """The host has 112 MIG devices, with the long names that old drivers use."""
    gpus = [
        gpu(
            n,
            f"GPU-{n:08}-0000-4000-8000-00000000000a",
            f"00000000:{n:X}:00.0",
            tuple(Mig(m, f"MIG-GPU-{n:032}/{m}/0", m, 0, "1g.18gb", 12, 13) for m in range(7)),
        )
        for n in range(16)
    ]
    with pytest.raises(UnknownDeviceError) as caught:
        selected(selector, inventory=machine(*gpus, lost=lost))
    assert len(str(caught.value)) <= 450
    assert str(caught.value).count("GPU-0") <= 4
    assert "`gpuhook info` lists them" in caught.value.remedy


@pytest.mark.parametrize(("length", "count"), [(8, 4), (60, 4), (110, 2), (250, 1), (500, 0)])
def test_an_error_lists_fewer_devices_the_longer_their_names_are(length: int, count: int) -> None:
    """A vendor that config.toml declares may have device names of any length."""
    texts = [f"N{n:0{length}}" for n in range(9)]
    devices = tuple(Device(text, text, {"name": (text,)}) for text in texts)
    there = model.Inventory("declared", "/", "1", devices, ())
    with pytest.raises(UnknownDeviceError) as caught:
        select(["nothing"], there, names)
    assert len(str(caught.value)) <= 450
    assert str(caught.value).count("N0") == count


def numbered(*numbers: int, lost: tuple[int, ...] = ()) -> NvidiaInventory:
    return machine(*(gpu(n, f"GPU-{n:04}", f"0:{n:x}:0.0") for n in numbers), lost=lost)


EIGHT, GAPS = numbered(*range(8)), numbered(0, 1, 4, 6)
LOSSES = numbered(0, 1, 2, 4, 6, 7, lost=(3, 5))


@pytest.mark.parametrize(
    ("there", "selector", "words"),
    [
        (EIGHT, "0-12", "'0-12': 8 to 12 don't exist; it has "),
        (EIGHT, "0-8", ": 8 doesn't exist; it has "),
        (EIGHT, "9-999999999", ": 9 to 999999999 don't exist; it has "),
        (EIGHT, "9-9", ": 9 doesn't exist; it has "),
        (EIGHT, "3-1", ": the range runs backwards; it has "),
        (EIGHT, "12-9", ": the range runs backwards; it has "),
        (EIGHT, "0-", "'0-': it has "),
        (EIGHT, "12", "'12': it has "),
        (GAPS, "0-6", ": 2 to 3 don't exist; it has "),
        (GAPS, "4-9", ": 5 doesn't exist; it has "),
        # These selectors have other errors than lost GPUs.
        (LOSSES, "8", "'8': it has 0 (GPU-0000)"),
        (LOSSES, "0:5", "'0:5': it has 0 (GPU-0000)"),
        (LOSSES, "8:0", "'8:0': it has 0 (GPU-0000)"),
        (LOSSES, "0-12", ": 8 to 12 don't exist; it has "),
        (LOSSES, "3-8", ": 8 doesn't exist; it has "),
        (LOSSES, "3-999999999", ": 8 to 999999999 don't exist; it has "),
        (LOSSES, "5-3", ": the range runs backwards; it has "),
        (LOSSES, "3-5:0", "'3-5:0': it has "),
        (LOSSES, "3:", "'3:': it has "),
    ],
)
def test_an_unknown_selector_error_states_the_cause(
    there: NvidiaInventory, selector: str, words: str
) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        selected(selector, inventory=there)
    assert caught.value.code == "unknown-device"
    assert words in caught.value.cause
    assert "lost" not in caught.value.cause


@pytest.mark.parametrize("selector", ["3", "03", "3-3", "2-4", "0-7", "3:0"])
def test_selecting_a_lost_gpu_is_refused_as_lost(selector: str) -> None:
    with pytest.raises(LostDeviceError) as caught:
        selected("0", selector, inventory=LOSSES)
    assert caught.value.code == "lost-device"
    named = "GPUs 3, 5 have" if selector == "0-7" else "GPU 3 has"
    assert caught.value.cause == f"{named} fallen off the bus (lost)"
    assert "Xid 79" in caught.value.remedy


def test_other_gpus_can_be_selected_while_some_are_lost() -> None:
    assert selected("0-2", "4", inventory=LOSSES).uuids == (
        "GPU-0000", "GPU-0001", "GPU-0002", "GPU-0004",
    )  # fmt: skip
    assert len(selected("all", inventory=LOSSES).uuids) == 6


def test_selecting_the_only_gpu_is_refused_when_it_is_lost() -> None:
    alone = machine(lost=(0,))
    assert selected("all", inventory=alone).uuids == ()
    with pytest.raises(LostDeviceError, match="GPU 0 has fallen"):
        selected("0", inventory=alone)
    with pytest.raises(UnknownDeviceError, match="'1': it has none that answers") as caught:
        selected("1", inventory=alone)
    assert caught.value.code == "unknown-device"


@pytest.mark.parametrize("selector", ["GPU-8f3a", "MIG-1111", "0000:1b:00.0", "3:00.0"])
def test_an_unknown_uuid_or_bus_id_error_mentions_lost_gpus(selector: str) -> None:
    """NVML reports only the index of a lost GPU."""
    with pytest.raises(UnknownDeviceError) as caught:
        selected(selector, inventory=LOSSES)
    assert caught.value.cause.endswith(
        "; GPUs 3, 5 have fallen off the bus (lost) and may be one of them"
    )
    one = machine(gpu(0, A, "0:1:0.0"), lost=(1,))
    with pytest.raises(UnknownDeviceError, match=r"; GPU 1 has .* \(lost\) and may be it\. "):
        selected(selector.replace("8f3a", "9"), inventory=one)


@pytest.mark.parametrize(("prefix", "both"), [("GPU-8", (A, B)), ("MIG-1111", (M0, M1))])
def test_an_ambiguous_uuid_prefix_is_refused_with_its_candidates(
    prefix: str, both: tuple[str, str]
) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        selected(prefix)
    for uuid in both:
        assert uuid in caught.value.cause


def test_a_whole_uuid_is_preferred_over_a_longer_match() -> None:
    longer = machine(gpu(0, "GPU-12", "0:1:0.0"), gpu(1, "GPU-123", "0:2:0.0"))
    assert selected("GPU-12", inventory=longer).uuids == ("GPU-12",)


def test_an_index_is_refused_on_a_machine_without_gpus() -> None:
    assert selected("all", inventory=machine()).uuids == ()
    assert selected(inventory=machine()).gpus == ()
    with pytest.raises(UnknownDeviceError, match="none at all"):
        selected("0", inventory=machine())


def test_an_error_does_not_list_all_of_many_gpus() -> None:
    many = machine(*(gpu(n, f"GPU-{n:04}", f"0:{n:x}:0.0") for n in range(64)))
    with pytest.raises(UnknownDeviceError, match="and 60 more"):
        selected("64", inventory=many)


def test_a_name_is_found_only_in_the_given_name_spaces() -> None:
    assert [device.id for device in select(["gpu1"], MACHINE, names)] == [B]
    with pytest.raises(UnknownDeviceError):
        select(["gpu1"], MACHINE, names, ("index", "uuid", "bus_id", "mig"))
    with pytest.raises(UnknownDeviceError):
        select(["1"], MACHINE, names, ("uuid",))


# Nodes ----------------------------------------------------------------------------------------


GID = 44


@pytest.mark.parametrize(
    ("mode", "gid", "group"),
    [
        (0o660, GID, GID),
        (0o640, GID, GID),
        (0o664, GID, GID),
        (0o666, GID, 0),
        (0o644, GID, 0),
        (0o600, GID, 0),  # the group has no access, so no process gets it
        (0o660, 0, 0),
        (0o660, NOBODY, 0),
    ],
)
def test_a_nodes_group_is_given_only_if_its_mode_requires_it(
    mode: int, gid: int, group: int
) -> None:
    assert DeviceNode("/dev/a", 1, 2, mode, 0, gid).group == group
