"""CDI kinds that a container itself may name: one rule for all sources."""

from itertools import product
from typing import Any

import pytest
from machines import gpu, machine
from requests_made import ROOT, spec_of
from steps import resolve

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError, RequestError
from gpuhook.vendors import registry

MODES = ("hook", "spec", "auto", "cdi")
SETTING = "cdi-kinds-from-environment"
CLAIM = "k8s.gpu.nvidia.com/claim=0f2b-gpu-0"  # a CDI name of NVIDIA's DRA driver, for one pod
# Names of other vendors, of served vendors' other kinds, and names that only look like theirs.
FOREIGN = (
    CLAIM, "vendor.example/nic=0", "nvidia.com/gds=all", "management.nvidia.com/gpu=all",
    "k8s.device-plugin.nvidia.com/gds=0", "nvidia.com/gpux=0", "nvidia.com/GPU=0",
    "x.nvidia.com/gpu=0", "xnvidia.com/gpu=0", "nvidia.com.x/gpu=0", "intel.com/nic=0",
)  # fmt: skip
VARIABLES = [name for names in registry.BUILT_IN.values() for name in names.VARIABLES]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine(gpu(0, 0), gpu(1, 1))
    monkeypatch.setattr("gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: found)


def config_of(mode: str = "hook", *kinds: str, **settings: Any) -> Config:
    config = Config()
    config.mode, config.cdi_kinds_from_environment = mode, kinds
    config.accept_annotations = True
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def documents(spec: dict[str, Any], config: Config) -> tuple[str, ...]:
    """Return the devices that a container gets from CDI specs."""
    resolved = resolve(spec, config)
    return () if resolved is None else resolved.cdi_devices


def annotated(value: str, *env: str) -> dict[str, Any]:
    return {**spec_of(*env), "annotations": {"cdi.k8s.io/x": value}}


@pytest.mark.protects(
    "kinds",
    "images can request CDI devices only of gpuhook's own kinds and explicitly allowed ones",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_variable_with_another_cdi_kind_is_refused(mode: str, name: str) -> None:
    values = (name, f"{name},{name}", f"vendor.example/open=1,{name}")
    for variable, value in product(VARIABLES, values):
        with pytest.raises(RequestError) as caught:
            documents(spec_of(f"{variable}={value}"), config_of(mode, "vendor.example/open"))
        assert name in caught.value.cause
        assert f"{SETTING} in [gpuhook]" in caught.value.cause
        assert caught.value.request.source == "environment"


@pytest.mark.parametrize("mode", MODES)
def test_a_swarm_variable_with_another_cdi_kind_is_refused(mode: str) -> None:
    for setting in ("SWARM", "amd=SWARM"):
        with pytest.raises(RequestError, match=SETTING):
            documents(spec_of(f"SWARM={CLAIM}"), config_of(mode, swarm_resource=setting))


@pytest.mark.parametrize("mode", ["auto", "cdi"])
@pytest.mark.parametrize("name", FOREIGN)
def test_annotations_with_other_cdi_kinds_are_refused(mode: str, name: str) -> None:
    """In the modes hook and spec, the engine handles annotations with other vendors' kinds."""
    with pytest.raises(RequestError, match="annotations name .*" + SETTING):
        documents(annotated(f"nvidia.com/gpu=0,{name}"), config_of(mode))


@pytest.mark.protects(
    "kinds",
    "images can request CDI devices only of gpuhook's own kinds and explicitly allowed ones",
)
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_other_nvidia_kinds_in_annotations_are_refused(mode: str) -> None:
    with pytest.raises(RequestError, match=SETTING):
        documents(annotated("nvidia.com/gds=all"), config_of(mode))
    assert documents(annotated(CLAIM), config_of(mode)) == ()


@pytest.mark.parametrize("mode", MODES)
def test_configured_cdi_kinds_are_accepted(mode: str) -> None:
    config = config_of(mode, "k8s.gpu.nvidia.com/claim")
    assert documents(spec_of(f"NVIDIA_VISIBLE_DEVICES={CLAIM}"), config) == (CLAIM,)
    if mode not in ("hook", "spec"):
        assert documents(annotated(CLAIM), config) == (CLAIM,)


def test_names_without_a_kind_get_the_configured_default_kind() -> None:
    config = config_of("cdi", cdi_default_kind="vendor.example/nic")
    assert documents(spec_of("NVIDIA_VISIBLE_DEVICES=0"), config) == ("vendor.example/nic=0",)


def test_only_the_declared_kind_of_a_declared_vendor_is_accepted() -> None:
    text = """
        nvidia-container-runtime.mode = "cdi"
        [[gpuhook.vendors]]
        name = "maker"
        kind = "maker.example/npu"
        variable = "MAKER_VISIBLE"
        nodes = ["/dev/maker{n}"]
        present = "/sys/module/maker"
    """
    config = loads(text)
    for variable in ("MAKER_VISIBLE", "NVIDIA_VISIBLE_DEVICES"):
        name = "maker.example/npu=0"
        assert documents(spec_of(f"{variable}={name}"), config) == (name,)
    with pytest.raises(RequestError, match=SETTING):
        documents(spec_of("MAKER_VISIBLE=maker.example/dma=0"), config)


@pytest.mark.parametrize("mode", MODES)
def test_accepted_mounts_may_name_any_cdi_kind(mode: str) -> None:
    spec = spec_of("NVIDIA_VISIBLE_DEVICES=all", mounts=[f"{ROOT}/cdi/{CLAIM}"])
    assert documents(spec, config_of(mode, accept_volume_mounts=True)) == (CLAIM,)
    with pytest.raises(RequestError, match=SETTING):  # ignored mounts allow no kind
        documents(spec_of(f"NVIDIA_VISIBLE_DEVICES={CLAIM}", mounts=[f"{ROOT}/{CLAIM}"]), Config())


@pytest.mark.parametrize("mode", MODES)
def test_other_cdi_kinds_in_ignored_requests_are_not_refused(mode: str) -> None:
    config = config_of(mode, accept_envvar_unprivileged=False)
    assert documents(spec_of(f"NVIDIA_VISIBLE_DEVICES={CLAIM}"), config) == ()
    assert documents(annotated(CLAIM), config) == ()


@pytest.mark.parametrize("kind", ["", "nvidia.com", "/gpu", "a/", "1/b", "a/b=c", "a/*", "a b/c"])
def test_a_setting_entry_that_is_no_cdi_kind_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{SETTING} contains .* not a CDI kind such as"):
        loads(f'[gpuhook]\n{SETTING} = ["a.b/c", "{kind}"]\n')
