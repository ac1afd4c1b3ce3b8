"""A warning for each unknown word in NVIDIA_DRIVER_CAPABILITIES, wherever the word is read."""

import json
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import write_config
from harness.prefork import ONE, RUNTIMES

ASKED = ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=video,magic"]
SENTENCE = (
    "'magic' isn't a driver capability, so the container gets compute and utility as well: "
    "compute,utility,video"
)
# Libraries of compute, of utility, of video, and of graphics, which isn't requested.
GIVEN, LEFT = ["libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1"], "libGLX_nvidia.so.0"


@pytest.fixture
def asking(bundle: GpuBundle) -> GpuBundle:
    bundle.environ(*ASKED)
    bundle.command(*look(libraries=[*GIVEN, LEFT]))
    return bundle


def configured(bundle: GpuBundle, driver: Driver, *, ours: str = "", runtime: str = "") -> Path:
    config = write_config(bundle.path / "etc", driver.root, [bundle.runtime], runtime)
    (config.parent / "state").mkdir()
    config.write_text(config.read_text().replace("[gpuhook]", f"[gpuhook]\n{ours}"))
    return config


def warnings(config: Path) -> list[tuple[str, str]]:
    text = (config.parent / "state/warnings.log").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    return [(each["level"], each["msg"]) for each in records]


@pytest.mark.parametrize(
    ("ours", "runtime", "program"),
    [
        ("helper = true", "", "gpuhook-prestart"),
        ("helper = false", "", "gpuhook-prestart"),
        ("", 'mode = "spec"', "gpu-py"),
    ],
    ids=["helper", "hook", "spec"],
)
@RUNTIMES
def test_an_unknown_capability_is_ignored_with_a_warning_at_a_start(
    asking: GpuBundle, driver: Driver, ours: str, runtime: str, program: str
) -> None:
    config = configured(asking, driver, ours=ours, runtime=runtime)
    found = seen(asking.start(config)).libraries
    assert [name for name in GIVEN if found[name][0] == "-"] == []
    assert found[LEFT][0] == "-"
    assert warnings(config) == [("warning", f"{program}: {SENTENCE}")]
    assert not (config.parent / "state/errors.log").exists()


@ONE
def test_an_engines_hook_ignores_an_unknown_capability_with_a_warning(
    asking: GpuBundle, driver: Driver
) -> None:
    config = configured(asking, driver)
    asking.by_hook(config)
    found = seen(asking.run(asking.runtime)).libraries
    assert [name for name in GIVEN if found[name][0] == "-"] == []
    assert warnings(config) == [("warning", f"gpuhook-prestart: {SENTENCE}")]


@ONE
def test_explain_and_doctor_report_an_unknown_capability(asking: GpuBundle, driver: Driver) -> None:
    config = configured(asking, driver)
    command, options = asking.installation.command, ("--config", config, "--format", "json")
    explained = asking.call(command, "explain", "--bundle", asking.path, *options).ok()
    data = json.loads(explained.stdout)
    assert data["error"] is None
    assert data["request"]["capabilities"] == ["compute", "utility", "video"]
    assert data["warnings"] == [SENTENCE]
    asking.start(config).ok()
    findings = json.loads(asking.call(command, "doctor", *options).stdout)["findings"]
    [found] = [each["message"] for each in findings if each["check"] == "recent-warnings"]
    assert found.startswith("A container requests something unavailable, within a day, the last: ")
    assert found.endswith(f"gpuhook-prestart: {SENTENCE}")


@pytest.mark.parametrize("ours", ["helper = true", "helper = false"])
@ONE
def test_an_unknown_capability_is_refused_if_the_supported_set_is_limited(
    asking: GpuBundle, driver: Driver, ours: str
) -> None:
    config = configured(asking, driver, ours=ours)
    text = 'supported-driver-capabilities = "compute,utility,video"\n'
    config.write_text(text + config.read_text())
    done = asking.start(config).failed()
    assert "'magic' isn't a driver capability: there are compat32, compute, " in done.stderr
    assert not (config.parent / "state/warnings.log").exists()


@pytest.mark.parametrize("ours", ["helper = true", "helper = false"])
@ONE
def test_a_cdi_spec_gives_all_libraries_without_a_capability_warning(
    asking: GpuBundle, driver: Driver, ours: str
) -> None:
    """The hook of a CDI spec reads no capabilities."""
    cdi = f'mode = "cdi"\n[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{asking.path}/cdi"]'
    config = configured(asking, driver, ours=ours, runtime=cdi)
    words = ("--config", config, "--output", f"{asking.path}/cdi/nvidia.json")
    asking.call(asking.installation.command, "cdi", "generate", *words).ok()
    found = seen(asking.start(config)).libraries
    assert [name for name in [*GIVEN, LEFT] if found[name][0] == "-"] == []
    assert not (config.parent / "state/errors.log").exists()


@RUNTIMES
def test_an_unknown_nvidia_variable_gives_a_warning(bundle: GpuBundle, driver: Driver) -> None:
    """The variable may belong to a newer NVIDIA toolkit, so the container starts."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_GPU_COMPUTE_LIMIT=50")
    bundle.command("true")
    config = configured(bundle, driver)
    bundle.start(config).ok()
    [(level, text)] = warnings(config)
    assert level == "warning"
    assert "'NVIDIA_GPU_COMPUTE_LIMIT' isn't a variable that gpuhook " in text
