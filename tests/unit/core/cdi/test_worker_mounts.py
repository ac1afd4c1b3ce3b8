"""CDI specs applied with a hook worker, and the mounts that are left to the worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from machines import gpu, machine

from gpuhook.base.config.model import Config
from gpuhook.base.errors import SpecError
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi import apply, hook_args, worker_mounts
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.resolve import Allocation
from gpuhook.vendors.nvidia.vendor import VENDOR
from gpuhook.vendors.registry import BUILT_IN

WORDS = ["12", "3", "4", "5", "/bundle"]
FOLDER = "/x"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A driver root with the files that the CDI spec mounts."""
    folder = tmp_path / "driver"
    for file in MOUNTED:
        (folder / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.lstrip("/")).touch()
    return folder


def made() -> dict[str, Any]:
    inventory = machine(gpu(0, 3), gpu(1, 0))
    return generate(
        SpecSource(VENDOR, inventory, Config(), f"{FOLDER}/gpuhook-cdi-hook"), ("index",)
    ).document


MOUNTED = [each["containerPath"] for each in made()["containerEdits"]["mounts"]]


def edits(driver: Path) -> dict[str, Any]:
    """Return the edits for GPU 0 in a generated CDI spec, with files in that driver root."""
    document = made()
    [device] = [each for each in document["devices"] if each["name"] == "0"]
    merged = apply.merge([document["containerEdits"], device["containerEdits"]])
    merged["mounts"] = [
        {**each, "hostPath": f"{driver}{each['containerPath']}"} for each in merged["mounts"]
    ]
    for node in merged["deviceNodes"]:
        node.update(type="c", major=195, minor=3)
    return merged


def spec_with(*mounts: Any, **more: Any) -> Spec:
    data = {
        "process": {"env": []},
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/proc", "source": "proc", "type": "proc"}, *mounts],
        "linux": {"namespaces": [{"type": "mount"}]},
        **more,
    }
    return Spec("/bundle/config.json", json.dumps(data))


def volume(place: str) -> dict[str, Any]:
    return {"destination": place, "source": "/srv/data", "options": ["rbind", "rw"]}


def applied(
    spec: Spec, edited: dict[str, Any], words: list[str] = WORDS, *, names: tuple[str, ...] = ()
) -> Spec:
    """Return the edited spec; if ``words`` are given, a worker does some of its mounts."""
    devices = names or ("nvidia.com/gpu=0",)
    resolved = Allocation([], Config(), BUILT_IN, cdi_devices=devices)
    if not words:
        return apply.apply_to_spec(spec, edited)
    found, place, kind = worker_mounts.apply_to_spec(
        spec, edited, resolved.cdi_devices, resolved.vendors, Config(), FOLDER
    )
    assert kind == "nvidia.com/gpu"
    return worker_mounts.with_words(found, place, ["--helper", *words])


def places(spec: Spec) -> list[str]:
    return [each["destination"] for each in spec.data["mounts"]]


def moved(spec: Spec) -> list[str]:
    return [place for _, place in hook_args.mounts_of(spec, "nvidia.com/gpu")]


def test_the_hook_worker_makes_all_mounts_of_generated_cdi_specs(driver: Path) -> None:
    edited = edits(driver)
    spec = applied(spec_with(), edited)
    assert places(spec) == ["/proc"]
    assert sorted(moved(spec)) == sorted(MOUNTED)
    sources = {source for source, _ in hook_args.mounts_of(spec, "nvidia.com/gpu")}
    assert sources == {each["hostPath"] for each in edited["mounts"]}
    [hook] = spec.hooks("createContainer")
    assert hook["args"][1:7] == ["--helper", *WORDS]
    assert hook["args"][-1] == "nvidia.com/gpu"


def test_without_a_hook_worker_the_runtime_makes_the_mounts(driver: Path) -> None:
    spec = applied(spec_with(), edits(driver), [])
    assert sorted(places(spec)) == sorted(["/proc", *MOUNTED])
    assert moved(spec) == []
    assert spec.text == apply.apply_to_spec(spec_with(), edits(driver)).text


def test_all_but_the_mounts_is_the_same_without_a_hook_worker(driver: Path) -> None:
    plain, helped = applied(spec_with(), edits(driver), []), applied(spec_with(), edits(driver))
    for each in (plain, helped):
        each.data.pop("mounts")
    assert hook_args.without_words(helped).data["hooks"] == plain.data["hooks"]
    plain.data.pop("hooks")
    helped.data.pop("hooks")
    assert helped.data == plain.data


@pytest.mark.protects(
    "volume-over-mount",
    "CDI mounts that overlap a volume are mounted in the order of config.json",
    instead="others: list[str] = []",
)
@pytest.mark.parametrize(
    "place",
    [
        "/", "/usr", "/usr/", "//usr", "/usr/lib", "/usr/./lib", "/usr/lib/x86_64-linux-gnu",
        f"{LIBRARY}/", f"{LIBRARY}/below", "/lib/x86_64-linux-gnu",
        "/lib/x86_64-linux-gnu/libcuda.so.580.65.06", "/lib", "/usr/lib/../lib",
    ],
)  # fmt: skip
def test_mounts_overlapping_a_volume_are_left_to_the_runtime(driver: Path, place: str) -> None:
    """The order of config.json decides whether a mount ends up in the volume or below it."""
    spec = applied(spec_with(volume(place)), edits(driver))
    assert LIBRARY not in moved(spec)
    assert LIBRARY in places(spec)


def test_a_volume_at_a_cdi_mounts_destination_is_replaced(driver: Path) -> None:
    plain, helped = (
        applied(spec_with(volume(LIBRARY)), edits(driver), words) for words in ([], WORDS)
    )
    assert places(plain).count(LIBRARY) == 1
    assert {**volume(LIBRARY)} not in plain.data["mounts"]
    assert places(helped) == ["/proc"]


@pytest.mark.parametrize("place", ["/data", "/usr/lib/x86_64", "/usr/local", "/libx", "/etc/hosts"])
def test_mounts_apart_from_volumes_are_left_to_the_hook_worker(driver: Path, place: str) -> None:
    spec = applied(spec_with(volume(place)), edits(driver))
    assert LIBRARY in moved(spec)
    assert place in places(spec)


@pytest.mark.parametrize("entry", [{}, {"destination": 7}, "/usr", None])
def test_a_config_mount_without_destination_loses_no_driver_mount(driver: Path, entry: Any) -> None:
    if not isinstance(entry, dict):
        entry = {"source": entry}
    spec = applied(spec_with(entry), edits(driver))
    assert sorted([*moved(spec), *(each for each in places_of(spec) if each in MOUNTED)]) == sorted(
        MOUNTED
    )


def places_of(spec: Spec) -> list[Any]:
    return [each.get("destination") for each in spec.data["mounts"]]


@pytest.mark.parametrize(
    "change",
    [
        {"options": ["ro", "nosuid", "nodev", "rbind"]},
        {"options": ["ro", "nosuid", "nodev", "rbind", "rprivate", "noexec"]},
        {"options": ["rw", "nosuid", "nodev", "rbind", "rprivate"]},
        {"options": []},
        {"type": "bind"},
        {"hostPath": "/dev/null"},
        {"hostPath": "/etc"},
        {"hostPath": "/nowhere"},
    ],
)
def test_mounts_unlike_generated_ones_are_left_to_the_runtime(
    driver: Path, change: dict[str, Any]
) -> None:
    edited = edits(driver)
    edited["mounts"] = [
        {**each, **change} if each["containerPath"] == LIBRARY else each
        for each in edited["mounts"]
    ]
    spec = applied(spec_with(), edited)
    assert LIBRARY in places(spec)
    assert sorted(moved(spec)) == sorted(set(MOUNTED) - {LIBRARY})


def test_another_vendors_cdi_spec_leaves_all_mounts_to_the_runtime(driver: Path) -> None:
    names = ("nvidia.com/gpu=0", "maker.example/card=a")
    spec = applied(spec_with(), edits(driver), names=names)
    assert moved(spec) == []
    assert LIBRARY in places(spec)
    [hook] = spec.hooks("createContainer")
    assert hook["args"][1:7] == ["--helper", *WORDS]


def test_mounts_in_a_user_namespace_are_left_to_the_runtime(driver: Path) -> None:
    linux = {"namespaces": [{"type": "mount"}, {"type": "user"}]}
    assert moved(applied(spec_with(linux=linux), edits(driver))) == []


def test_mounts_too_many_for_one_argument_are_left_to_the_runtime(driver: Path) -> None:
    edited = edits(driver)
    [one] = [each for each in edited["mounts"] if each["containerPath"] == LIBRARY]
    edited["mounts"] = [{**one, "containerPath": f"/opt/{number:090}"} for number in range(900)]
    spec = applied(spec_with(), edited)
    assert moved(spec) == []
    assert len(places(spec)) == 901


def test_applying_a_spec_again_yields_the_same_spec(driver: Path) -> None:
    first = applied(spec_with(), edits(driver))
    again = applied(hook_args.without_words(first), edits(driver))
    assert again.data == first.data


@pytest.mark.parametrize(
    "word",
    ["", "{", "7", "[7]", '["ab"]', '[["/a"]]', '[["/a", "b"]]', "[[1, 2]]", '[["/a","/b","/c"]]'],
)
def test_an_invalid_mounts_argument_is_refused(word: str) -> None:
    args = ["gpuhook-cdi-hook", "--helper", *WORDS, "--mounts", word, "a/b"]
    hook = {"path": "/x/gpuhook-cdi-hook", "args": args}
    spec = spec_with(hooks={"createContainer": [hook]})
    with pytest.raises(SpecError, match="aren't pairs of paths"):
        hook_args.mounts_of(spec, "a/b")
    assert hook_args.mounts_of(spec, "c/d") == []
