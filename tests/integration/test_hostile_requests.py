"""Hostile requests in images and bundles, started for real by runc and crun."""

import json
import time
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.driver import Driver
from harness.hostile import mount_volume, refused, start
from harness.inside import look, seen
from harness.installation import harden, open_kinds, write_config
from harness.prefork import ONE, RUNTIMES

ANNOTATION = {"cdi.k8s.io/x": "runtime.nvidia.com/gpu=all"}


@pytest.mark.protects(
    "annotations-distrusted",
    "annotations are trusted no more than environment variables",
    only="annotation and runc-host",
)
@pytest.mark.parametrize("by", ["runtime", "hook"])
@pytest.mark.parametrize("more", ["", "accept-annotations = true\n"], ids=["default", "accepted"])
@pytest.mark.parametrize("asked", ["by mount", "not at all"])
@RUNTIMES
def test_an_annotation_gives_no_more_than_the_mounts(
    bundle: GpuBundle, driver: Driver, tmp_path: Path, by: str, more: str, asked: str
) -> None:
    """CRI-O and podman copy users' annotations into config.json."""
    config = harden(write_config(tmp_path / "etc", driver.root, [bundle.runtime]))
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{more}"))
    bundle.command(*look(driver.minors))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    bundle.change(lambda spec: spec.update(annotations=ANNOTATION))
    if asked == "by mount":
        mount_volume(bundle, Path("/dev/null"), "/var/run/nvidia-container-devices/3", "ro")
    given = {driver.gpus[3].minor} if asked == "by mount" else set()
    if by == "runtime":
        done = bundle.start(config)
    else:
        bundle.by_hook(config)
        done = bundle.run(bundle.runtime)
    inside = seen(done)
    assert inside.gpu_minors == given
    opened = {minor for minor, error in inside.by_hand.items() if error != "EPERM"}
    assert opened == given


@pytest.mark.protects(
    "kinds",
    "images can request CDI devices only of gpuhook's own kinds and explicitly allowed ones",
)
@pytest.mark.parametrize("mode", ["hook", "spec", "auto", "cdi"])
@ONE
def test_a_cdi_claim_of_another_pod_is_refused(
    bundle: GpuBundle, driver: Driver, tmp_path: Path, mode: str
) -> None:
    """A DRA driver's CDI spec for one pod has its host folder and a hook that runs as root."""
    trace, secret = tmp_path / "trace", tmp_path / "secret"
    secret.write_text("another's")
    claim = "k8s.gpu.nvidia.com/claim=0f2b-gpu-0"
    hook = {"hookName": "createRuntime", "path": "/usr/bin/touch", "args": ["touch", str(trace)]}
    mount = {"hostPath": str(secret), "containerPath": "/secret", "options": ["bind"]}
    edits = {"mounts": [mount], "hooks": [hook]}
    kind, _, name = claim.partition("=")
    device = {"name": name, "containerEdits": edits}
    document = {"cdiVersion": "0.5.0", "kind": kind, "devices": [device]}
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/claim.json").write_text(json.dumps(document))
    folders = f'mode = "{mode}"\n[nvidia-container-runtime.modes.cdi]\n'
    folders += f'spec-dirs = ["{tmp_path / "cdi"}"]\n'
    config = write_config(tmp_path / "etc", driver.root, [bundle.runtime], folders)
    bundle.command("busybox", "cat", "/secret")
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={claim}")
    whole = bundle.config.read_bytes()
    done = bundle.start(config).failed()
    assert f"names '{claim}'" in done.stderr
    assert "cdi-kinds-from-environment" in done.stderr
    assert bundle.config.read_bytes() == whole
    assert not trace.exists()
    env = {"GPUHOOK_CONFIG": str(open_kinds(config, kind))}
    assert bundle.run(bundle.gpu_py, env).ok().stdout == "another's"
    assert trace.exists()


@pytest.mark.protects(
    "device-name",
    "invalid device names in a request are refused",
    instead='if True or _NAME_CHARACTERS.issuperset(name) and ".." not in name:',
    also=("all-devices", "if wanted:"),
)
@pytest.mark.parametrize(
    "request_text",
    [
        "../../../etc",
        "0,../1",
        "/dev/nvidia0",
        "0\n1",
        "0\x001",
        "GPU-../../../../etc/passwd",
        "MIG-GPU-x/../../1/2",
        "x" * 100_000,
        ",".join(["9999999999999999999999"] * 3000),
        "0:" * 50_000,
        "\u202e0",
        "\ud8000",
    ],
    ids=range(12),
)
@ONE
def test_invalid_device_names_are_refused(
    bundle: GpuBundle, driver: Driver, request_text: str
) -> None:
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={request_text}")
    refused(start(bundle, driver.root))


@pytest.mark.protects(
    "channel-name",
    "invalid IMEX channel numbers in a request are refused",
    instead="return 0",
    also=("channel-node", "if node is None and 0:"),
)
@pytest.mark.parametrize("channels", ["../../../../etc", "-1", "0/../1", "9" * 4000])
@ONE
def test_invalid_imex_channels_are_refused(
    bundle: GpuBundle, driver: Driver, channels: str
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_IMEX_CHANNELS={channels}")
    refused(start(bundle, driver.root))


@pytest.mark.protects(
    "deep-json",
    "JSON of any nesting depth is parsed or refused",
    instead="except ZeroDivisionError:",
    only="strange_json and runc-host",
)
@pytest.mark.parametrize(
    "extra",
    [
        '"x": 1e999999',
        '"x": -0.0e-99999999',
        '"x": ' + "9" * 5000,
        '"x": ' + "[" * 5000 + "]" * 5000,
        '"x": "\\ud800\\u0000"',
        '"process": {}, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}',
    ],
    ids=["huge float", "tiny float", "huge integer", "deep", "surrogate and NUL", "doubled key"],
)
@RUNTIMES
def test_strange_json_is_handled_or_refused(bundle: GpuBundle, driver: Driver, extra: str) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    text = bundle.config.read_text()
    bundle.config.write_text("{" + extra + "," + text.lstrip()[1:])
    result = start(bundle, driver.root)
    if result.status != 0:
        refused(result)


@pytest.mark.protects(
    "bytes-kept",
    "bytes in config.json that aren't valid UTF-8 are unchanged",
    instead='return Spec(path, data.decode("utf-8", "replace"))',
    only="bytes_that_are_no_text and runc-host",
)
@RUNTIMES
def test_bytes_that_are_no_text_are_kept(bundle: GpuBundle, driver: Driver) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", "STRANGE=@@@")
    bundle.config.write_bytes(bundle.config.read_bytes().replace(b"@@@", b"\xff\xfe\x80"))
    start(bundle, driver.root)
    assert b"\xff\xfe\x80" in bundle.config.read_bytes()


@ONE
def test_a_million_variables_are_handled_in_time(
    bundle: GpuBundle, driver: Driver, tmp_path: Path
) -> None:
    """Low-level runtimes take minutes for so many variables; gpuhook must not be the slow part."""
    config = write_config(tmp_path / "config", driver.root, ["/bin/true"])
    bundle.environ(*[f"A{number}={number}" for number in range(10**6)], "NVIDIA_VISIBLE_DEVICES=0")
    begun = time.monotonic()
    start(bundle, driver.root, config=config).ok()
    assert time.monotonic() - begun < 300
    assert len(bundle.spec()["process"]["env"]) > 10**6
    assert bundle.spec()["hooks"]["prestart"]
