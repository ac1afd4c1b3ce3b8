"""Agreement of the runtime, the hook and `gpuhook explain` about the same bundle.

All three run completely, up to the text of config.json and the operations that are executed.
Only the code that touches a container is replaced.
"""

import json
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import own
import pytest
from machines import gpu, machine, mig

from gpuhook import inject, prestart_hook, runtime_shim
from gpuhook.base.cgroup import access
from gpuhook.base.config.loader import load
from gpuhook.base.container.changes import ContainerRootfs, Journal
from gpuhook.base.container.rootfs import PATH_FLAGS
from gpuhook.base.errors import GpuhookError
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.base.oci.spec import read_spec
from gpuhook.core.plan.operations import Plan, usable
from gpuhook.core.records import records
from gpuhook.tools.cli._explanation import Explanation

SPECS = 300
NAMES = [
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "CUDA_VERSION",
    "NVIDIA_REQUIRE_X", "NVIDIA_DISABLE_REQUIRE", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS", "SWARM",
    "NVIDIA_MIG_CONFIG_DEVICES", "PATH",
]  # fmt: skip
WORDS = [
    "all", "none", "void", "0", "1", "0-1", "0:1", "GPU-0", "nvidia.com/gpu=0", "compute", "9.0",
    "utility", "cuda>=12", "enabled", "true", "../0", "", " ", "bogus", "é", "\udcff", "\n", "a/b",
    "runtime.nvidia.com/gpu=all", "graphics", "7", "3",
]  # fmt: skip
ROOT = "/var/run/nvidia-container-devices"
PLACES = [ROOT, f"{ROOT}/0", f"{ROOT}/cdi/nvidia.com/gpu/1", f"{ROOT}/imex/3", f"{ROOT}X/0", "/x"]
# Images, as the files in them that decide where the driver's files go.
IMAGES = {
    "debian": [f"{own.FOLDER[1:]}/libc.so.6", "etc/debian_version"],
    "fedora": ["usr/lib64/libc.so.6"],
    "alpine": [f"lib/ld-musl-{own.MACHINE}.so.1"],
}
RULES: list[list[dict[str, Any]]] = [
    [],
    [{"allow": False, "access": "rwm"}],
    [{"allow": True, "access": "rwm"}],
    [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c", "major": 195, "access": "rw"}],
]


def value(source: random.Random) -> str:
    return ",".join(source.choices(WORDS, k=source.randrange(3)))


def random_spec(source: random.Random) -> dict[str, Any]:
    env = [f"{source.choice(NAMES)}={value(source)}" for _ in range(source.randrange(5))]
    if source.random() < 0.5:
        env.append(f"NVIDIA_VISIBLE_DEVICES={source.choice(['all', '0', '1', '0:1', 'none'])}")
    mounts = [
        {"source": source.choice(["/dev/null", "//dev/null", "/x"]), "destination": place}
        for place in source.sample(PLACES, source.randrange(3))
    ]
    capabilities = {"bounding": source.sample(["CAP_SYS_ADMIN", "CAP_KILL"], source.randrange(3))}
    return {
        "ociVersion": "1.0.2",
        "process": {"env": env, "capabilities": capabilities},
        "root": {"path": source.choice(list(IMAGES))},
        "mounts": mounts,
        "annotations": {"cdi.k8s.io/a": value(source)} if source.random() < 0.2 else {},
        "linux": {
            "namespaces": [{"type": "mount"}] if source.random() < 0.95 else [],
            "resources": {"devices": source.choice(RULES)},
        },
    }


def config_file(source: random.Random, path: Path) -> None:
    """Write a config.toml with random settings."""
    answers = [str(source.random() < 0.5).lower() for _ in range(3)]
    mode = source.choice(["hook", "spec", "auto", "legacy", "jit-cdi", "cdi"])
    path.write_text(f"""
        accept-nvidia-visible-devices-envvar-when-unprivileged = {answers[0]}
        accept-nvidia-visible-devices-as-volume-mounts = {answers[1]}
        disable-require = {answers[2]}
        supported-driver-capabilities = "{source.choice(["all", "compute,utility"])}"
        swarm-resource = "{source.choice(["", "SWARM"])}"
        nvidia-container-runtime.mode = "{mode}"
        nvidia-container-runtime.debug = "{path.parent}/runtime.log"
        gpuhook.state-dir = "{path.parent}/state"
        gpuhook.helper = false
    """)


class Stage:
    """A host with two GPUs, one of them with MIG devices, and a bundle."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.spec = folder / "config.json"
        self.config = folder / "config.toml"
        self.executed: list[Plan] = []
        (folder / "bin").mkdir()
        (folder / "bin/gpuhook-prestart").touch(mode=0o755)
        for image, files in IMAGES.items():
            for file in files:
                (folder / image / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / image / file).touch()
        found = machine(gpu(0, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22))), gpu(1, 1))
        monkeypatch.setattr("gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: found)
        monkeypatch.setattr(inject, "open_container", self.open_container)
        monkeypatch.setattr(inject, "prepare", lambda *_: None)
        monkeypatch.setattr(inject, "allow_devices", lambda *_, **__: "")
        monkeypatch.setattr(inject, "apply", lambda plan, _: self.executed.append(plan))
        monkeypatch.setattr(records, "RecordWriter", lambda *_, **_facts: nullcontext())

    def open_container(self, pid: int, root: str) -> ContainerRootfs:
        process = os.open(f"/proc/{pid}", PATH_FLAGS)
        return ContainerRootfs(os.open(root, PATH_FLAGS), root, Journal(), (0, 0), process)

    def shim(self) -> str:
        """Have gpu-py edit the bundle; return its reason if it refuses to."""
        words = ["create", "--bundle", str(self.folder), "id"]
        try:
            runtime_shim.prepare_bundle(
                Arguments(words), load(str(self.config)), str(self.folder / "bin/gpu-py")
            )
        except GpuhookError as error:
            return f"{error.code}: {error}"
        return ""

    def hook(self) -> "str | list[dict[str, Any]]":
        """Return the operations that the hook executes, or its reason to refuse the container."""
        self.executed.clear()
        state = {"id": "id", "pid": os.getpid(), "bundle": str(self.folder)}
        try:
            prestart_hook.run(json.dumps(state).encode(), load(str(self.config)))
        except GpuhookError as error:
            return f"{error.code}: {error}"
        return [op.to_json() for plan in self.executed for op in usable(plan.operations)[0]]

    def explain(self) -> dict[str, Any]:
        spec = read_spec(str(self.spec))
        explanation = Explanation()
        explanation.follow(spec, spec.root_path, str(self.config))
        assert bool(explanation.to_text())
        return explanation.to_json()


def of_kind(explained: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [op for op in explained["operations"] if op["kind"] == kind]


def assert_rules(before: dict[str, Any], after: dict[str, Any], explained: dict[str, Any]) -> None:
    """Check that every explained device is allowed afterwards, and that nothing else was added."""
    old, new = (spec["linux"]["resources"]["devices"] for spec in (before, after))
    pairs = [(op["major"], op["minor"]) for op in of_kind(explained, "allow-device")]
    assert new[: len(old)] == old
    assert {(rule["major"], rule["minor"]) for rule in new[len(old) :]} <= set(pairs)
    assert access.allowed(new, pairs) == set(pairs)


def assert_spec_mode(
    before: dict[str, Any], after: dict[str, Any], explained: dict[str, Any]
) -> None:
    """Check that the written nodes and mounts are those that were explained."""
    nodes = [(node["path"], node["major"], node["minor"]) for node in after["linux"]["devices"]]
    shown = [(op["destination"], op["major"], op["minor"]) for op in of_kind(explained, "device")]
    assert nodes == shown
    written = [
        (mount["source"], mount["destination"], mount["options"])
        for mount in after["mounts"][len(before["mounts"]) :]
    ]
    binds = [
        (op["source"], op["destination"], ["bind", "rprivate", *op["options"]])
        for op in of_kind(explained, "bind")
    ]
    assert written == binds
    assert {op["kind"] for op in explained["operations"]} <= {"allow-device", "device", "bind"}


def check(stage: Stage) -> str:
    """Compare all three on the current bundle; return the outcome."""
    before = json.loads(stage.spec.read_text())
    explained = stage.explain()
    alone = stage.hook()
    refusal = stage.shim()
    after = json.loads(stage.spec.read_text())
    error = explained["error"]
    if error is not None:
        text = f"{error['code']}: {error['message']}"
        assert refusal == text
        # Only gpu-py applies CDI specs, and without gpu-py the container isn't started.
        documents = any(request["cdi_devices"] for request in explained["requests"])
        assert alone == text or (documents and isinstance(alone, list))
        assert after == before
        return f"refused: {error['code']}"
    assert refusal == ""
    if explained["mode"] is None:
        assert alone == explained["operations"] == []
        assert after == before
        return "nothing"
    assert_rules(before, after, explained)
    logged = json.loads((stage.folder / "runtime.log").read_text().splitlines()[-1])
    assert (logged["mode"], logged["devices"]) == (explained["mode"], explained["selected"])
    if explained["mode"] == "spec":
        assert "hooks" not in after
        assert_spec_mode(before, after, explained)
        assert isinstance(alone, list)
        assert all(op in alone for op in explained["undone"])
    else:
        [hook] = after["hooks"]["prestart"]
        assert hook["path"] == f"{stage.folder}/bin/gpuhook-prestart"
        assert (after["mounts"], explained["undone"]) == (before["mounts"], [])
        assert stage.hook() == alone == explained["operations"] != []
    return str(explained["mode"])


def test_runtime_hook_and_explain_agree_on_random_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(20)  # noqa: S311 - cases, no secrets
    stage = Stage(tmp_path, monkeypatch)
    kinds = set()
    for number in range(SPECS):
        if number % 30 == 0:
            config_file(source, stage.config)
        stage.spec.write_text(json.dumps(random_spec(source)))
        kinds.add(check(stage))
    codes = ("request", "requirement", "spec", "unknown-device", "unsupported-capability")
    assert kinds == {"nothing", "hook", "spec", *(f"refused: {code}" for code in codes)}
