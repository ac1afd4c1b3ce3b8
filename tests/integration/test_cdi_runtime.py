"""CDI names in the requests of containers, served by gpu-py on real low-level runtimes."""

import json
import re
from pathlib import Path

import pytest
from harness.bundles import Bundle
from harness.cdi import generate, give, read_by_engines
from harness.commands import wait_until
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, harden, open_kinds, write_config
from harness.namespaces import Namespace
from harness.podman import podman
from harness.snapshot import nothing_left

SEE = """
echo "node $(busybox stat -c '%t:%T %a' /dev/maker-a) $(devopen /dev/maker-a)"
echo "file $(busybox cat /opt/maker/file)"
echo "groups $(busybox id -G)"
busybox env | busybox grep '^MAKER'
"""


@pytest.fixture
def documents(bundle: Bundle) -> Path:
    """A folder with another vendor's CDI spec, a broken one, and a stale one of gpuhook."""
    folder = bundle.path / "cdi"
    folder.mkdir()
    (folder / "file").write_text("the maker's")
    device = {
        "env": ["MAKER_A=1"],
        "deviceNodes": [{"path": "/dev/maker-a", "hostPath": "/dev/null", "permissions": "rw"}],
        "mounts": [
            {
                "hostPath": str(folder / "file"),
                "containerPath": "/opt/maker/file",
                "options": ["ro", "bind"],
            }
        ],
        "additionalGids": [1234],
    }
    whole = {
        "cdiVersion": "0.7.0",
        "kind": "maker.example/card",
        "containerEdits": {"env": ["MAKER=yes"]},
        "devices": [
            {"name": "a", "containerEdits": device},
            {"name": "b", "containerEdits": {"env": ["MAKER_B=1"]}},
        ],
    }
    (folder / "maker.yaml").write_text(json.dumps(whole))
    (folder / "broken.json").write_text("{")
    stale = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "0", "containerEdits": {"env": ["MAKER_STALE=1"]}}],
    }
    (folder / "nvidia.json").write_text(json.dumps(stale))
    return folder


@pytest.fixture
def config(
    bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, documents: Path
) -> Path:
    more = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{documents}"]\n'
    config = write_config(bundle.path / "etc", driver.root, [low_level[0]], more)
    return open_kinds(config, "maker.example/card", "other.example/x")


def test_devices_of_another_vendors_cdi_spec_are_given(
    bundle: Bundle, installation: Installation, config: Path
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=maker.example/card=a,maker.example/card=b")
    bundle.command("sh", "-c", SEE)
    done = bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)}).ok()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("node 1:3 666 ")
    assert "EPERM" not in lines[0]
    assert lines[1] == "file the maker's"
    assert "1234" in lines[2].split()
    assert {"MAKER=yes", "MAKER_A=1", "MAKER_B=1"} <= set(lines[3:])
    assert "hooks" not in bundle.spec(), "nothing there is for our hook to do"


def test_a_spec_writable_by_others_is_refused(
    bundle: Bundle, installation: Installation, config: Path, documents: Path
) -> None:
    """Such a spec could add a hook, which root would run."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=maker.example/card=a")
    (documents / "maker.yaml").chmod(0o664)
    done = bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)}).failed()
    assert "maker.yaml may be written by non-root users" in done.stderr


@pytest.mark.parametrize("way", ["index", "UUID", "type"])
def test_names_of_our_own_kind_select_devices_of_the_machine(
    bundle: Bundle, installation: Installation, config: Path, driver: Driver, way: str
) -> None:
    """CDI specs don't matter for these names, and the content is the same as by index."""
    [gpu] = driver.chosen(2)
    name = {"index": "2", "UUID": gpu.uuid, "type": "gpu2"}[way]
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu={name}")
    bundle.command("sh", "-c", "nvidia-smi -L && gpuhook-cuda-probe")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        done = bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)}).ok()
    assert done.stdout.splitlines()[:1] == lines_of_nvidia_smi([gpu])


def test_devices_of_two_vendors_are_given_to_one_container(
    bundle: Bundle, installation: Installation, config: Path, driver: Driver
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=5,maker.example/card=a")
    bundle.command(*look(driver.minors))
    inside = seen(bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)}))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(5)}
    assert {node["path"] for node in bundle.spec()["linux"]["devices"]} >= {"/dev/maker-a"}


@pytest.mark.parametrize(
    ("devices", "word"),
    [
        ("maker.example/card=c", "maker.example/card=c"),
        ("maker.example/card=a,other.example/x=1", "other.example/x=1"),
        ("nvidia.com/gpu=77", "'77'"),
    ],
)
def test_an_unknown_cdi_device_is_refused(
    bundle: Bundle, installation: Installation, config: Path, devices: str, word: str
) -> None:
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={devices}")
    before = bundle.config.read_bytes()
    done = bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)})
    assert done.status != 0
    assert word in done.stderr
    assert bundle.config.read_bytes() == before


def test_cdi_specs_are_read_once_and_then_cached(
    bundle: Bundle, installation: Installation, config: Path, documents: Path, tmp_path: Path
) -> None:
    """A start that finds them cached opens no CDI spec and loads no YAML parser."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=maker.example/card=b")
    whole, log = bundle.config.read_bytes(), tmp_path / "log"
    words = ("strace", "-f", "-e", "trace=open,openat", "-o", log, installation.runtime)
    env = {"GPUHOOK_CONFIG": str(config)}

    def opened() -> set[str]:
        bundle.config.write_bytes(whole)
        bundle.call(*words, "run", "--bundle", bundle.path, bundle.name, env=env).ok()
        names = re.findall(r'"([^"]*)"(?:.*) = \d', log.read_text())
        files = {path.name for path in documents.iterdir() if path.name != "file"}
        return {Path(name).name for name in names if "yaml" in name or Path(name).name in files}

    first = opened()
    assert {"maker.yaml", "broken.json"} <= first
    assert any("yaml" in name and name != "maker.yaml" for name in first), "PyYAML"
    wait_until(lambda: opened() == set(), "the documents are saved")


# Mounts beside what an engine gives ---------------------------------------------------------------

BY_MOUNT = "/var/run/nvidia-container-devices/5"


@pytest.mark.parametrize("mounted", [False, True])
def test_mounts_add_no_gpus_to_an_engines_devices(
    bundle: Bundle,
    installation: Installation,
    low_level: tuple[str, Namespace],
    driver: Driver,
    mounted: bool,
) -> None:
    """NVIDIA's toolkit does so from 1.20.2 on; an image with only void gets the mounted GPUs."""
    config = harden(write_config(bundle.path / "etc", driver.root, [low_level[0]]))
    env = {"GPUHOOK_CONFIG": str(config)}
    mount = {"source": "/dev/null", "destination": BY_MOUNT, "options": ["bind"]}
    bundle.change(lambda spec: spec["mounts"].append(mount))
    bundle.command(*look(driver.minors))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=void")
    plain = seen(bundle.run(installation.runtime, env))
    assert plain.gpu_minors == {gpu.minor for gpu in driver.chosen(5)}
    document = generate(installation, config, bundle.path / "cdi")
    give(bundle, document, "2", mounted=mounted)
    inside = seen(bundle.run(installation.runtime, env))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(2)}


def test_mounts_add_no_gpus_with_podman(
    workspace: Path, host: Namespace, installation: Installation, archive: Path, driver: Driver
) -> None:
    config = harden(write_config(workspace / "mounts-beside-etc", driver.root, ["runc"]))
    runtime = workspace / "mounts-beside-runtime"
    runtime.write_text(
        f'#!/bin/sh\nexport GPUHOOK_CONFIG={config}\nexec {installation.runtime} "$@"\n'
    )
    runtime.chmod(0o755)
    document = generate(installation, config, workspace / "mounts-beside-cdi")
    folder = workspace / "mounts-beside"
    mount = f"--volume=/dev/null:{BY_MOUNT}"
    with podman(folder, host, runtime, archive) as engine, read_by_engines(document):
        for options, index in (((mount, "--device=nvidia.com/gpu=2"), 2), ((mount,), 5)):
            env = ("NVIDIA_VISIBLE_DEVICES=void",)
            words = look(driver.minors)
            done = seen(engine.run(image("debian"), *words, env=env, options=options))
            assert done.gpu_minors == {gpu.minor for gpu in driver.chosen(index)}
