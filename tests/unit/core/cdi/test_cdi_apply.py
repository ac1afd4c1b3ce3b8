"""Effects of devices' edits on config.json."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhook.base.errors import CdiError, SpecError, UnknownDeviceError
from gpuhook.base.names import HOOK_ENVIRONMENT
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi import apply, folders

Case = dict[str, Any]
Node = tuple[str, int, int, int]

# Name of the case -> the changes in gpuhook's config.json that differ from the library's;
# docs/engineering/differences.md says why.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "permissions none": {
        "linux": {"devices": [{"path": "/dev/nil", "type": "c", "major": 1, "minor": 3}]}
    },
    "device named twice": {
        "process": {"env": ["ONCE=a", "N=x"]},
        "hooks": {"createContainer": [{"path": "/h", "args": ["h", "x"]}]},
    },
}
# The CDI library's phrase -> a part of gpuhook's message.
PHRASES = {
    "failed to stat CDI host device": "The device node /dev/x can't be read",
    "host type mismatch": "The device node /dev/x is of the type c, not b",
    "not a device node": "/dev/x isn't a device node",
}


def null_alone(path: str) -> Node | None:
    """Return the node of a host that has only /dev/null."""
    if path != "/dev/null":
        raise FileNotFoundError(2, os.strerror(2), path)
    return ("c", 1, 3, 0o666)


def no_host(path: str) -> Node | None:
    raise AssertionError(f"{path} has numbers already")


def spec_of(data: dict[str, Any], indent: int | None = 1) -> Spec:
    return Spec("/bundle/config.json", json.dumps(data, indent=indent))


def look(root: Path, given_: dict[str, Any]) -> folders.FolderContent:
    """Create the folder etc of a case with its files; return the content that is read from it."""
    (root / "etc").mkdir()
    files = given_.get("etc", {})
    files = {**files, **{key[4:]: given_[key] for key in given_ if key.startswith("etc/")}}
    for name, content in files.items():
        (root / "etc" / name).write_text(json.dumps(content))
    return folders.read_folders([str(root / "etc")])


@pytest.mark.vectors("cdi_apply", "cdi.apply_edits")
def test_applied_edits_match_the_shared_cases(case: Case) -> None:
    before, edits = case["input"]["config.json"], case["input"]["containerEdits"] or {}
    kept = copy.deepcopy((before, edits))
    expected = DIFFERENCES.get(case["name"], case["expected"]["config.json"])
    assert apply.apply(before, edits, null_alone) == expected
    assert apply.apply_to_spec(spec_of(before), edits, null_alone).data == expected
    assert (before, edits) == kept


@pytest.mark.vectors("cdi_apply", "cdi.merge_edits")
def test_merged_edits_match_the_shared_cases(case: Case) -> None:
    given_ = case["input"]
    assert apply.merge([given_["into"], *given_["from"]]) == case["expected"]["edits"]


def test_the_last_rdt_setting_counts() -> None:
    merged = apply.merge([{"intelRdt": {"closID": "a"}}, {"intelRdt": None}, {"intelRdt": {}}])
    assert merged == {"intelRdt": {}}


@pytest.mark.vectors("cdi_apply", "cdi.inject")
def test_injected_devices_match_the_shared_cases(case: Case, tmp_path: Path) -> None:
    given_, expected = case["input"], case["expected"]
    found = look(tmp_path, given_)
    assert apply.unresolved(found, given_["devices"]) == expected.get("unresolved", [])
    if "unresolved" in expected:
        with pytest.raises(UnknownDeviceError, match=expected["unresolved"][0]):
            apply.resolve(found, given_["devices"])
        return
    edits = apply.resolve(found, given_["devices"])
    whole = DIFFERENCES.get(case["name"], expected["config.json"])
    assert apply.apply(given_["config.json"], edits, no_host) == whole


@pytest.mark.vectors("cdi_apply", "cdi.node_from_host")
def test_missing_device_numbers_are_read_from_the_host(case: Case) -> None:
    there, expected = case["input"]["host"], case["expected"]

    def host(path: str) -> Node | None:
        if path not in there:
            raise FileNotFoundError(2, os.strerror(2), path)
        node = there[path]
        if "link" in node:
            return None
        return (node["type"], node["major"], node["minor"], int(node["mode"], 8))

    if "type" in expected:
        found = apply.with_numbers(case["input"]["node"], host)
        assert found == {**case["input"]["node"], **expected}
        return
    with pytest.raises(CdiError) as caught:
        apply.with_numbers(case["input"]["node"], host)
    assert PHRASES.get(expected.get("error_contains"), "") in caught.value.cause


@pytest.mark.parametrize(
    ("node", "there", "expected"),
    [({"hostPath": "/dev/null"}, ("c", 1, 3, 0o666), ("c", 1, 3, 0o666)),
     ({"type": "c", "minor": 9}, ("c", 1, 3, 0o600), ("c", 1, 3, 0o600)),
     ({"major": 7, "minor": 9}, ("b", 1, 3, 0o600), ("b", 7, 9, 0o600)),
     ({"fileMode": 0o644}, ("c", 1, 3, 0o600), ("c", 1, 3, 0o644)),
     ({"fileMode": 0}, ("c", 1, 3, 0o600), ("c", 1, 3, 0)),
     ({}, ("p", 0, 0, 0o600), ("p", None, None, 0o600))],
)  # fmt: skip
def test_missing_device_node_fields_come_from_the_host(
    node: dict[str, Any], there: Node, expected: tuple[Any, ...]
) -> None:
    found = apply.with_numbers({"path": "/x", **node}, lambda _: there)
    assert tuple(found.get(key) for key in ("type", "major", "minor", "fileMode")) == expected


def test_a_pipe_is_added_without_a_host_node() -> None:
    data = apply.apply({}, {"deviceNodes": [{"path": "/p", "type": "p"}]}, no_host)
    assert data == {"linux": {"devices": [{"path": "/p", "type": "p"}]}}


def test_the_hosts_nodes_are_read_without_following_links(tmp_path: Path) -> None:
    assert apply.host_node("/dev/null") == ("c", 1, 3, 0o666)
    (tmp_path / "link").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe", 0o600)
    found = apply.host_node(str(tmp_path / "pipe"))
    assert apply.host_node(str(tmp_path / "link")) is None
    assert apply.host_node(str(tmp_path)) is None
    assert found is not None
    assert found[0] == "p"
    with pytest.raises(FileNotFoundError):
        apply.host_node(str(tmp_path / "none"))


def test_nodes_are_owned_by_the_process_unless_an_owner_is_given() -> None:
    nodes = [{"path": f"/{uid}", "type": "c", "major": 1, "uid": uid} for uid in (None, 0, 7)]
    data = apply.apply({"process": {"user": {"uid": 5, "gid": 0}}}, {"deviceNodes": nodes}, no_host)
    assert [node.get("uid") for node in data["linux"]["devices"]] == [5, 0, 7]
    assert ["gid" in node for node in data["linux"]["devices"]] == [False] * 3


def test_an_existing_node_is_replaced() -> None:
    before = {"linux": {"devices": [{"path": "/a", "x": 1}, {"path": "/b"}, {"path": "/a"}]}}
    node = {"path": "/a", "type": "b", "major": 8, "minor": 1, "permissions": "r"}
    data = apply.apply(before, {"deviceNodes": [node]}, no_host)
    assert data["linux"] == {
        "devices": [
            {"path": "/b"},
            {"path": "/a"},
            {"path": "/a", "type": "b", "major": 8, "minor": 1},
        ],
        "resources": {
            "devices": [{"allow": True, "type": "b", "major": 8, "minor": 1, "access": "r"}]
        },
    }


def test_existing_variables_are_replaced_in_place() -> None:
    before = {"process": {"env": ["A=1", "B=2", "A=3", "AB"]}}
    data = apply.apply(before, {"env": ["A=x", "C=y", "AB=z", "C="]}, no_host)
    assert data == {"process": {"env": ["A=x", "B=2", "A=x", "AB=z", "C="]}}


def test_mounts_are_ordered_by_depth() -> None:
    before = {"mounts": [{"destination": d} for d in ("/proc", "/a/b/c", "//d", "/", "/e/", "/x")]}
    mounts = [{"hostPath": "/h", "containerPath": d} for d in ("/a/b", "/x", "/a", "/a/./../b")]
    data = apply.apply(before, {"mounts": mounts}, no_host)
    assert [mount["destination"] for mount in data["mounts"]] == [
        "/proc", "//d", "/", "/e/", "/x", "/a", "/a/./../b", "/a/b", "/a/b/c",
    ]  # fmt: skip


def test_without_new_mounts_the_order_is_unchanged() -> None:
    before = {"mounts": [{"destination": "/a/b"}, {"destination": "/a"}]}
    assert (
        apply.apply(before, {"env": ["A=b"], "mounts": []}, no_host)["mounts"] == (before["mounts"])
    )


@pytest.mark.parametrize(
    ("mount", "options"),
    [({"type": "tmpfs"}, None), ({"options": ["ro", "rbind"]}, ["ro", "rbind", "ridmap"]),
     ({"options": ["bind"]}, ["bind", "idmap"]), ({"options": ["ro"]}, ["ro"]),
     ({"type": "bind", "options": ["idmap"]}, ["idmap"]),
     ({"options": ["rbind", "ridmap"]}, ["rbind", "ridmap"])],
)  # fmt: skip
def test_bind_mounts_are_mapped_into_a_user_namespace(
    mount: dict[str, Any], options: list[str] | None
) -> None:
    edits = {"mounts": [{"hostPath": "/h", "containerPath": "/c", **mount}]}
    for spaces, expected in (([{"type": "user"}], options), ([], mount.get("options"))):
        [found] = apply.apply({"linux": {"namespaces": spaces}}, edits, no_host)["mounts"]
        assert found.get("options") == expected


def test_groups_are_added_once_and_never_root() -> None:
    before = {"process": {"user": {"uid": 1, "additionalGids": [4]}}}
    data = apply.apply(before, {"additionalGids": [0, 5, 4, 5]}, no_host)
    assert data == {"process": {"user": {"uid": 1, "additionalGids": [4, 5]}}}


def test_hook_fields_are_kept_when_hooks_are_added() -> None:
    hook = {"hookName": "poststop", "path": "/h", "args": [], "env": ["A=b"], "timeout": 0}
    data = apply.apply({"hooks": {"poststop": [{"path": "/g"}]}}, {"hooks": [hook]}, no_host)
    assert data == {
        "hooks": {"poststop": [{"path": "/g"}, {"path": "/h", "env": ["A=b"], "timeout": 0}]}
    }


def test_hooks_without_an_environment_get_a_fixed_one() -> None:
    hooks: list[dict[str, Any]] = [{"hookName": "createContainer", "path": "/h"}]
    hooks.append({**hooks[0], "env": []})
    own = {"hookName": "createContainer", "path": "/h", "env": ["A=b"]}
    spec = apply.apply_to_spec(spec_of({}), {"hooks": [*hooks, own]}, no_host)
    found = [hook["env"] for hook in spec.data["hooks"]["createContainer"]]
    assert found == [HOOK_ENVIRONMENT, HOOK_ENVIRONMENT, ["A=b"]]


@pytest.mark.parametrize(
    ("data", "edits", "words"),
    [({"process": []}, {"env": ["A=b"]}, "process in the container's config.json is not an obj"),
     ({"process": {"env": {}}}, {"env": ["A=b"]}, "process.env .* is not a list"),
     ({"mounts": 1}, {"mounts": [{"hostPath": "/a", "containerPath": "/b"}]}, "mounts .* a list"),
     ({"linux": "x"}, {"deviceNodes": [{"path": "/p", "type": "p"}]}, "linux .* an object")],
)  # fmt: skip
def test_config_json_fields_of_the_wrong_type_are_refused(
    data: dict[str, Any], edits: dict[str, Any], words: str
) -> None:
    for attempt in (
        lambda: apply.apply(data, edits, no_host),
        lambda: apply.apply_to_spec(spec_of(data), edits, no_host),
    ):
        with pytest.raises(SpecError, match=words):
            attempt()


def test_invalid_net_devices_in_config_json_are_refused() -> None:
    edits = {"netDevices": [{"hostInterfaceName": "eno1", "name": "x"}]}
    for attempt in (
        lambda: apply.apply({"linux": {"netDevices": []}}, edits, no_host),
        lambda: apply.apply_to_spec(spec_of({"linux": {"netDevices": []}}), edits, no_host),
    ):
        with pytest.raises(SpecError, match=r"linux.netDevices .* is not an object"):
            attempt()


def test_all_unresolved_device_names_are_listed(tmp_path: Path) -> None:
    device = {"name": "x", "containerEdits": {"env": ["A=b"]}}
    document = {"cdiVersion": "0.3.0", "kind": "v/c", "devices": [device]}
    found = look(tmp_path, {"etc": {"a.json": document, "b.json": document}})
    names = ["v/c=x", "v/c=y", "v/c=y", "bad\n"]
    assert apply.unresolved(found, names) == ["v/c=x", "v/c=y", "bad\n"]
    with pytest.raises(UnknownDeviceError) as caught:
        apply.resolve(found, names)
    files = f"{tmp_path}/etc/a.json and {tmp_path}/etc/b.json"
    begin = f"These CDI devices can't be used: 'v/c=x' (in {files}), 'v/c=y', 'bad\\n'"
    assert caught.value.cause == f"{begin}; no device of 'v/c' can be used"


def test_common_edits_of_each_used_file_are_applied_once(tmp_path: Path) -> None:
    def document(name: str) -> dict[str, Any]:
        edits = {"env": [f"COMMON_{name}=1"]}
        device = {"name": name, "containerEdits": {"env": [f"OWN_{name}=1"]}}
        return {"cdiVersion": "0.3.0", "kind": "v/c", "containerEdits": edits, "devices": [device]}

    found = look(tmp_path, {"etc": {"a.json": document("a"), "b.json": document("b")}})
    assert apply.resolve(found, ["v/c=b", "v/c=a", "v/c=b"])["env"] == [
        "COMMON_b=1", "OWN_b=1", "COMMON_a=1", "OWN_a=1",
    ]  # fmt: skip
    assert apply.resolve(found, []) == {}


TEXT = r"""{ "ociVersion":"1.0.2",  "x\u0041" : [1e2, {"y": 1.50}],
  "process" : {"env": [ "A=\u00e9\/",  "B=2" ], "cwd":"/", "args":null},
  "mounts": [ {"destination":"/a/b", "Q": 1.0},   {"destination" : "/a"} ],
  "linux": { "devices": null, "resources": {"devices": [ {"allow":false, "access":"rwm"} ]} },
  "hooks": {"prestart": [ {"path":"/p" , "odd": 1e3} ]}
}
"""


def test_unrelated_bytes_of_config_json_are_unchanged() -> None:
    edits = {
        "env": ["B=3", "C=4"],
        "deviceNodes": [{"path": "/n", "type": "c", "major": 1, "minor": 2}],
        "mounts": [{"hostPath": "/h", "containerPath": "/c"}],
        "hooks": [{"hookName": "prestart", "path": "/q", "env": ["X=1"]}],
        "additionalGids": [3],
    }
    spec = apply.apply_to_spec(Spec("/b/config.json", TEXT), edits, no_host)
    assert spec.data == apply.apply(json.loads(TEXT), edits, no_host)
    for kept in (
        r'{ "ociVersion":"1.0.2",  "x\u0041" : [1e2, {"y": 1.50}],', r'"A=\u00e9\/"',
        '{"destination":"/a/b", "Q": 1.0}', '{"destination" : "/a"}', '"cwd":"/", "args":null',
        '{"allow":false, "access":"rwm"}', '{"path":"/p" , "odd": 1e3}',
    ):  # fmt: skip
        assert kept in spec.text


def test_invalid_utf8_bytes_are_unchanged() -> None:
    text = '{"process": {"env": ["A=\udcff", "B=1"]}}'
    spec = apply.apply_to_spec(Spec("/b/config.json", text), {"env": ["B=2"]}, no_host)
    assert spec.text == '{"process": {"env": ["A=\udcff","B=2"]}}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
PLACES = st.sampled_from(["/a", "/a/b", "/b", "/a/b/c"])
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "process": st.fixed_dictionaries(
            {}, optional={"env": st.lists(st.sampled_from(["A=1", "B=2", "A", ""])), "x": JSON}
        ),
        "mounts": st.lists(st.fixed_dictionaries({"destination": PLACES}, optional={"o": JSON})),
        "linux": st.none()
        | st.fixed_dictionaries(
            {}, optional={"devices": st.lists(st.fixed_dictionaries({"path": PLACES}))}
        ),
        "hooks": st.none() | st.dictionaries(st.sampled_from(["prestart", "poststop"]), st.none()),
        "rest": JSON,
    },
)
EDITS = st.fixed_dictionaries(
    {},
    optional={
        "env": st.lists(st.sampled_from(["A=x", "C=y"]), max_size=3),
        "deviceNodes": st.lists(
            st.fixed_dictionaries({"path": PLACES, "type": st.just("c"), "major": st.just(1)}),
            max_size=3,
        ),
        "mounts": st.lists(
            st.fixed_dictionaries({"hostPath": PLACES, "containerPath": PLACES}), max_size=3
        ),
        "hooks": st.lists(
            st.fixed_dictionaries(
                {"hookName": st.just("prestart"), "path": PLACES, "env": st.just(["E=1"])}
            ),
            max_size=2,
        ),
        "additionalGids": st.lists(st.integers(0, 3), max_size=3),
        "netDevices": st.lists(
            st.fixed_dictionaries({"hostInterfaceName": PLACES, "name": PLACES}), max_size=2
        ),
        "intelRdt": st.just({"closID": "x"}),
    },
)


@settings(max_examples=400)
@given(SPECS, EDITS, st.sampled_from([None, 1]))
def test_editing_text_and_data_gives_equal_results(
    data: dict[str, Any], edits: dict[str, Any], indent: int | None
) -> None:
    before = copy.deepcopy(data)
    expected = apply.apply(data, edits, no_host)
    assert data == before
    assert apply.apply_to_spec(spec_of(data, indent), edits, no_host).data == expected
    assert expected.get("rest") == data.get("rest")
