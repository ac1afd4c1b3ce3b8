"""The shared cases about requests, each read as a request for NVIDIA's devices."""

from typing import Any

import pytest
from requests_made import config_of, read_request

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError, RequestError
from gpuhook.core.request.reader import Request, check_kinds, is_privileged
from gpuhook.vendors.nvidia import names

MOUNT_ROOT = "/var/run/nvidia-container-devices/"

# Name of the case -> gpuhook's differing result; docs/engineering/differences.md says why.
DIFFERENCES: dict[str, list[str] | None] = {
    "duplicate ids quirk": ["0"],
    "prefix without boundary quirk": None,
}

Case = dict[str, Any]


def spec_of(
    env: dict[str, str] | None = None,
    mounts: list[dict[str, str]] | None = None,
    privileged: bool = False,
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    bounding = ["CAP_KILL", "CAP_SYS_ADMIN"] if privileged else ["CAP_KILL"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "env": [f"{name}={value}" for name, value in (env or {}).items()],
            "capabilities": {"bounding": bounding},
        },
        "mounts": mounts or [],
        "annotations": annotations or {},
    }


def devices_of(spec: dict[str, Any], config: Config) -> list[str] | None:
    """Return only the devices, in NVIDIA's form, even if a later part of the request is refused."""
    request: object
    try:
        request = read_request(spec, config)
    except RequestError as error:
        request = error.request
    if not isinstance(request, Request) or request.devices is None:
        return None
    return list(request.devices) or [""]


@pytest.mark.vectors("image", "image.devices_from_env")
def test_devices_from_env_match_the_vectors(case: Case) -> None:
    given = case["input"]
    config = config_of(swarm_resource=",".join(given["swarm_resource"]))
    expected = DIFFERENCES.get(case["name"], case["expected"]["devices"])
    assert devices_of(spec_of(given["env"]), config) == expected


@pytest.mark.vectors("runtime", "runtime.image_from_config")
def test_devices_from_config_json_match_the_vectors(case: Case) -> None:
    given = case["input"]
    spec = spec_of(given["env"])
    assert (
        devices_of(spec, config_of(swarm_resource=given["swarm-resource"]))
        == (case["expected"]["devices"])
    )


@pytest.mark.vectors("image", "image.devices_from_mounts")
def test_devices_from_mounts_match_the_vectors(case: Case) -> None:
    spec = spec_of(mounts=case["input"]["mounts"])
    expected = DIFFERENCES.get(case["name"], case["expected"]["devices"])
    assert devices_of(spec, config_of(accept_volume_mounts=True)) == expected


@pytest.mark.vectors("image", "image.visible_devices")
def test_visible_devices_match_the_vectors(case: Case) -> None:
    given = case["input"]
    mounts = [
        {"source": "/dev/null", "destination": MOUNT_ROOT + name} for name in given["mount_devices"]
    ]
    config = config_of(
        accept_envvar_unprivileged=given["accept_envvar_unprivileged"],
        accept_volume_mounts=given["accept_volume_mounts"],
        swarm_resource=",".join(given["swarm_resource"]),
    )
    spec = spec_of(given["env"], mounts, given["privileged"])
    assert devices_of(spec, config) == case["expected"]["devices"]


@pytest.mark.vectors("image", "image.imex_from_env")
def test_imex_channels_from_env_match_the_vectors(case: Case) -> None:
    request = read_request(spec_of(case["input"]["env"]), Config())
    assert [str(c) for c in request.options.imex_channels] == (case["expected"]["channels"] or [])


@pytest.mark.vectors("image", "image.annotations")
def test_devices_from_annotations_match_the_vectors(case: Case) -> None:
    given = case["input"]
    config = config_of(mode="cdi", cdi_annotation_prefixes=tuple(given["prefixes"]))
    found = devices_of(spec_of(annotations=given["annotations"]), config)
    expected = case["expected"]["devices_any_order"]
    assert (found and sorted(found)) == (expected and sorted(expected))


@pytest.mark.vectors("image", "image.requirements")
def test_requirements_match_the_vectors(case: Case) -> None:
    request = read_request(spec_of(case["input"]["env"]), Config())
    assert sorted(request.options.requirements) == sorted(
        case["expected"]["requirements_any_order"]
    )


@pytest.mark.vectors("image", "image.cuda_version")
def test_the_cuda_version_requirement_matches_the_vectors(case: Case) -> None:
    spec = spec_of(case["input"])
    if case["expected"].get("error"):
        with pytest.raises(GpuhookError, match="CUDA_VERSION"):
            read_request(spec, Config())
    else:
        expected = f"cuda>={case['expected']['major_minor']}"
        assert read_request(spec, Config()).options.requirements == (expected,)


@pytest.mark.vectors("image", "image.privileged")
def test_privileged_images_match_the_vectors(case: Case) -> None:
    spec = {"process": {"capabilities": case["input"]}}
    assert is_privileged(spec) is case["expected"]["privileged"]


@pytest.mark.vectors("hook", "hook.privileged")
def test_privileged_hook_specs_match_the_vectors(case: Case) -> None:
    spec = {
        "ociVersion": case["input"]["ociVersion"],
        "process": {"capabilities": case["input"]["process.capabilities"]},
    }
    assert is_privileged(spec) is case["expected"]["privileged"]


@pytest.mark.vectors("image", "image.from_spec")
def test_a_request_from_a_whole_spec_selects_all_devices(case: Case) -> None:
    """Only the spec says what a container is; no option can replace it."""
    mounts = [
        dict(zip(("source", "destination"), pair.split(":"), strict=True))
        for pair in case["input"].get("spec.mounts", [])
    ]
    spec = {"process": {"env": case["input"]["spec.process.env"]}, "mounts": mounts}
    request = read_request(spec, Config())
    assert request.devices == ("all",)
    assert request.source == "environment"


@pytest.mark.vectors("hook", "hook.cli_argv")
def test_the_request_matches_nvidia_container_cli_arguments(case: Case) -> None:
    """gpuhook starts no nvidia-container-cli; its request and config have the same words."""
    config = Config()
    request = read_request(spec_of(case["input"]["env"]), config)
    argv = case["expected"]["argv"]
    assert ("--load-kmods" in argv) is config.load_kmods
    assert f"--cuda-compat-mode={config.cuda_compat_mode}" in argv
    assert f"--ldconfig={config.ldconfig}" in argv
    assert ("--no-cgroups" in argv) is config.no_cgroups
    assert [f"--device={','.join(request.devices or ())}"] == argv[5:6]
    assert [f"--{name}" for name in request.options.capabilities] == argv[6:8]
    assert not any(word.startswith("--require") for word in argv)
    assert request.options.requirements == ()


@pytest.mark.vectors("hook", "hook.nvidia_config")
def test_hook_requests_match_the_vectors(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    settings = {} if given["config"] == "defaults" else given["config"]
    config = loads("".join(f'{key} = "{value}"\n' for key, value in settings.items()))
    spec = spec_of(given["env"], privileged=given["privileged"])
    if expected.get("panic"):
        with pytest.raises(GpuhookError, match="not privileged"):
            read_request(spec, config)
        return
    request = read_request(spec, config)
    if not expected.get("gpu_container", True):
        assert request.devices is None
        return
    assert (list(request.devices or ()) or [""]) == expected["devices"]
    assert ",".join(request.options.capabilities) == expected["driver_capabilities"]
    assert sorted(request.options.requirements) == sorted(expected["requirements_any_order"])
    assert request.options.mig_config == expected.get("mig_config")
    assert request.options.mig_monitor == expected.get("mig_monitor")


@pytest.mark.vectors("modifier", "modifier.cdi_requests")
def test_names_in_mode_cdi_match_the_vectors(case: Case) -> None:
    given = case["input"]
    config = config_of(
        mode="cdi",
        swarm_resource=",".join(given["swarm_resource"]),
        cdi_annotation_prefixes=tuple(given["annotation_prefixes"]),
    )
    config.cdi_default_kind = given["default_kind"] or config.cdi_default_kind
    mounts = [
        {"source": "/dev/null", "destination": MOUNT_ROOT + name}
        for name in given["devnull_mounts"]
    ]
    request = read_request(spec_of(given["env"], mounts, annotations=given["annotations"]), config)
    # Names of the automatic kinds come from the inventory, never from a CDI spec.
    assert not any(name.startswith(names.AUTOMATIC) for name in request.cdi_devices)
    found = [f"{names.AUTOMATIC[0]}={name}" for name in request.selectors] + [*request.cdi_devices]
    assert found == (case["expected"]["names_before_dedupe"] or [])
    # The one difference: an annotation may name only kinds that are served or configured.
    if request.source == "annotations" and "example.com/device" in found[0]:
        with pytest.raises(RequestError, match="cdi-kinds-from-environment"):
            check_kinds(request, [names], config)
    else:
        check_kinds(request, [names], config)
