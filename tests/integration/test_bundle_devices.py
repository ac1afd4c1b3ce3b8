"""Containers of runc and crun get exactly the GPUs they ask for, under every cgroup layout."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle, Spec
from harness.driver import Driver, run_with_driver_in_kernel
from harness.inside import GPU_MAJOR, Inside, look, seen
from harness.installation import Installation
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left

CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}


def look_inside(bundle: GpuBundle, driver: Driver) -> Inside:
    """Run the bundle's container with gpu-py and return what it saw."""
    bundle.command(*look(driver.minors))
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        return seen(bundle.start())


def assert_sees(inside: Inside, driver: Driver, *indices: int) -> None:
    """Assert that exactly the GPUs with these indices can be opened."""
    minors = {gpu.minor for gpu in driver.chosen(*indices)}
    nodes = CONTROL | {f"/dev/nvidia{minor}" for minor in minors}
    assert set(inside.nodes) == nodes
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert inside.gpu_minors == minors
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in driver.minors
    }


@pytest.mark.parametrize("bundle", ["busybox", "debian", "lib64"], indirect=True)
@pytest.mark.parametrize("indices", [[0, 2], [7]])
def test_a_container_gets_exactly_the_requested_gpus(
    bundle: GpuBundle, driver: Driver, indices: Iterable[int]
) -> None:
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={','.join(str(index) for index in indices)}")
    inside = look_inside(bundle, driver)
    assert_sees(inside, driver, *indices)


def run_with_the_kernels_driver(
    bundle: Bundle, runtime: str | Path, env: dict[str, str], driver: Driver
) -> list[str]:
    """Run the container where /proc/driver/nvidia shows all GPUs; return what it printed."""
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        return run_with_driver_in_kernel(bundle, runtime, driver, env).ok().stdout.splitlines()


@pytest.mark.protects(
    "proc-selected",
    "/proc/driver/nvidia shows only the selected GPUs",
    instead='binds = [f"gpus/{gpu.kernel_bus_id}" for gpu in inventory.gpus]',
)
@pytest.mark.protects(
    "proc-covered",
    "/proc/driver/nvidia is covered by a masked copy in the container",
    instead="<the statement>\ndel operations[0]",
)
@RUNTIMES
def test_proc_shows_exactly_the_requested_gpus(bundle: GpuBundle, driver: Driver) -> None:
    folder = driver.root / "proc/driver/nvidia"
    gpus = [f"gpus/{name}" for name in sorted(os.listdir(folder / "gpus"))]
    capabilities = [f"capabilities/gpu{minor}" for minor in sorted(driver.minors)]
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    script = "ls -d gpus/* capabilities/gpu*; busybox grep ModifyDeviceFiles params"
    bundle.command("sh", "-c", f"cd /proc/driver/nvidia; {script}")
    plain = run_with_the_kernels_driver(bundle, bundle.runtime, bundle.env, driver)
    assert plain == [*capabilities, *gpus, "ModifyDeviceFiles: 1"], "nothing else hides them"
    ours = run_with_the_kernels_driver(bundle, bundle.gpu_py, bundle.env, driver)
    assert ours == [gpus[0], gpus[2], "ModifyDeviceFiles: 0"]


@RUNTIMES
def test_nodes_have_the_numbers_of_the_host(bundle: GpuBundle, driver: Driver) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    inside = look_inside(bundle, driver)
    assert len(inside.nodes) == len(driver.gpus) + len(CONTROL)
    for path, (_, numbers) in inside.nodes.items():
        device = (driver.root / path.lstrip("/")).stat().st_rdev
        assert numbers == (device >> 8, device & 0xFF)


@pytest.mark.parametrize(
    ("settings", "indices"),
    [
        (["NVIDIA_VISIBLE_DEVICES=all"], range(8)),
        (["NVIDIA_VISIBLE_DEVICES=0"], [0]),
        (["NVIDIA_VISIBLE_DEVICES=5,1,3"], [1, 3, 5]),
        (["NVIDIA_VISIBLE_DEVICES=4,4"], [4]),
        (["NVIDIA_VISIBLE_DEVICES=none"], []),
        (["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=6"], [6]),
        (["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=none"], []),
        (["NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=2"], [2]),
    ],
)
@ONE
def test_visible_devices_variable_selects_gpus(
    bundle: GpuBundle, driver: Driver, settings: list[str], indices: Iterable[int]
) -> None:
    bundle.environ(*settings)
    inside = look_inside(bundle, driver)
    assert_sees(inside, driver, *indices)


@pytest.mark.parametrize("change", [str, str.upper], ids=["as it is", "upper case"])
@ONE
def test_gpus_are_selected_by_uuid_in_either_case(
    bundle: GpuBundle, driver: Driver, change: Callable[[str], str]
) -> None:
    uuids = [change(gpu.uuid).replace("GPU-", "GPU-") for gpu in driver.chosen(1, 6)]
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={','.join(uuids)}")
    inside = look_inside(bundle, driver)
    assert_sees(inside, driver, 1, 6)


@pytest.mark.parametrize(
    ("capabilities", "missing", "further"),
    [
        ("utility", {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}, set()),
        ("compute", set(), set()),
        ("all", set(), {"/dev/nvidia-modeset"}),
        ("compute,display", set(), {"/dev/nvidia-modeset"}),
    ],
)
@ONE
def test_capabilities_select_the_control_nodes(
    bundle: GpuBundle, driver: Driver, capabilities: str, missing: set[str], further: set[str]
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=3", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    inside = look_inside(bundle, driver)
    gpu = f"/dev/nvidia{driver.gpus[3].minor}"
    assert set(inside.nodes) == CONTROL - missing | further | {gpu}


@ONE
def test_device_rules_are_written_to_config_json(bundle: GpuBundle, driver: Driver) -> None:
    """A rule that only the cgroup had would be gone after ``systemctl daemon-reload``."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=2,5")
    bundle.start().ok()
    deny, *rules = bundle.spec()["linux"]["resources"]["devices"]
    assert deny == {"allow": False, "access": "rwm"}
    assert all(rule["allow"] and rule["type"] == "c" for rule in rules)
    numbers = sorted((rule["major"], rule["minor"]) for rule in rules)
    assert len(numbers) == len(set(numbers))
    nodes = CONTROL | {f"/dev/nvidia{gpu.minor}" for gpu in driver.chosen(2, 5)}
    devices = [(driver.root / node.lstrip("/")).stat().st_rdev for node in nodes]
    assert numbers == sorted((device >> 8, device & 0xFF) for device in devices)
    assert (GPU_MAJOR, driver.gpus[2].minor) in numbers


@ONE
def test_unknown_fields_of_config_json_are_kept(bundle: GpuBundle) -> None:
    strange = {"future": [1, 2.5, None, {"ключ": '\u2028 "\\'}], "big": 12345678901234567890}

    def mutate(spec: Spec) -> None:
        spec["x-unknown"] = strange
        spec["linux"]["x-unknown"] = strange
        spec["annotations"] = {"org.example/name": "value"}

    bundle.change(mutate)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    before = bundle.spec()
    bundle.start().ok()
    after = bundle.spec()
    hooks = after.pop("hooks")
    assert list(hooks) == ["prestart"]
    after["linux"]["resources"]["devices"] = before["linux"]["resources"]["devices"]
    assert after == before
    assert list(after["linux"]) == list(before["linux"])


@pytest.mark.protects(
    "hook-environment",
    "gpuhook's OCI hook runs with its own environment variables",
    instead='return spec.append(("hooks", "prestart"), [{"path": path, "args": args}])',
    only="hook_comes_last and runc-host",
)
@RUNTIMES
def test_hook_comes_last_and_once(bundle: GpuBundle, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    earlier = {"path": "/bin/sh", "args": ["sh", "-c", f"cat >/dev/null; echo ran >>{mark}"]}

    def mutate(spec: Spec) -> None:
        spec["hooks"] = {"prestart": [earlier], "poststop": [earlier]}

    bundle.change(mutate)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    for _ in range(2):  # engines restart a container with its previous config.json
        bundle.start().ok()
        first, ours = bundle.spec()["hooks"]["prestart"]
        assert first == earlier
        assert bundle.spec()["hooks"]["poststop"] == [earlier]
        assert Path(ours["path"]).is_absolute()
        assert ours["args"][0]
        assert isinstance(ours["env"], list)
        rules = bundle.spec()["linux"]["resources"]["devices"]
        assert len(rules) == len({json.dumps(rule, sort_keys=True) for rule in rules})
    assert mark.read_text() == "ran\n" * 4


@pytest.mark.protects(
    "second-hook",
    "a hook that the engine already added isn't added again",
    only="given_by_the_engine_too and runc-host",
)
@RUNTIMES
def test_a_hook_given_by_the_engine_too_is_not_added_twice(
    bundle: GpuBundle, installation: Installation, driver: Driver
) -> None:
    """``docker run --runtime=gpu-py --gpus`` and podman's hooks-dir add the hook as well."""
    bundle.by_hook()
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    inside = look_inside(bundle, driver)
    assert_sees(inside, driver, 0, 2)
    names = [Path(hook["path"]).name for hook in bundle.spec()["hooks"]["prestart"]]
    assert names.count(bundle.installation.hook.name) == 1
