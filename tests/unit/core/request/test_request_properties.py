"""Properties of requests: any spec gives the same request, or gpuhook's own error, every time."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from machines import granted, read_request

from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.core.request.reader import Request, effective_mode
from gpuhook.vendors.nvidia.model import Gpu, Mig, NvidiaInventory, selection
from gpuhook.vendors.nvidia.requirements import check

NAMES = st.sampled_from(
    [
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA",
        "NVIDIA_REQUIRE_X", "NVIDIA_DISABLE_REQUIRE", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS",
        "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES", "CUDA_VERSION", "SWARM", "PATH",
    ]
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "all", "none", "void", "0", "1", "0-1", "0:1", "GPU-0", "MIG-0", "nvidia.com/gpu=0",
        "runtime.nvidia.com/gpu=all", "compute", "utility", "cuda>=12", "enabled", "true", "9.0",
        "../0", "", " ", "99", "bogus",
    ]
)  # fmt: skip
VALUES = st.one_of(st.text(), st.lists(st.one_of(WORDS, st.text(max_size=3))).map(",".join))
ENTRIES = st.one_of(st.text(), st.tuples(NAMES, VALUES).map("=".join))
PARTS = st.sampled_from(
    [
        "/var/run/nvidia-container-devices", "/", "..", "0", "all", "cdi", "nvidia.com", "gpu",
        "imex", "gpu=0", "/dev/null", "dev",
    ]
)  # fmt: skip
PATHS = st.one_of(st.text(), st.just("/dev/null"), st.lists(PARTS).map("/".join))
MOUNTS = st.fixed_dictionaries({}, optional={"source": PATHS, "destination": PATHS})
CAPABILITIES = st.one_of(
    st.none(),
    st.lists(st.sampled_from(["CAP_SYS_ADMIN", "CAP_KILL"])),
    st.fixed_dictionaries({"bounding": st.lists(st.just("CAP_SYS_ADMIN"), max_size=1)}),
)
SPECS = st.fixed_dictionaries(
    {
        "process": st.fixed_dictionaries({"env": st.lists(ENTRIES), "capabilities": CAPABILITIES}),
        "mounts": st.lists(MOUNTS),
        "annotations": st.dictionaries(
            st.one_of(st.text(), st.sampled_from(["cdi.k8s.io/a", "cdi.k8s.io/b"])), VALUES
        ),
    }
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda children: st.one_of(st.lists(children), st.dictionaries(st.text(), children)),
    max_leaves=10,
)
MISSHAPEN = st.dictionaries(
    st.sampled_from(["process", "mounts", "annotations"]),
    st.one_of(JSON, st.dictionaries(st.sampled_from(["env", "capabilities", "bounding"]), JSON)),
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    config = Config()
    config.accept_envvar_unprivileged = draw(st.booleans())
    config.accept_volume_mounts = draw(st.booleans())
    config.disable_require = draw(st.booleans())
    config.swarm_resource = draw(st.sampled_from(["", "SWARM", " SWARM ,X"]))
    config.mode = draw(st.sampled_from(["hook", "spec", "cdi", "auto"]))
    config.supported_driver_capabilities = draw(st.sampled_from(["all", "", "compute,utility"]))
    if draw(st.booleans()):
        config.features["ignore-imex-channel-requests"] = draw(st.booleans())
    return config


MACHINE = NvidiaInventory(
    "/",
    "580.65.06",
    "13.0",
    (
        Gpu(0, 0, "GPU-0a", "0:1:0.0", "x", "9.0", "Nvidia", False, ()),
        Gpu(1, 1, "GPU-0b", "0:2:0.0", "x", "9.0", "Nvidia", True,
            (Mig(0, "MIG-0", 1, 0, "x", None, None), Mig(1, "MIG-1", 2, 0, "x", None, None))),
    ),
    (),
    (),
)  # fmt: skip


def outcome(spec: Any, config: Config) -> Request | str:
    try:
        return read_request(spec, config)
    except GpuhookError as error:
        return f"{error.code}: {error}"


def assert_well_formed(request: Request, config: Config) -> None:
    names = request.devices or ()
    assert len(set(names)) == len(names)
    assert "" not in names
    assert (request.source == "none") is (request.devices is None)
    assert not (request.cdi_devices and request.selectors)
    assert effective_mode(config.mode, [request]) in ("hook", "spec")
    assert all(0 <= channel < 1 << 20 for channel in request.options.imex_channels)
    for name in (*request.selectors, *request.cdi_devices):
        assert name.isascii()
        assert name.isprintable()
        assert ".." not in name
    for ordered in (
        request.options.capabilities,
        request.options.requirements,
        request.options.features,
    ):
        assert list(ordered) == sorted(set(ordered))
    if config.disable_require:
        assert request.options.requirements == ()
    assert json.loads(json.dumps(request.to_json()))["source"] == request.source


@settings(max_examples=200)
@given(SPECS, configs())
def test_any_spec_yields_a_request_or_a_gpuhook_error(spec: dict[str, Any], config: Config) -> None:
    found = outcome(spec, config)
    assert found == outcome(json.loads(json.dumps(spec)), config)
    if isinstance(found, Request):
        assert_well_formed(found, config)
    else:
        assert found.isascii()
        assert found.isprintable()


@settings(max_examples=150)
@given(st.one_of(MISSHAPEN, JSON), configs())
def test_any_json_yields_a_request_or_a_gpuhook_error(spec: Any, config: Config) -> None:
    assert outcome(spec, config)


@settings(max_examples=150)
@given(st.lists(st.one_of(WORDS, st.text(alphabet="0123456789abGPUMI-:/. ", max_size=9))))
def test_any_device_list_is_selected_or_refused(names: list[str]) -> None:
    spec = {"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={','.join(names)}"]}}
    request = outcome(spec, Config())
    if not isinstance(request, Request):
        return
    try:
        grant = granted(request, MACHINE)
        check(grant)
    except GpuhookError as error:
        reported = str(error)
    else:
        reported = ""
        found = selection(MACHINE, grant.devices)
        assert len(set(found.uuids)) == len(found.uuids)
        assert {gpu.uuid for gpu, _ in found.migs} <= {gpu.uuid for gpu in found.gpus}
        known = {gpu.uuid for gpu in MACHINE.gpus} | {"MIG-0", "MIG-1"}
        assert set(found.uuids) <= known
    assert reported.isprintable()
