"""Edits of any config.json: gpu-py changes only its own part, or reports gpuhook's own error."""

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import machines
import paper
import pytest
import steps
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhook.base import names
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.base.oci.spec import Spec
from gpuhook.core import edit as editing
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.vendors.registry import all_vendors

# Values that a JSON parser and writer would change.
ODD = (
    r'"timeout":1.0e1,"x":1,"x":2,"a b":"é","s":"\u0061\/","n":-0,"big":1E400,"byte":"' + '\udcff"'
)
HOOK = f'{{"path":"/opt/theirs", "args":["theirs",  "1"],{ODD}}}'


def hook(name: str, *words: str) -> str:
    return json.dumps({"path": f"/usr/bin/{name}", "args": [name, *words]})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bundle, which also holds gpu-py's programs."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "rootfs").mkdir()
    (folder / names.HOOK).touch(mode=0o755)
    return folder


@pytest.fixture(scope="module")
def there(bundle: Path) -> dict[str, Inventory]:
    """GPUs and NPUs whose nodes a group may open, so that an edit adds groups and variables."""
    found = machines.machine(machines.gpu(0, 0), machines.gpu(1, 1))
    found.nodes = tuple(
        DeviceNode(each.path, each.major, each.minor, 0o660, 0, 44) for each in found.nodes
    )
    return {"nvidia": found, "ascend": paper.machine("ascend", bundle / "ascend", 2)}


def settings_of(mode: str, bundle: Path) -> Config:
    config = Config()
    config.mode = mode
    config.state_dir = str(bundle / "state")
    config.cdi_spec_dirs = ()
    return config


def edited(text: str, mode: str, bundle: Path, there: dict[str, Inventory]) -> Spec | None:
    spec = Spec(str(bundle / "config.json"), text)
    return steps.edit(spec, settings_of(mode, bundle), str(bundle), inventories=there)


# Each case has entries that gpuhook removes, among other hooks, nodes and variables.
@pytest.mark.protects(
    "other-hooks",
    "hooks of other programs are unchanged when gpuhook removes its own",
    instead=(
        'return Spec(self.path, jsontext.put(self.text, ("hooks", stage), jsontext.dumps(kept)))'
    ),
)
@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize(
    "gone",
    [
        {"prestart": hook(names.TOOLKIT_HOOKS[0], "prestart")},
        {"createRuntime": hook(names.TOOLKIT_HOOKS[1], "prestart")},
        {"prestart": hook(names.HOOK, names.HELPER_OPTION, "1", "2", "3", "4", "5", "prestart")},
        {"prestart": hook(names.HOOK, names.BUNDLE_OPTION, "/another", "prestart")},
        {"createRuntime": hook(names.HOOK, names.LEASE_VERB)},
        {"prestart": hook(names.TOOLKIT_HOOKS[0]), "createRuntime": hook(names.TOOLKIT_HOOKS[0])},
        {"env": '"ASCEND_DOCKER_RUNTIME=no"'},
        {"devices": '{"path":"/dev/nvidiactl","type":"c","major":1,"minor":9}'},
    ],
    ids=str,
)
def test_removing_an_entry_leaves_all_others_unchanged(
    gone: dict[str, str], mode: str, bundle: Path, there: dict[str, Inventory]
) -> None:
    lists = {name: f",{text}," for name, text in gone.items()}
    of = {name: lists.get(name, ",") for name in ("prestart", "createRuntime", "env", "devices")}
    node = f'{{"path":"/dev/theirs",{ODD}}}'
    entry = '"THEIRS=\\u0061\udcff\\/"'
    asked = '"NVIDIA_VISIBLE_DEVICES=0","ASCEND_VISIBLE_DEVICES=0"'
    text = (
        f'{{"process":{{"env":[{entry}{of["env"]}{asked}]}},"root":{{"path":"rootfs",{ODD}}},'
        f'"hooks":{{"prestart":[{HOOK}{of["prestart"]}{HOOK}],'
        f'"createRuntime":[{HOOK}{of["createRuntime"]}{HOOK}]}},'
        f'"linux":{{"namespaces":[{{"type":"mount"}}],'
        f'"devices":[{node}{of["devices"]}{node}]}},{ODD}}}'
    )
    found = edited(text, mode, bundle, there)
    assert found is not None
    lost = [each for each in (HOOK, node, entry, ODD) if found.text.count(each) != text.count(each)]
    assert lost == []
    for name, dropped in gone.items():
        if mode == "spec" or name != "devices":
            assert dropped not in found.text


# Any shape -----------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "ociVersion": "1.0.2",
    "process": {
        "user": {"uid": 0, "gid": 0, "additionalGids": [1]},
        "env": [
            "NVIDIA_VISIBLE_DEVICES=0", "ASCEND_VISIBLE_DEVICES=0", "ASCEND_DOCKER_RUNTIME=x",
        ],
        "capabilities": {"bounding": ["CAP_KILL"]},
    },
    "root": {"path": "rootfs", "readonly": True},
    "mounts": [
        {"source": "/x", "destination": "/y", "type": "bind", "options": ["bind", "ro"]},
        {"source": "cgroup", "destination": "/sys/fs/cgroup", "type": "cgroup2"},
    ],
    "annotations": {"x": "y", "cdi.k8s.io/x": "nvidia.com/gpu=0"},
    "hooks": {
        **{
            stage: [
                {"path": f"/usr/bin/{name}", "args": [name, word], "env": ["A=B"], "timeout": 1}
                for name, word in (
                    (names.HOOK, names.HELPER_OPTION), (names.TOOLKIT_HOOKS[0], "prestart"),
                )
            ]
            for stage in names.HOOK_STAGES
        },
        names.CDI_HOOK_STAGE: [{"path": "/usr/bin/" + names.CDI_HOOK, "args": ["x", "y"]}],
    },
    "linux": {
        "cgroupsPath": "system.slice:docker:x",
        "namespaces": [{"type": "mount"}, {"type": "user"}],
        "gidMappings": [{"containerID": 0, "hostID": 0, "size": 1000}],
        "devices": [{"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255}],
        "resources": {
            "devices": [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c",
                        "major": 195, "minor": 255, "access": "rwm"}],
        },
    },
}  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, 7, 1 << 70, "x", "\0", "\ud800", [], [["q"]], [{}], {}, {"x": {}}, {"path": 7},
)  # fmt: skip
JSON = st.recursive(
    st.sampled_from(ODD_VALUES),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=3), children, max_size=2)
    ),
    max_leaves=5,
)
SETTINGS: dict[str, dict[str, Any]] = {
    "hook": {},
    "spec": {},
    "cdi": {},
    "auto": {"accept_annotations": True},
    "exclusive": {"exclusive": ("all",)},
    "limited": {"device_memory": "1GiB"},
}


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a value."""
    inside = [*value.items()] if isinstance(value, dict) else []
    inside += [*enumerate(value)] if isinstance(value, list) else []
    return [path for key, each in inside for path in ((*above, key), *places(each, (*above, key)))]


PLACES = places(WHOLE)


def with_another(data: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy with another value at a place, if the place still exists."""
    found = copy.deepcopy(data)
    node: Any = found
    for key in place[:-1]:
        try:
            node = node[key]
        except (LookupError, TypeError):
            return found
    if isinstance(node, dict) or (isinstance(node, list) and place[-1] in range(len(node))):
        node[place[-1]] = value
    return found


def assert_edited_or_refused(
    data: dict[str, Any], way: str, bundle: Path, there: dict[str, Inventory]
) -> None:
    config = settings_of(way if way in ("spec", "cdi", "auto") else "hook", bundle)
    for key, value in SETTINGS[way].items():
        setattr(config, key, value)
    spec = Spec(str(bundle / "config.json"), json.dumps(data))
    with suppress(GpuhookError):
        found = steps.edit(spec, config, str(bundle), inventories=there)
        assert found is None or json.loads(found.text.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("way", SETTINGS)
def test_config_json_with_an_odd_value_is_edited_or_refused(
    way: str, bundle: Path, there: dict[str, Inventory]
) -> None:
    failed = {}
    values = ODD_VALUES[::3] if way == "limited" else ODD_VALUES  # each one asks the driver
    for place in PLACES:
        for value in values:
            try:
                assert_edited_or_refused(with_another(WHOLE, place, value), way, bundle, there)
            except Exception as error:  # noqa: BLE001 - all places are told
                failed[f"{place}: {value!r}"] = repr(error)
    assert failed == {}, [*failed.items()]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=2, max_size=5),
    st.sampled_from([*SETTINGS]),
)
def test_config_json_with_many_odd_values_is_edited_or_refused(
    bundle: Path, there: dict[str, Inventory], changes: list[tuple[tuple[Any, ...], Any]], way: str
) -> None:
    data = WHOLE
    for place, value in changes:
        data = with_another(data, place, value)
    assert_edited_or_refused(data, way, bundle, there)


def test_an_edit_returns_a_hook_worker_task_and_starts_no_process(
    bundle: Path, there: dict[str, Inventory]
) -> None:
    """The words that lead the hook to a worker come last; without them, the hook does the work."""
    spec = Spec(str(bundle / "config.json"), with_variable("0"))
    config = settings_of("hook", bundle)
    before = children()
    found = editing.edit(
        spec, config, all_vendors(config), str(bundle), has_worker=True, inventories=there
    )
    assert children() == before
    assert found is not None
    assert found.task is not None
    assert (found.task.kind, found.task.spec.path) == ("", spec.path)
    assert found.task.resolved.grants
    words = ["1", "2", "3", "4", str(bundle)]
    assert our_hook(found.finish(words)) == [names.HOOK, names.HELPER_OPTION, *words, "prestart"]
    plain = [names.HOOK, names.BUNDLE_OPTION, str(bundle), "prestart"]
    assert our_hook(found.finish()) == plain


def test_an_edit_without_an_added_hook_returns_no_task(
    bundle: Path, there: dict[str, Inventory]
) -> None:
    text = with_variable("0", hooks='{"createRuntime":[' + hook(names.HOOK, "prestart") + "]}")
    for mode, given_text in (("hook", text), ("spec", with_variable("0"))):
        config = settings_of(mode, bundle)
        spec = Spec(str(bundle / "config.json"), given_text)
        found = editing.edit(
            spec, config, all_vendors(config), str(bundle), has_worker=True, inventories=there
        )
        assert found is not None
        assert found.task is None
        assert found.finish(["1"]).text == found.finish().text


def with_variable(value: str, hooks: str = "{}") -> str:
    return (
        '{"process":{"env":["NVIDIA_VISIBLE_DEVICES=' + value + '"]},"root":{"path":"rootfs"},'
        '"linux":{"namespaces":[{"type":"mount"}]},"hooks":' + hooks + "}"
    )


def our_hook(spec: Spec) -> list[str]:
    [found] = spec.hooks("prestart")
    args: list[str] = found["args"]
    return args


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()
