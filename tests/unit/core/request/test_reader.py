"""Rules of requests that the shared cases leave open."""

from typing import Any

import pytest
from declared_vendors import tables
from requests_made import ROOT, config_of, mounts_request, read_request, request_for, spec_of
from yardstick import of_this_process

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, SpecError
from gpuhook.core import contract
from gpuhook.core.request import sources
from gpuhook.core.request.reader import Request, SpecReader, is_privileged
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.variables import NvidiaOptions

QUALIFIED = "nvidia.com/gpu=0"


def visible(value: str, **settings: Any) -> Request:
    return request_for(f"NVIDIA_VISIBLE_DEVICES={value}", **settings)


@pytest.mark.parametrize("spec", [{}, {"process": None, "mounts": None}, {"process": {}}])
def test_an_empty_spec_requests_nothing(spec: dict[str, Any]) -> None:
    request = read_request(spec, Config())
    assert request == Request("nvidia", options=NvidiaOptions())
    assert request.to_json() == {
        "vendor": "nvidia",
        "source": "none",
        "devices": None,
        "cdi_devices": [],
        "capabilities": [],
        "requirements": [],
        "requirements_disabled": False,
        "imex_channels": [],
        "mig_config": None,
        "mig_monitor": None,
        "features": [],
        "ignored": [],
    }


def test_a_full_request_as_json_has_every_field() -> None:
    spec = spec_of(
        "NVIDIA_VISIBLE_DEVICES=1,GPU-8f3a",
        "NVIDIA_DRIVER_CAPABILITIES=video,compute",
        "NVIDIA_REQUIRE_DRIVER=driver>=470",
        "NVIDIA_REQUIRE_CUDA=cuda>=12.2",
        "NVIDIA_IMEX_CHANNELS=4,0",
        "NVIDIA_MIG_CONFIG_DEVICES=all",
        "NVIDIA_MIG_MONITOR_DEVICES=all",
        "NVIDIA_NVSWITCH=enabled",
        "NVIDIA_GDS=enabled",
    )
    spec["process"]["capabilities"] = {"bounding": ["CAP_SYS_ADMIN"]}
    assert read_request(spec, Config()).to_json() == {
        "vendor": "nvidia",
        "source": "environment",
        "devices": ["1", "GPU-8f3a"],
        "cdi_devices": [],
        "capabilities": ["compute", "video"],
        "requirements": ["cuda>=12.2", "driver>=470"],
        "requirements_disabled": False,
        "imex_channels": [4, 0],
        "mig_config": "all",
        "mig_monitor": "all",
        "features": ["gds", "nvswitch"],
        "ignored": [],
    }


def test_a_request_is_immutable_and_hashable() -> None:
    request = visible("all")
    with pytest.raises(AttributeError):
        request.devices = ()
    assert request.devices == ("all",)
    assert hash(request) == hash(visible("all"))


# --- the environment ---


ASK = "NVIDIA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ([f"{ASK}=0", f"{ASK}=1"], ("1",)),  # the last of several counts
        ([f"{ASK}=0", f"{ASK}="], None),
        ([f"{ASK}=0", ASK], None),  # an entry without = clears the value
        *[(["NVIDIA_GDS=enabled", odd, "A=b"], None) for odd in ("", "=", "=x", "NAME", ASK)],
        (["nvidia_visible_devices=0", f" {ASK}=0"], None),
        (["BINARY=\udcff\udc80", "\udcff=1", f"{ASK}=0"], ("0",)),
    ],
)
def test_environment_entries_are_parsed_and_the_last_one_counts(
    env: list[str], devices: tuple[str, ...] | None
) -> None:
    assert request_for(*env).devices == devices


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0,0", ("0",)),
        ("2,0,2,1,0", ("2", "0", "1")),
        ("0-3,8", ("0-3", "8")),
        ("none", ()),
        ("none,0", ()),
        ("0,none", ()),
        ("all,none", ("all",)),
        ("void,all", None),
        ("0,ALL", ("all",)),
        ("None,0", ()),
        ("0,VOID", None),
        ("\t0\n,\r1 ", ("0", "1")),
    ],
)
def test_a_device_list_is_split_and_duplicates_removed(
    value: str, devices: tuple[str, ...] | None
) -> None:
    assert visible(value).devices == devices


@pytest.mark.parametrize(
    "name",
    ["0\n1", "a b", "\x00", "\x1b[31m", "../../etc", "GPU-..", "x" * 257, "é", "\udcff", "0;rm",
     "$(id)", "\u202e0", "*"],
)  # fmt: skip
def test_unsafe_device_names_are_refused_with_a_printable_message(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        visible(f"0,{name}")
    message = str(caught.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 400


def test_invalid_names_in_an_ignored_source_are_not_refused() -> None:
    spec = spec_of("NVIDIA_VISIBLE_DEVICES=../x", mounts=[f"{ROOT}/0"])
    assert read_request(spec, config_of(accept_volume_mounts=True)).devices == ("0",)
    assert read_request(spec, config_of(accept_envvar_unprivileged=False)).devices is None


def test_a_request_error_contains_the_part_understood() -> None:
    with pytest.raises(RequestError) as caught:
        request_for("NVIDIA_VISIBLE_DEVICES=0,1", "NVIDIA_IMEX_CHANNELS=nope")
    request = caught.value.request
    assert isinstance(request, Request)
    assert request.devices == ("0", "1")
    assert request.source == "environment"


@pytest.mark.parametrize(
    "env",
    [
        "NVIDIA_DRIVER_CAPABILITIES=nope",
        "NVIDIA_IMEX_CHANNELS=nope",
        "NVIDIA_MIG_CONFIG_DEVICES=all",
        "NVIDIA_VISIBLE_DEVICES=void,../..",
    ],
)
def test_invalid_options_without_requested_devices_are_ignored(env: str) -> None:
    assert request_for(env).devices is None
    assert request_for("CUDA_VERSION=foo", "NVIDIA_VISIBLE_DEVICES=void", env).devices is None


def test_huge_environment_takes_linear_time() -> None:
    def seconds(count: int) -> float:
        names = ",".join(str(number % 4096) for number in range(count))
        entries = [f"V{n}=x" for n in range(count)] + [f"NVIDIA_VISIBLE_DEVICES={names}"]

        def read() -> None:
            assert len(request_for(*entries).devices or ()) == 4096

        return of_this_process(read)

    # Ten times the entries; a quadratic reader would take a hundred times as long.
    assert seconds(300_000) < 50 * max(seconds(30_000), 0.01)


# --- swarm ---


def test_swarm_resources_are_read_in_configured_order_without_duplicates() -> None:
    request = request_for(
        "B=2,0", "A=1", "NVIDIA_VISIBLE_DEVICES=7", swarm_resource=" A , C, ,B,A "
    )
    assert request.devices == ("1", "2", "0")
    assert request.ignored == (
        ("environment", "NVIDIA_VISIBLE_DEVICES is overridden by swarm-resource 'A'"),
    )


def test_swarm_resource_may_be_the_usual_variable() -> None:
    request = visible("7", swarm_resource="NVIDIA_VISIBLE_DEVICES")
    assert (request.devices, request.ignored) == (("7",), ())


SEVEN = "NVIDIA_VISIBLE_DEVICES=7"


def test_a_swarm_resource_of_another_vendor_is_ignored() -> None:
    request = request_for(SEVEN, "A=1", "B=2", swarm_resource="other=A, nvidia = B ,other=B")
    assert request.devices == ("2",)
    assert request_for(SEVEN, "A=1", swarm_resource="other=A").devices == ("7",)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0x1234", ("7",)),
        ("0XAB,0xcd", ("7",)),
        ("GPU-1,0xcd", ("GPU-1",)),
        ("0x1234,2", ("2",)),
        ("", None),
        ("all", ("all",)),
    ],
)
def test_hexadecimal_swarm_names_are_ignored_unless_configured(
    value: str, devices: tuple[str, ...] | None
) -> None:
    """NVIDIA has no hexadecimal numbers as names, unless the configuration declares them."""
    assert request_for(SEVEN, f"A={value}", swarm_resource="A").devices == devices
    ours = request_for(SEVEN, f"A={value}", swarm_resource="nvidia=A").devices
    assert ours == (tuple(value.split(",")) if value else None)


# --- mounts ---


def test_mounts_are_ignored_and_reported_by_default() -> None:
    request = read_request(spec_of(mounts=[f"{ROOT}/0"]), Config())
    assert request.devices is None
    assert request.ignored[0][0] == "volume-mounts"


def test_mounts_come_before_the_environment() -> None:
    request = mounts_request("1", "0", "1/", env=("NVIDIA_VISIBLE_DEVICES=all",))
    assert (request.source, request.devices) == ("volume-mounts", ("1", "0"))
    reason = "volume-mounts decide, which are trusted more"
    assert request.ignored == (("environment", reason),)


@pytest.mark.parametrize(
    "destination",
    ["", ROOT, f"{ROOT}/", f"{ROOT}X/0", f"{ROOT}-other/0", f"{ROOT}/../0", f"{ROOT}/0/../..",
     "/var/run", "var/run/nvidia-container-devices/0", f"/x{ROOT}/0"],
)  # fmt: skip
def test_mounts_outside_the_device_folder_are_ignored(destination: str) -> None:
    spec = {"mounts": [{"source": "/dev/null", "destination": destination}]}
    assert read_request(spec, config_of(accept_volume_mounts=True)).devices is None


@pytest.mark.parametrize(
    "destination",
    [ROOT + "/0", "/" + ROOT + "//0/", "/var/./run/x/../nvidia-container-devices/0"],
)
@pytest.mark.parametrize("source", ["/dev/null", "//dev/null", "/dev//null/", "/dev/../dev/null"])
def test_paths_of_mounts_are_normalised(source: str, destination: str) -> None:
    spec = {"mounts": [{"source": source, "destination": destination}]}
    assert read_request(spec, config_of(accept_volume_mounts=True)).devices == ("0",)


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/null2", "dev/null", "", "/"])
def test_mounts_of_other_sources_than_dev_null_are_ignored(source: str) -> None:
    spec = {"mounts": [{"source": source, "destination": ROOT + "/0"}, {"destination": ROOT}]}
    assert read_request(spec, config_of(accept_volume_mounts=True)).devices is None


@pytest.mark.parametrize(
    ("mounted", "name"),
    [
        ("cdi/nvidia.com/gpu/0", QUALIFIED),
        ("cdi/nvidia.com/gpu=0", QUALIFIED),
        ("nvidia.com/gpu=0", QUALIFIED),
        ("cdi/vendor.example/a-b/x:1.y", "vendor.example/a-b=x:1.y"),
    ],
)
def test_cdi_names_are_read_from_mount_paths(mounted: str, name: str) -> None:
    request = mounts_request(mounted)
    assert request.devices == (name,)
    own = name == QUALIFIED
    assert (request.cdi_devices, request.selectors) == ((), ("0",)) if own else ((name,), ())
    assert mounts_request(mounted, mode="cdi").cdi_devices == (name,)


@pytest.mark.parametrize(
    "mounted", ["cdi/nvidia.com", "cdi/nvidia.com/gpu", "cdi/a/b/c/d", "cdi/a/b=", "cdi/1/b=c"]
)
def test_malformed_cdi_mounts_are_ignored_and_reported(mounted: str) -> None:
    request = mounts_request(mounted, "0")
    assert request.devices == ("0",)
    assert [source for source, _ in request.ignored] == ["volume-mounts"]


def test_all_and_none_mean_the_same_in_mounts_as_in_variables() -> None:
    assert mounts_request("0", "all").devices == ("all",)
    assert mounts_request("none").devices == ()


def test_a_void_mount_is_not_widened_by_the_environment() -> None:
    request = mounts_request("void", env=("NVIDIA_VISIBLE_DEVICES=1",))
    assert (request.source, request.devices) == ("none", None)
    assert [source for source, _ in request.ignored] == ["environment"]


def test_a_device_plugins_mount_folder_is_refused_without_its_setting() -> None:
    spec = spec_of(f"NVIDIA_VISIBLE_DEVICES={ROOT}", mounts=[f"{ROOT}/0"])
    with pytest.raises(RequestError, match="as-volume-mounts is off") as refused:
        read_request(spec, Config())
    assert "DEVICE_LIST_STRATEGY" in refused.value.remedy


def test_every_vendor_has_its_own_folder_for_device_plugin_mounts() -> None:
    known = registry.all_vendors(loads(tables()["tpu"])).values()
    assert len(known) > 7
    folders = [names.MOUNTS for names in known]
    assert folders == [f"/var/run/{names.NAME}-container-devices" for names in known]


DECLARING = tables()["tpu"]
# The settings that the installer writes for packaging/kubernetes/base.
BASE = """\
accept-nvidia-visible-devices-envvar-when-unprivileged = false
accept-nvidia-visible-devices-as-volume-mounts = true
"""
EVERY_VARIABLE = [
    (names.NAME, variable)
    for names in registry.all_vendors(loads(DECLARING)).values()
    for variable in names.VARIABLES
]


@pytest.mark.protects(
    "distrusted-environment",
    "Kubernetes: every vendor's environment variables are ignored with the base settings",
)
@pytest.mark.parametrize(("vendor", "variable"), EVERY_VARIABLE)
def test_variables_are_ignored_with_the_kubernetes_base_settings(
    vendor: str, variable: str
) -> None:
    config = loads(f"{BASE}{DECLARING}")
    names = registry.all_vendors(config)[vendor]
    loaded = contract.load(names)
    for value in ("all", "0", f"{names.KIND}=all", f"{names.KIND}=0"):
        spec = spec_of(f"{variable}={value}", "CUDA_VERSION=12.2")
        request = SpecReader(spec, config).read(names, loaded)
        assert not request.selectors, value
        assert not request.cdi_devices, value
        spec["mounts"] = [{"source": "/dev/null", "destination": f"{names.MOUNTS}/1"}]
        assert SpecReader(spec, config).read(names, loaded).selectors == ("1",)
    every = loads(DECLARING)
    spec = spec_of(f"{variable}=0")
    assert SpecReader(spec, every).read(names, loaded).selectors == ("0",)


def test_mounts_name_gaudi_devices_by_index_before_bus_id() -> None:
    """The seat number of a Gaudi can be the index of another Gaudi."""
    gaudi = registry.BUILT_IN["gaudi"]
    spec = {"mounts": [{"source": "/dev/null", "destination": f"{gaudi.MOUNTS}/0"}]}
    reader = SpecReader(spec, config_of(accept_volume_mounts=True))
    request = reader.read(gaudi, contract.load(gaudi))
    assert (request.selectors, request.spaces) == (("0",), ("index", "bus_id"))


# --- annotations ---

MODES = ["hook", "spec", "auto", "cdi"]
TRUST = "trusted more"
UNHEARD = "accept-nvidia-visible-devices-envvar-when-unprivileged is off"


def annotated(
    mode: str, *env: str, mounts: list[str] | None = None, accept: bool = True, **annotations: str
) -> Request:
    """Return the request of a container with annotations, in a configuration that accepts them."""
    spec = spec_of(*env, mounts=mounts)
    spec["annotations"] = {f"cdi.k8s.io/{key}": value for key, value in annotations.items()}
    settings = {"accept_volume_mounts": True, "accept_annotations": accept}
    return read_request(spec, config_of(mode=mode, **settings))


def test_annotations_are_read_in_the_order_of_their_keys() -> None:
    request = annotated("cdi", z="c.d/e=3", a="c.d/e=2, c.d/e=1,,", b="c.d/e=2")
    assert request.devices == ("c.d/e=2", "c.d/e=1", "c.d/e=3")
    assert request.source == "annotations"


@pytest.mark.parametrize("mode", MODES)
def test_annotations_come_before_the_environment(mode: str) -> None:
    request = annotated(mode, "NVIDIA_VISIBLE_DEVICES=1", a=QUALIFIED)
    assert (request.source, request.devices) == ("annotations", (QUALIFIED,))
    assert (request.cdi_devices == (QUALIFIED,)) is (mode == "cdi")
    assert request.ignored == (("environment", f"annotations decide, which are {TRUST}"),)


@pytest.mark.protects(
    "annotations-accepted",
    "annotations are ignored unless the configuration accepts them",
    instead="return True",
)
@pytest.mark.parametrize("mode", ["hook", "spec", "auto"])
def test_annotations_count_only_where_they_are_accepted(mode: str) -> None:
    request = annotated(mode, "NVIDIA_VISIBLE_DEVICES=1", accept=False, a=QUALIFIED, b=QUALIFIED)
    assert (request.source, request.devices) == ("environment", ("1",))
    reason = "'cdi.k8s.io/a': accept-annotations in [gpuhook] is off"
    assert request.ignored == (("annotations", reason),)
    assert annotated(mode, accept=False, a=QUALIFIED).devices is None


def test_annotations_count_in_mode_cdi() -> None:
    assert annotated("cdi", accept=False, a=QUALIFIED).devices == (QUALIFIED,)


@pytest.mark.protects(
    "sources-order",
    "devices requested by mounts aren't extended by annotations or variables",
    instead="<the statement>\nnamed = dict(sorted(named.items()))",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", ["runtime.nvidia.com/gpu=all", "nvidia.com/gpu=all", "all"])
def test_devices_of_mounts_are_not_widened_by_annotations(mode: str, value: str) -> None:
    request = annotated(
        mode, "NVIDIA_VISIBLE_DEVICES=all", mounts=[f"{ROOT}/cdi/{QUALIFIED}"], a=value
    )
    assert (request.source, request.devices) == ("volume-mounts", (QUALIFIED,))
    reasons = dict(request.ignored)
    assert TRUST in reasons["environment"]
    assert "annotations" in reasons


@pytest.mark.parametrize("mode", MODES)
def test_annotations_are_ignored_where_the_environment_is(mode: str) -> None:
    spec = spec_of()
    spec["annotations"] = {"cdi.k8s.io/x": "runtime.nvidia.com/gpu=all"}
    config = config_of(mode=mode, accept_annotations=True, accept_envvar_unprivileged=False)
    request = read_request(spec, config)
    assert (request.source, request.devices) == ("none", None)
    [(source, reason)] = request.ignored
    assert source == "annotations"
    assert reason.endswith(UNHEARD)
    spec["process"]["capabilities"] = {"bounding": ["CAP_SYS_ADMIN"]}
    assert read_request(spec, config).selectors == ("all",)


@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("value", ["vendor.example/nic=0", "unqualified"])
def test_annotations_of_other_vendors_remove_no_requested_gpu(mode: str, value: str) -> None:
    request = annotated(mode, "NVIDIA_VISIBLE_DEVICES=1", a=value)
    assert (request.source, request.devices) == ("environment", ("1",))
    assert request.ignored[0][0] == "annotations"


@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("word", ["void", "Void"])
def test_annotations_beside_void_are_left_to_the_engine(mode: str, word: str) -> None:
    request = annotated(mode, f"NVIDIA_VISIBLE_DEVICES={word}", a=QUALIFIED)
    assert (request.source, request.devices) == ("none", None)
    assert [source for source, _ in request.ignored] == ["annotations"]


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_only_the_built_in_kind_is_read_from_mixed_annotations(mode: str) -> None:
    request = annotated(mode, a=f"vendor.example/nic=0,{QUALIFIED}")
    assert request.devices == (QUALIFIED,)


def test_mode_auto_uses_annotations_entirely_or_not_at_all() -> None:
    assert annotated("auto", a="vendor.example/nic=0").devices == ("vendor.example/nic=0",)
    request = annotated("auto", "NVIDIA_VISIBLE_DEVICES=1", a=f"{QUALIFIED},plain")
    assert (request.source, request.devices) == ("environment", ("1",))


def test_only_annotations_with_configured_prefixes_are_read() -> None:
    spec = {"annotations": {"cdi.k8s.io": "a.b/c=d", "other/x": "a.b/c=d", "p/x": "a.b/c=d"}}
    assert read_request(spec, config_of(mode="cdi")).devices is None
    settings = config_of(mode="cdi", cdi_annotation_prefixes=("q/", "p/"))
    assert read_request(spec, settings).devices == ("a.b/c=d",)


def test_ignored_annotations_may_have_any_type() -> None:
    spec = {"annotations": {"cdi.k8s.io/a": 3}}
    assert read_request(spec, Config()).devices is None
    with pytest.raises(SpecError, match=r"cdi\.k8s\.io/a"):
        read_request(spec, config_of(mode="cdi"))


# --- CDI names and modes ---


@pytest.mark.parametrize("mode", ["hook", "spec", "auto"])
def test_variables_may_contain_cdi_names_of_several_kinds(mode: str) -> None:
    """Names of the vendor's own kind come from the inventory, other names from CDI specs."""
    request = visible(f"{QUALIFIED},{QUALIFIED},nvidia.com/gpu=1,a.b/c=0", mode=mode)
    assert request.devices == (QUALIFIED, "nvidia.com/gpu=1", "a.b/c=0")
    assert request.selectors == ("0", "1")
    assert request.cdi_devices == ("a.b/c=0",)


@pytest.mark.parametrize("mode", ["hook", "spec", "auto"])
def test_device_ids_and_cdi_names_may_be_mixed(mode: str) -> None:
    request = visible(f"{QUALIFIED},1,0,a.b/c=0", mode=mode)
    assert (request.selectors, request.cdi_devices) == (("0", "1"), ("a.b/c=0",))


def test_mode_cdi_qualifies_names() -> None:
    request = visible("0,nvidia.com/gpu=0,c.d/e=1", mode="cdi")
    assert request.cdi_devices == (QUALIFIED, "c.d/e=1")
    assert visible("all", mode="cdi").cdi_devices == ("nvidia.com/gpu=all",)
    assert visible("0", mode="cdi", cdi_default_kind="a.b/c").cdi_devices == ("a.b/c=0",)
    assert visible("none", mode="cdi").cdi_devices == ()


AUTOMATIC = ("runtime.nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu")


@pytest.mark.parametrize("mode", ["hook", "spec", "auto", "cdi"])
@pytest.mark.parametrize("kind", AUTOMATIC)
def test_automatic_kinds_select_the_hosts_own_devices(mode: str, kind: str) -> None:
    """The second kind is used by NVIDIA's device plugin and by the KAI scheduler."""
    request = visible(f"{kind}=all,{kind}=GPU-1", mode=mode)
    assert (request.cdi_devices, request.selectors) == ((), ("all", "GPU-1"))
    none = visible(f"{kind}=none", mode=mode)
    assert (none.cdi_devices, none.selectors) == ((), ())
    assert none.devices is not None


@pytest.mark.parametrize("mode", ["hook", "spec", "auto", "cdi"])
@pytest.mark.parametrize("kind", AUTOMATIC)
def test_automatic_kinds_in_annotations_select_the_hosts_devices(mode: str, kind: str) -> None:
    request = annotated(mode, a=f"{kind}=GPU-1")
    assert (request.cdi_devices, request.selectors) == ((), ("GPU-1",))


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_other_device_plugin_kinds_are_left_to_the_engine(mode: str) -> None:
    request = annotated(mode, a="k8s.device-plugin.nvidia.com/gds=all")
    assert request.devices is None
    assert request.ignored[0][0] == "annotations"


@pytest.mark.parametrize("kind", AUTOMATIC)
def test_automatic_kinds_mixed_with_ids_are_refused_in_mode_cdi(kind: str) -> None:
    with pytest.raises(RequestError, match="together"):
        visible(f"{kind}=0,1", mode="cdi")


# --- privilege ---


@pytest.mark.parametrize(
    ("capabilities", "privileged"),
    [
        (None, False),
        ([], False),
        ({}, False),
        ({"bounding": None}, False),
        ({"effective": ["CAP_SYS_ADMIN"]}, False),
        ({"bounding": ["CAP_KILL", "CAP_SYS_ADMIN"]}, True),
        ({"bounding": ["cap_sys_admin", "SYS_ADMIN", "CAP_SYS_ADMINX", "ALL"]}, False),
        (["CAP_SYS_ADMIN"], True),
    ],
)
def test_only_cap_sys_admin_makes_a_container_privileged(
    capabilities: object, privileged: bool
) -> None:
    assert is_privileged({"process": {"capabilities": capabilities}}) is privileged


def test_a_setting_ignores_the_variables_of_unprivileged_containers() -> None:
    settings = {"accept_envvar_unprivileged": False}
    request = visible("all", **settings)
    assert (request.source, request.devices) == ("none", None)
    assert request.ignored[0][0] == "environment"
    spec = spec_of("NVIDIA_VISIBLE_DEVICES=all")
    spec["process"]["capabilities"] = {"bounding": ["CAP_SYS_ADMIN"]}
    assert read_request(spec, config_of(**settings)).devices == ("all",)
    assert request_for("CUDA_VERSION=9.0", **settings).devices is None  # a legacy image


# --- the rest ---


@pytest.mark.parametrize(
    "spec",
    [
        [],
        {"process": ["env"]},
        {"process": {"env": "A=b"}},
        {"process": {"env": ["A=b", 3]}},
        {"process": {"env": {"A": "b"}}},
        {"process": {"capabilities": "all"}},
        {"process": {"capabilities": {"bounding": "CAP_SYS_ADMIN"}}},
        {"mounts": {"source": "/dev/null"}},
        {"mounts": ["/dev/null"]},
        {"mounts": [{"source": 3}]},
        {"annotations": ["a"]},
    ],
)
def test_a_misshapen_spec_is_refused(spec: Any) -> None:
    with pytest.raises(SpecError) as caught:
        read_request(spec, config_of(accept_envvar_unprivileged=False))
    assert caught.value.code == "spec"


# Variables ------------------------------------------------------------------------------------


Case = dict[str, Any]


@pytest.mark.vectors("oci", "oci.lookup_env")
def test_variables_are_looked_up_as_in_the_vectors(case: Case) -> None:
    variables = sources.parse_environment(case["input"]["env"])
    name = case["input"]["name"]
    assert (name in variables) is case["expected"]["exists"]
    assert variables.get(name, "") == case["expected"]["value"]


def test_only_certain_words_count_as_true() -> None:
    assert all(sources.is_true(yes) for yes in ("1", "t", "T", "TRUE", "true", "True"))
    nothing = (None, "", "0", "f", "false", "yes", "on", "tRUE", " true", "11")
    assert not any(sources.is_true(no) for no in nothing)


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("", []),
        (" , ,", []),
        ("a", ["a"]),
        (" a ,,b\t,a", ["a", "b", "a"]),
        ("a b", ["a b"]),
        ("0 - 3, 5 -7,a - b,1 - ", ["0-3", "5-7", "a - b", "1 -"]),
    ],
)
def test_a_list_is_split_and_stripped(value: str, items: list[str]) -> None:
    assert sources.items(value) == items
