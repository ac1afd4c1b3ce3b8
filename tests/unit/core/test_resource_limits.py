"""Limits that [gpuhook.containers] raises for containers with devices."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from machines import gpu, machine

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import ConfigError
from gpuhook.base.oci.spec import Spec
from gpuhook.core import edit, resource_limits
from gpuhook.vendors import registry

GIB, MOST = 1 << 30, (1 << 64) - 1
ALL = "NVIDIA_VISIBLE_DEVICES=all"
SETTINGS = '[gpuhook.containers]\nmemlock = "unlimited"\nstack = "64MiB"\nshm-size = "8GiB"\n'
SHM = {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid"]}


@pytest.fixture(autouse=True)
def _may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits, "_may_raise", lambda: True)


def shm(*options: str, **more: Any) -> dict[str, Any]:
    return {**SHM, "options": ["nosuid", *options], **more}


def made(config: str = SETTINGS, memory: int = 0, **fields: Any) -> dict[str, Any]:
    """Return the config.json of a container with devices, after limits are raised."""
    data: dict[str, Any] = {"process": {"env": [ALL]}, "mounts": [], **fields}
    if memory:
        data["linux"] = {"resources": {"memory": {"limit": memory}}}
    found: dict[str, Any] = resource_limits.apply(
        Spec("config.json", json.dumps(data)), loads(config)
    ).data
    return found


def rlimits(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {each["type"]: (each["soft"], each["hard"]) for each in found["process"]["rlimits"]}


def test_low_process_limits_are_raised_to_the_settings() -> None:
    others = [
        {"type": "RLIMIT_NOFILE", "soft": 1, "hard": 2},
        {"type": "RLIMIT_MEMLOCK", "soft": 65536, "hard": 65536},
    ]
    found = rlimits(made(process={"rlimits": others}))
    assert found["RLIMIT_NOFILE"] == (1, 2)
    assert found["RLIMIT_MEMLOCK"] == (MOST, MOST)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if 0 <= soft < 64 << 20:
        assert found["RLIMIT_STACK"] == (64 << 20, max(64 << 20, hard % (1 << 64)))


def test_limits_are_never_lowered() -> None:
    high = [
        {"type": "RLIMIT_MEMLOCK", "soft": MOST, "hard": MOST},
        {"type": "RLIMIT_STACK", "soft": GIB, "hard": MOST},
    ]
    spec = Spec("config.json", json.dumps({"process": {"rlimits": high}}))
    assert resource_limits.apply(spec, loads(SETTINGS)).text == spec.text
    found = rlimits(
        made(process={"rlimits": [{"type": "RLIMIT_STACK", "soft": 1 << 20, "hard": MOST}]})
    )
    assert found["RLIMIT_STACK"] == (64 << 20, MOST)


def test_hard_limits_stay_unchanged_where_raising_is_not_permitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource_limits, "_may_raise", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 1 << 20))
    assert rlimits(made())["RLIMIT_MEMLOCK"] == (1 << 20, 1 << 20)


@pytest.mark.parametrize("size", ["65536k", "67108864", "64m", "64M"])
@pytest.mark.parametrize("place", ["/dev/shm", "/dev//shm/", "/dev/./shm"])
def test_an_engines_default_shared_memory_size_is_raised(size: str, place: str) -> None:
    other = {"destination": "/dev", "type": "tmpfs", "options": ["size=65536k"]}
    [first, found] = made(mounts=[other, shm(f"size={size}", "nodev", destination=place)])["mounts"]
    assert first == other
    assert found["options"] == ["nosuid", f"size={8 * GIB}", "nodev"]


@pytest.mark.parametrize(
    "mounts",
    [
        [],
        [shm("size=1g")],
        [shm("size=128m")],
        [shm("size=32m")],
        [shm()],
        [shm("size=50%")],
        [shm("size=64m", "size=1g")],
        [shm("size=64m"), shm("size=64m")],
        [shm("size=64m", type="ext4")],
        [shm("rbind", type="bind", source="/dev")],
        [shm("rbind", type="bind", source="relative")],
        [shm("rbind", type="bind", source="/nothing/there")],
        [shm("size=64m", options=None)],
        [{**SHM, "destination": "/run/shm"}],
        ["rubbish"],
    ],
)
def test_other_sizes_of_shared_memory_stay_unchanged(mounts: list[Any]) -> None:
    config = '[gpuhook.containers]\nshm-size = "8GiB"\n'
    assert made(config, mounts=mounts)["mounts"] == mounts


def test_shared_memory_in_percent_is_computed_and_never_lowered() -> None:
    config = '[gpuhook.containers]\nshm-size = "50%"\n'
    [found] = made(config, 4 * GIB, mounts=[shm("size=64m")])["mounts"]
    assert f"size={2 * GIB}" in found["options"]
    [found] = made(config, 64 << 20, mounts=[shm("size=64m")])["mounts"]
    assert "size=64m" in found["options"], "less is not more"
    [found] = made(config, mounts=[shm("size=64m")])["mounts"]
    assert "size=64m" not in found["options"], "of the host's"


@pytest.mark.parametrize(
    ("key", "value"),
    [("memlock", "50%"), ("memlock", "all"), ("stack", "8MB"), ("shm-size", "unlimited"),
     ("shm-size", "0")],
)  # fmt: skip
def test_invalid_container_limit_settings_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"containers.{key} must be"):
        loads(f'[gpuhook.containers]\n{key} = "{value}"\n')


@pytest.mark.parametrize(
    ("env", "nodes", "expected"),
    [
        (ALL, [], True),
        ("NVIDIA_VISIBLE_DEVICES=none", [], False),
        ("NVIDIA_VISIBLE_DEVICES=void", [], False),
        ("NVIDIA_VISIBLE_DEVICES=void", [(195, 0)], True),
        ("NVIDIA_VISIBLE_DEVICES=void", [(1, 3)], False),
        ("A=b", [(195, 0)], False),
    ],
)
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_only_containers_with_devices_get_raised_limits(
    env: str, nodes: list[tuple[int, int]], expected: bool, mode: str, tmp_path: Path
) -> None:
    """Containers have devices if they request one, or if an engine gave them one by a CDI spec."""
    devices = [{"path": f"/dev/x{minor}", "type": "c", "major": major, "minor": minor}
               for major, minor in nodes]  # fmt: skip
    (tmp_path / "gpuhook-prestart").touch(0o755)
    (tmp_path / "rootfs").mkdir()
    data = {
        "process": {"env": [env]},
        "root": {"path": str(tmp_path / "rootfs")},
        "mounts": [shm("size=64m")],
        "linux": {"devices": devices, "namespaces": [{"type": "mount"}]},
    }
    config = loads(f'{SETTINGS}[nvidia-container-runtime]\nmode = "{mode}"\n')
    spec = Spec(str(tmp_path / "config.json"), json.dumps(data))
    known = {"nvidia": registry.BUILT_IN["nvidia"]}
    inventories = {"nvidia": machine(gpu(0, 0))}
    found = edit.edit(spec, config, known, str(tmp_path), inventories=inventories)
    text = spec.text if found is None else found.finish().text
    assert (f"size={8 * GIB}" in text) is expected
    assert ("RLIMIT_MEMLOCK" in text) is expected


def test_a_pods_limits_are_raised_but_not_lowered() -> None:
    config = loads(SETTINGS)
    every = {"type": "RLIMIT_MEMLOCK", "hard": MOST, "soft": MOST}
    stack = {"type": "RLIMIT_STACK", "hard": 64 << 20, "soft": 64 << 20}
    assert resource_limits.of_pod({}, config) == [every], "an engine's stack may be larger"
    low = {"RLIMIT_MEMLOCK": "65536", "RLIMIT_STACK": "65536"}
    assert resource_limits.of_pod(low, config) == [every, stack]
    assert resource_limits.of_pod(dict.fromkeys(low, str(MOST)), config) == []
    assert resource_limits.of_pod(low, loads("")) == []
