"""The runtime, the hook and `gpuhook explain` see the same request in the same bundle."""

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpuhook import prestart_hook, resolve, runtime_shim
from gpuhook.cli.explain import Explanation
from gpuhook.config import Config, load
from gpuhook.errors import DriverError, GpuhookError, RequestError
from gpuhook.oci.runtime_argv import Arguments
from gpuhook.oci.spec import read_spec
from gpuhook.request.reader import Request, read_request

SPECS = 10_000
NAMES = [
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "CUDA_VERSION",
    "NVIDIA_REQUIRE_X", "NVIDIA_DISABLE_REQUIRE", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS", "SWARM",
    "NVIDIA_MIG_CONFIG_DEVICES", "PATH",
]  # fmt: skip
WORDS = [
    "all", "none", "void", "0", "1", "0-1", "0:1", "GPU-0", "nvidia.com/gpu=0", "compute", "9.0",
    "utility", "cuda>=12", "enabled", "true", "../0", "", " ", "bogus", "é", "\udcff", "\n", "a/b",
    "runtime.nvidia.com/gpu=all",
]  # fmt: skip
ROOT = "/var/run/nvidia-container-devices"
PLACES = [ROOT, f"{ROOT}/0", f"{ROOT}/cdi/nvidia.com/gpu/1", f"{ROOT}/imex/3", f"{ROOT}X/0", "/x"]


def value(source: random.Random) -> str:
    return ",".join(source.choices(WORDS, k=source.randrange(3)))


def random_spec(source: random.Random) -> dict[str, Any]:
    env = [f"{source.choice(NAMES)}={value(source)}" for _ in range(source.randrange(5))]
    mounts = [
        {"source": source.choice(["/dev/null", "//dev/null", "/x"]), "destination": place}
        for place in source.sample(PLACES, source.randrange(3))
    ]
    capabilities = {"bounding": source.sample(["CAP_SYS_ADMIN", "CAP_KILL"], source.randrange(3))}
    return {
        "ociVersion": "1.0.2",
        "process": {"env": env, "capabilities": capabilities},
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "annotations": {"cdi.k8s.io/a": value(source)} if source.random() < 0.2 else {},
        "linux": {"namespaces": [{"type": "mount"}]},
    }


def config_file(source: random.Random, path: Path) -> None:
    """A policy by chance."""
    answers = [str(source.random() < 0.5).lower() for _ in range(3)]
    mode = source.choice(["hook", "spec", "auto", "legacy", "jit-cdi", "cdi"])
    path.write_text(f"""
        accept-nvidia-visible-devices-envvar-when-unprivileged = {answers[0]}
        accept-nvidia-visible-devices-as-volume-mounts = {answers[1]}
        disable-require = {answers[2]}
        swarm-resource = "{source.choice(["", "SWARM"])}"
        nvidia-container-runtime.mode = "{mode}"
    """)


class Recorder:
    """Stands before read_request, keeps what it answered last, and ends the journey there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Request | str = ""
        self.original = read_request
        monkeypatch.setattr(resolve, "read_request", self)

    def __call__(self, spec: dict[str, Any], config: Config) -> NoReturn:
        self.seen = "nothing"
        try:
            self.seen = self.original(spec, config)
        except GpuhookError as error:
            self.seen = f"{error.code}: {error}"
            raise
        raise DriverError("The request is read", "Go no further")


def three_views(recorder: Recorder, bundle: Path, config_path: str) -> Iterator[Request | str]:
    config = load(config_path)
    words = ["create", "--bundle", str(bundle), "id"]
    state = {"id": "id", "pid": 1, "bundle": str(bundle)}
    spec = read_spec(str(bundle / "config.json"))
    views: list[Callable[[], object]] = [
        lambda: runtime_shim.prepare_bundle(Arguments(words), config, "/nowhere"),
        lambda: prestart_hook.run(json.dumps(state).encode(), config),
        lambda: Explanation().follow(spec.data, None, config_path),
    ]
    for view in views:
        recorder.seen = "never asked"
        with contextlib.suppress(RequestError, DriverError):
            view()
        yield recorder.seen


def test_random_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(20)  # noqa: S311 - cases, no secrets
    recorder = Recorder(monkeypatch)
    file, config_path = tmp_path / "config.json", tmp_path / "config.toml"
    kinds = set()
    for number in range(SPECS):
        if number % 100 == 0:
            config_file(source, config_path)
        file.write_text(json.dumps(random_spec(source)))
        shim, hook, explained = three_views(recorder, tmp_path, str(config_path))
        assert shim == hook == explained, file.read_text()
        kinds.add(shim.source if isinstance(shim, Request) else shim.partition(":")[0])
    assert kinds == {
        "none", "environment", "volume-mounts", "annotations",
        "request", "requirement", "unsupported-capability",
    }  # fmt: skip
