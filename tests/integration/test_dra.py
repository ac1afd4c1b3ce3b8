"""The command gpuhook dra, with simulated drivers: GPUs, MIG devices and lost devices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_reader import check, chosen
from harness.commands import run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

Dra = Callable[..., list[Any]]
TYPE = 'device.attributes["gpu.nvidia.com"].type == '


@pytest.fixture
def machine(installation: Installation, tmp_path: Path) -> Callable[..., Driver]:
    return lambda *options: simulate(installation, tmp_path / "root", *options)


@pytest.fixture
def dra(installation: Installation, tmp_path: Path) -> Dra:
    """A function that runs gpuhook dra for the simulated machine in this test's folder."""

    config = write_config(tmp_path / "config", tmp_path / "root", ["runc"])

    def call(*words: str, release: tuple[int, int] = (1, 35)) -> list[Any]:
        argv = [str(installation.command), "dra", "--dry-run", "--node", "n1", *words]
        version = ".".join(map(str, release))
        said = run([*argv, "--kubernetes", version, "--config", str(config)])
        assert said.status == 0, said.stderr
        call.said = said.stderr  # type: ignore[attr-defined]
        return check(yaml.safe_load_all(said.stdout), release)

    return call


def names(slices: list[Any]) -> list[str]:
    return [device.name for each in slices for device in each.spec.devices or []]


def consumers(slices: list[Any]) -> dict[str, dict[str, int]]:
    """Return the counters that each device uses, except memory, which has a unit."""
    return {
        device.name: {
            name: int(value.value)
            for used in device.consumes_counters
            for name, value in used.counters.items()
            if name != "memory"
        }
        for each in slices
        for device in each.spec.devices or []
        if device.consumes_counters
    }


def test_published_gpus_match_cel_selectors(machine: Callable[..., Driver], dra: Dra) -> None:
    driver = machine("--gpus", "8", "--set", "model=H200")
    slices = dra()
    assert {*names(slices)} == {f"gpu-{gpu.uuid.removeprefix('GPU-')}" for gpu in driver.gpus}
    about = 'device.attributes["gpu.nvidia.com"]'
    claim = (
        f'{TYPE}"gpu" && {about}.productName == "NVIDIA H200" && {about}.brand == "Nvidia" && '
        f'{about}.architecture == "Hopper" && '
        f'{about}.cudaComputeCapability.compareTo(semver("9.0.0")) >= 0 && '
        f'{about}.driverVersion.compareTo(semver("{_three(driver.version)}")) == 0 && '
        'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("141Gi")) < 0 && '
        'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("140Gi")) > 0'
    )
    assert len(chosen(slices, claim)) == 8
    near = 'device.attributes["resource.kubernetes.io"].numaNode == 1'
    far = 'device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:00"'
    assert len(chosen(slices, near)) == 4
    assert {*chosen(slices, near)} & {*chosen(slices, far)} == set()


def _three(version: str) -> str:
    return ".".join(str(int(word)) for word in version.split("."))


def test_json_output_is_a_list_for_kubectl(
    installation: Installation, machine: Callable[..., Driver], tmp_path: Path
) -> None:
    machine("--gpus", "1")
    config = write_config(tmp_path / "config", tmp_path / "root", ["runc"])
    words = ["dra", "--dry-run", "--format", "json", "--config", str(config)]
    said = run([str(installation.command), *words])
    made = json.loads(said.stdout)
    assert (made["apiVersion"], made["kind"]) == ("v1", "List")
    assert [each["kind"] for each in made["items"]] == [
        "DeviceClass",
        "DeviceClass",
        "ResourceSlice",
    ]


@pytest.mark.parametrize("release", [(1, 34), (1, 35)])
def test_existing_mig_devices_are_published_with_their_slots(
    release: tuple[int, int], machine: Callable[..., Driver], dra: Dra
) -> None:
    driver = machine(
        "--gpus", "3", "--set", "model=H100", "--set", "mig=0:1g.10gb,1g.10gb,3g.40gb",
        "--set", "mig=1:",
    )  # fmt: skip
    slices = dra(release=release)
    assert "GPU 1 is in MIG mode and has no MIG device" in dra.said  # type: ignore[attr-defined]
    first, _, third = (f"gpu-{gpu.uuid.removeprefix('GPU-')}" for gpu in driver.gpus)
    assert chosen(slices, f'{TYPE}"gpu"') == [third]
    migs = chosen(slices, f'{TYPE}"mig"')
    assert len(migs) == 3
    assert all(name.startswith(f"{first}-mig-") for name in migs)
    profile = 'device.attributes["gpu.nvidia.com"].profile == "1g.10gb"'
    memory = 'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("9Gi")) > 0'
    assert len(chosen(slices, f'{TYPE}"mig" && {profile} && {memory}')) == 2
    # No part of the GPU is used twice.
    used = [*consumers(slices).values()]
    slots = [name for each in used for name in _slots(each)]
    assert len(slots) == len({*slots}) == 6


@pytest.mark.parametrize("release", [(1, 34), (1, 35)])
def test_all_possible_mig_devices_are_published_with_dynamic_mig(
    release: tuple[int, int], machine: Callable[..., Driver], dra: Dra
) -> None:
    options = (
        "--set",
        "model=A100",
        "--set",
        "mig=0:",
        "--set",
        "mig=1:",
        "--set",
        "mig=2:1g.10gb",
    )
    driver = machine("--gpus", "3", *options)
    slices = dra("--dynamic-mig", release=release)
    first, second, third = (f"gpu-{gpu.uuid.removeprefix('GPU-')}" for gpu in driver.gpus)
    assert chosen(slices, f'{TYPE}"gpu"') == [first, second]
    migs = chosen(slices, f'{TYPE}"mig"')
    assert [name for name in migs if name.startswith(third)] == [f"{third}-mig-1g10gb-19-0"]
    used = consumers(slices)
    # If the whole GPU is allocated, no part of it is free. If a part is allocated, the whole GPU
    # isn't free.
    whole = used[first]
    parts = {name: used[name] for name in migs if name.startswith(first)}
    assert len(parts) == 25
    for name, part in parts.items():
        assert any(count for key, count in part.items() if key.startswith("memory-slice-")), name
        assert all(count <= whole[key] for key, count in part.items())
    # 3g.40gb at 0 and 3g.40gb at 4 don't overlap. 4g.40gb at 0 overlaps with the first.
    halves = [parts[f"{first}-mig-3g40gb-9-{start}"] for start in (0, 4)]
    assert not {*_slots(halves[0])} & {*_slots(halves[1])}
    assert {*_slots(halves[0])} & {*_slots(parts[f"{first}-mig-4g40gb-5-0"])}


def _slots(used: dict[str, int]) -> list[str]:
    return [name for name in used if name.startswith("memory-slice-")]


def test_device_names_are_unchanged_when_a_gpu_is_lost(
    installation: Installation, machine: Callable[..., Driver], dra: Dra, tmp_path: Path
) -> None:
    machine("--gpus", "4")
    before = names(dra())
    run([str(installation.command), "simulate", str(tmp_path / "root"), "--lost", "1"])
    slices = dra()
    assert sorted(names(slices)) == sorted(before)
    tainted = {
        device.name: [taint.key for taint in device.taints]
        for each in slices
        for device in each.spec.devices
        if device.taints
    }
    assert tainted == {before[1]: ["gpu.nvidia.com/gpu-lost"]}
    assert "fallen off the bus" in dra.said  # type: ignore[attr-defined]


def test_device_names_are_unchanged_when_minors_change(
    machine: Callable[..., Driver], dra: Dra
) -> None:
    machine("--gpus", "4", "--set", "minors=3,0,1,2")
    before = names(dra())
    machine("--gpus", "4", "--set", "minors=0,1,2,3")
    assert names(dra()) == before


def test_a_dry_run_leaves_no_files(
    machine: Callable[..., Driver], dra: Dra, tmp_path: Path
) -> None:
    machine("--gpus", "2", "--set", "lost=1")
    before = sorted(tmp_path.rglob("*"))
    assert len(names(dra())) == 2
    assert sorted(tmp_path.rglob("*")) == before


WITHOUT = {
    "a version": (("--kubernetes", "1.34"), "--kubernetes is for --dry-run"),
    "a format": (("--format", "json"), "--format is for --dry-run"),
    "places": (("--dry-run", "--cdi-folder", "/x"), "--cdi-folder isn't for --dry-run"),
    "metadata": (("--dry-run", "--device-metadata"), "--device-metadata isn't for --dry-run"),
    "metrics": (("--dry-run", "--metrics-listen", ":1"), "--metrics-listen isn't for --dry-run"),
    "a recovery": (("--dry-run", "--recovery", "5"), "--recovery isn't for --dry-run"),
    "a probe": (("--probe", "--dry-run"), "--dry-run isn't for --probe"),
    "a probe's node": (("--probe", "--node", "a"), "--node isn't for --probe"),
    "no path": (("--plugins", "x"), "--plugins 'x' isn't an absolute path"),
    "an empty path": (("--cdi-folder", ""), "--cdi-folder '' isn't an absolute path"),
    "no time": (("--recovery", "-1"), "recovery"),
    "no number": (("--recovery", "nan"), "recovery"),
}


@pytest.mark.parametrize(("words", "said"), WITHOUT.values(), ids=[*WITHOUT])
def test_options_without_effect_are_refused(
    words: tuple[str, ...], said: str, installation: Installation
) -> None:
    done = run([str(installation.command), "dra", *words])
    assert done.status != 0
    assert said in done.stderr


@pytest.mark.parametrize("word", ["nobody", "nvidia=1", "nvidia=x", "nvidia=129", "nvidia="])
def test_invalid_shares_are_refused(word: str, installation: Installation) -> None:
    said = run([str(installation.command), "dra", "--dry-run", "--share", word])
    assert said.status == 1
    assert "Write " in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("word", ["nobody=x", "amd"])
def test_an_invalid_driver_option_is_refused(word: str, installation: Installation) -> None:
    said = run([str(installation.command), "dra", "--dry-run", "--driver", word])
    assert said.status == 1
    assert "VENDOR=NAME" in said.stderr
    assert "Traceback" not in said.stderr
