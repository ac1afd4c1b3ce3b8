"""The NRI plugin with a test engine: its registration, the engine's requests, and the responses."""

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
import wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from wire import Value, integer, messages, string

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError, PluginError, RequestError
from gpuhook.cluster.nri.answer import InjectionMode, NriResponse, edits
from gpuhook.cluster.nri.asked import PATIENCE, ContainerRequest
from gpuhook.cluster.nri.parser import Parser
from gpuhook.cluster.nri.service import NriPlugin, _refusal, run
from gpuhook.cluster.nri.transport import PLUGIN, REQUEST, RESPONSE, RUNTIME, Connection
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.resolve import resolve
from gpuhook.vendors import registry

NRI = "nri.pkg.api.v1alpha1."
HOOK = "/opt/gpuhook/bin/gpuhook-cdi-hook"


class Engine:
    """The engine's end of a connection, which sends requests encoded by the tests' own code."""

    def __init__(self, channel: socket.socket, stop: int) -> None:
        self._connection = Connection(channel, stop)
        self._stream = -1

    def registration(self) -> tuple[str, str]:
        found = self._connection.receive(5)
        assert found is not None
        assert (found.connection, found.stream, found.kind) == (RUNTIME, 1, REQUEST)
        assert string(found.data, 1) == f"{NRI}Runtime"
        assert string(found.data, 2) == "RegisterPlugin"
        [who] = messages(found.data, 3)
        assert not string(who, 3), "gpuhook's version isn't the version of NRI that engines log"
        self._connection.send(RUNTIME, 1, RESPONSE, b"")
        return string(who, 1), string(who, 2)

    def ask(self, method: str, payload: bytes = b"", service: str = "Plugin") -> bytes:
        """Send a request; return the whole response."""
        self._stream += 2
        request = wire.message((1, f"{NRI}{service}"), (2, method), (3, payload))
        self._connection.send(PLUGIN, self._stream, REQUEST, request)
        found = self._connection.receive(5)
        assert found is not None
        assert (found.connection, found.stream, found.kind) == (PLUGIN, self._stream, RESPONSE)
        return found.data

    def create(
        self, *env: str, pod: tuple[tuple[int, Value], ...] = (), annotation: str = ""
    ) -> bytes:
        who = wire.message((1, "p1"), (2, "pod"), (4, "team"), *pod)
        noted = wire.message((1, "cdi.k8s.io/a"), (2, annotation))
        more = ((6, noted),) if annotation else ()
        container = wire.message((1, "c1"), (3, "main"), *((8, each) for each in env), *more)
        return self.ask("CreateContainer", wire.message((1, who), (2, container)))


def adjustment(response: bytes) -> bytes:
    assert not messages(response, 1), refusal(response)
    [payload] = messages(response, 2) or [b""]
    return (messages(payload, 1) or [b""])[0]


def refusal(response: bytes) -> str:
    [status] = messages(response, 1)
    assert integer(status, 1)
    return string(status, 2)


def nodes(response: bytes) -> list[str]:
    [linux] = messages(adjustment(response), 6)
    return [string(each, 1) for each in messages(linux, 1)]


def environment(response: bytes) -> dict[str, str]:
    return {string(each, 1): string(each, 2) for each in messages(adjustment(response), 4)}


class Served:
    """A plugin that runs in a thread, and its engine."""

    def __init__(
        self, way: InjectionMode, current: Callable[[], InjectionMode] | None = None
    ) -> None:
        self.ours, self.theirs = socket.socketpair()
        self._reader, self._writer = os.pipe()
        self.engine = Engine(self.theirs, self._reader)
        self.parser = Parser()
        self.said: list[str] = []
        self.failed: PluginError | None = None
        self._thread = threading.Thread(target=self._run, args=(current or (lambda: way),))
        self._thread.start()

    def _run(self, current: Callable[[], InjectionMode]) -> None:
        try:
            connection = Connection(self.ours, self._reader)
            NriPlugin(connection, self.parser, current, self.said.append, "50").serve()
        except PluginError as error:
            self.failed = error
        finally:
            self.parser.close()

    def end(self) -> None:
        self.theirs.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.ours.close()
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def served(way: InjectionMode) -> Iterator[Served]:
    made = Served(way)
    try:
        yield made
    finally:
        made.end()


def test_registration_subscribes_to_container_creation_only(served: Served) -> None:
    assert served.engine.registration() == ("gpuhook", "50")
    answer = served.engine.ask("Configure", wire.message((2, "containerd"), (3, "2.1.4")))
    [payload] = messages(answer, 2)
    assert integer(payload, 2) == 8
    served.engine.ask("Synchronize")
    assert served.said == ["Serves containerd 2.1.4"]


def test_synchronize_is_answered_in_parts(served: Served) -> None:
    served.engine.registration()
    for more in (1, 1, 0):
        answer = served.engine.ask("Synchronize", wire.message((1, b""), (3, more)))
        assert integer((messages(answer, 2) or [b""])[0], 2) == more


def test_unsupported_methods_services_and_messages_are_refused(served: Served) -> None:
    served.engine.registration()
    assert "doesn't serve" in refusal(served.engine.ask("RemoveContainer"))
    assert "no such service" in refusal(served.engine.ask("Configure", service="Other"))
    assert "isn't understood" in refusal(served.engine.ask("CreateContainer", b"\xff\xff"))
    assert messages(served.engine.ask("StateChange"), 1) == []


def test_a_container_gets_the_requested_devices(served: Served) -> None:
    served.engine.registration()
    answer = served.engine.create("PATH=/bin", "AMD_VISIBLE_DEVICES=1,2")
    assert nodes(answer) == [
        "/dev/kfd", "/dev/dri/card1", "/dev/dri/card2", "/dev/dri/renderD129",
        "/dev/dri/renderD130",
    ]  # fmt: skip
    assert environment(answer) == {"AMD_VISIBLE_DEVICES": "void"}
    assert served.said == [served.said[0]]
    assert served.said[0].startswith("team/pod/main: answered in ")


def test_a_container_without_a_request_is_unchanged(served: Served) -> None:
    served.engine.registration()
    assert adjustment(served.engine.create("PATH=/bin")) == b""
    assert adjustment(served.engine.create("AMD_VISIBLE_DEVICES=void")) == b""


def test_a_container_of_gpu_py_is_left_to_it(served: Served) -> None:
    served.engine.registration()
    answer = served.engine.create("AMD_VISIBLE_DEVICES=1", pod=((7, "gpu-py"),))
    assert adjustment(answer) == b""


def test_a_request_for_a_missing_device_is_refused(served: Served) -> None:
    served.engine.registration()
    assert "9" in refusal(served.engine.create("AMD_VISIBLE_DEVICES=9"))


def test_cdi_mode_answers_with_cdi_device_names(way: InjectionMode) -> None:
    made = Served(InjectionMode(way.config, HOOK, by_cdi=True))
    try:
        made.engine.registration()
        found = adjustment(made.engine.create("AMD_VISIBLE_DEVICES=1,2"))
        assert [string(each, 1) for each in messages(found, 8)] == [
            "amd.com/gpu=1",
            "amd.com/gpu=2",
        ]
        assert messages(found, 6) == []
    finally:
        made.end()


@pytest.fixture
def gated(way: InjectionMode) -> Iterator[tuple[Served, list[tuple[str, str]]]]:
    """A plugin with a gate, and the list of devices that the kubelet gave to main in team/pod."""
    names: list[tuple[str, str]] = []

    def given(*container: Any) -> list[tuple[str, str]]:
        return names if container[:3] == ("team", "pod", "main") else []

    made = Served(InjectionMode(way.config, HOOK, given=given))
    made.engine.registration()
    try:
        yield made, names
    finally:
        made.end()


Gated = tuple[Served, list[tuple[str, str]]]


@pytest.mark.protects(
    "nri-gate", "the NRI gate refuses devices that the kubelet hasn't allocated to the container"
)
def test_a_device_that_the_kubelet_has_not_allocated_is_refused(gated: Gated) -> None:
    served, names = gated
    said = refusal(served.engine.create("AMD_VISIBLE_DEVICES=1"))
    assert "team/pod asks for AMD GPU 1 by a variable" in said
    names.append(("amd.com/gpu", "0x84cafeae17e7610"))
    assert len(nodes(served.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3
    assert "asks for AMD GPU 2" in refusal(served.engine.create("AMD_VISIBLE_DEVICES=1,2"))


def test_the_gate_knows_the_pod_by_its_uid(way: InjectionMode) -> None:
    """The kubelet's record of init containers identifies pods by uid."""
    asked: list[tuple[Any, ...]] = []

    def given(*container: Any) -> list[tuple[str, str]]:
        asked.append(container)
        return [("amd.com/gpu", "0x84cafeae17e7610")]

    made = Served(InjectionMode(way.config, HOOK, given=given))
    try:
        made.engine.registration()
        nodes(made.engine.create("AMD_VISIBLE_DEVICES=1", pod=((3, "uid-7"),)))
    finally:
        made.end()
    assert [each[:4] for each in asked] == [("team", "pod", "main", "uid-7")]


@pytest.mark.protects(
    "nri-gate-handlers", "a RuntimeClass doesn't bypass the NRI gate", instead="if by_runtime:"
)
@pytest.mark.parametrize("handler", ["gpu-py", "nvidia"])
def test_a_runtime_class_does_not_bypass_the_gate(gated: Gated, handler: str) -> None:
    """A pod's author chooses the class, and its runtime would give the requested devices."""
    served, names = gated
    pod = ((7, handler),)
    assert "asks for AMD GPU 1 by" in refusal(
        served.engine.create("AMD_VISIBLE_DEVICES=1", pod=pod)
    )
    every = served.engine.create("AMD_VISIBLE_DEVICES=all", pod=pod)
    assert environment(every) == {"AMD_VISIBLE_DEVICES": "none"}
    names.append(("amd.com/gpu", "0x84cafeae17e7610"))
    assert adjustment(served.engine.create("AMD_VISIBLE_DEVICES=1", pod=pod)) == b""
    every = served.engine.create("AMD_VISIBLE_DEVICES=all", pod=pod)
    assert environment(every) == {"AMD_VISIBLE_DEVICES": "1"}
    assert messages(adjustment(every), 6) == [], "nodes are the runtime's to give"
    assert adjustment(served.engine.create("PATH=/bin", pod=pod)) == b""


@pytest.mark.protects(
    "nri-gate-handlers", "a RuntimeClass doesn't bypass the NRI gate", instead="if by_runtime:"
)
@pytest.mark.parametrize("handler", ["gpu-py", "nvidia"])
def test_device_mounts_do_not_bypass_the_gate(way: InjectionMode, handler: str) -> None:
    config = way.config
    config.accept_volume_mounts = True
    given = [("amd.com/gpu", "0x84cafeae17e7610")]
    gated = InjectionMode(config, HOOK, given=lambda *_: given)
    for name in ("all", "2"):
        mounts = (("/var/run/amd-container-devices/" + name, "/dev/null"),)
        asked = ContainerRequest("team", "pod", "main", handler, ("AMD_VISIBLE_DEVICES=1",), mounts)
        with pytest.raises(RequestError, match="kubelet hasn't allocated"):
            edits(asked, gated)
    mounts = (("/var/run/amd-container-devices/1", "/dev/null"),)
    assert edits(ContainerRequest("team", "pod", "main", handler, (), mounts), gated) == {}


SECOND = ("amd.com/gpu", "0x84cafeae17e7610")
THIRD = ("amd.com/gpu", "0x84cafeae17e7620")
FOLDER = "/var/run/amd-container-devices/cdi"
# The configuration, the container's request, and the device the kubelet must have allocated.
DOCUMENTED: dict[str, tuple[dict[str, Any], ContainerRequest, tuple[str, str]]] = {
    "mode cdi": (
        {"mode": "cdi"}, ContainerRequest("n", "p", "c", "gpu-py", ("AMD_VISIBLE_DEVICES=1",)),
        SECOND),
    "all in mode cdi": (
        {"mode": "cdi"}, ContainerRequest("n", "p", "c", "gpu-py", ("AMD_VISIBLE_DEVICES=all",)),
        ("amd.com/gpu", "all")),
    "another maker's kind": (
        {"cdi_kinds_from_environment": ("a.com/b",)},
        ContainerRequest("n", "p", "c", "gpu-py", ("AMD_VISIBLE_DEVICES=a.com/b=3",)),
        ("a.com/b", "3::1")),
    "a mount": (
        {"accept_volume_mounts": True},
        ContainerRequest("n", "p", "c", "gpu-py", (), ((f"{FOLDER}/a.com/b/3", "/dev/null"),)),
        ("a.com/b", "3")),
    "an annotation": (
        {"accept_annotations": True},
        ContainerRequest("n", "p", "c", "gpu-py", (), (), (("cdi.k8s.io/x", "amd.com/gpu=1"),)),
        SECOND),
}  # fmt: skip


@pytest.mark.protects(
    "nri-gate-handlers", "a RuntimeClass doesn't bypass the NRI gate", instead="if by_runtime:"
)
@pytest.mark.protects(
    "nri-gate-documents",
    "NRI: the gate also applies to CDI devices that gpuhook's own runtime would add",
)
@pytest.mark.parametrize("name", [*DOCUMENTED])
def test_cdi_specs_do_not_bypass_the_gate(way: InjectionMode, name: str) -> None:
    """gpuhook's runtimes read CDI specs, so the kubelet must have allocated their devices, too."""
    chosen, asked, right = DOCUMENTED[name]
    for key, value in chosen.items():
        setattr(way.config, key, value)
    third, others = ("amd.com/gpu", "0x84cafeae17e7620"), [("other.com/gpu", "1"), ("a.com/c", "3")]
    for names in ([], [third], others):
        with pytest.raises(RequestError, match="kubelet hasn't allocated"):
            edits(asked, InjectionMode(way.config, HOOK, given=lambda *_, names=names: names))
    assert edits(asked, InjectionMode(way.config, HOOK, given=lambda *_: [right])) == {}


@pytest.mark.protects(
    "nri-gate-once",
    "NRI: the gate asks the kubelet once per container, before the engine's timeout",
    instead="if True:",
)
def test_the_kubelet_is_asked_once_for_a_container(way: InjectionMode) -> None:
    """The kubelet may be slow, and after two seconds an engine continues without the gate."""
    asked: list[tuple[str, ...]] = []

    def given(namespace: str, pod: str, name: str, _uid: str, left: float) -> list[tuple[str, str]]:
        assert 0 < left <= PATIENCE
        asked.append((namespace, pod, name))
        return [SECOND]

    gate = InjectionMode(way.config, HOOK, given=given)
    for handler in ("gpu-py", ""):
        for name in ("first", "second"):
            edits(
                ContainerRequest("team", "pod", name, handler, ("AMD_VISIBLE_DEVICES=all",)), gate
            )
    assert asked == [("team", "pod", "first"), ("team", "pod", "second")] * 2


@pytest.mark.protects(
    "nri-gate-time",
    "the NRI gate asks the kubelet with a timeout of the remaining response time",
    instead="left = PATIENCE",
)
def test_the_kubelet_is_asked_with_the_remaining_time(
    way: InjectionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, seconds = cache.get_inventory, list[float]()

    def slow(*words: Any, **more: Any) -> Any:
        time.sleep(0.3)
        return look(*words, **more)

    def given(*container: Any) -> list[tuple[str, str]]:
        seconds.append(container[-1])
        return [SECOND]

    monkeypatch.setattr(cache, "get_inventory", slow)
    asked = ContainerRequest("team", "pod", "main", "", ("AMD_VISIBLE_DEVICES=1",))
    edits(asked, InjectionMode(way.config, HOOK, given=given))
    assert 0 <= seconds[0] <= PATIENCE - 0.3


@pytest.mark.protects(
    "nri-gate-annotations",
    "CDI annotations don't bypass the NRI gate under any runtime handler",
    instead="notes = {False}",
)
def test_cdi_annotations_do_not_bypass_the_gate_under_any_handler(
    gated: Gated, way: InjectionMode
) -> None:
    """CRI-O passes on the annotations of a pod, which its author writes."""
    served, names = gated
    way.config.accept_annotations = True
    pod = ((7, "gpu-py"),)
    annotation = "amd.com/gpu=1"
    said = refusal(served.engine.create(pod=pod, annotation=annotation))
    assert "asks for AMD GPU 1" in said
    names.append(SECOND)
    assert adjustment(served.engine.create(pod=pod, annotation=annotation)) == b""
    assert adjustment(served.engine.create(annotation=annotation)) == b"", "runc reads none"
    names.clear()
    assert "asks for AMD GPU 1" in refusal(served.engine.create(annotation=annotation))


ALL_MOUNTED = (("/var/run/amd-container-devices/all", "/dev/null"),)
ONE_MOUNTED = (("/var/run/amd-container-devices/2", "/dev/null"),)
WAYS: dict[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "all": ("AMD_VISIBLE_DEVICES=all", (), ""),
    "one": ("AMD_VISIBLE_DEVICES=2", (), ""),
    "none": ("AMD_VISIBLE_DEVICES=none", (), ""),
    "all by mounts": ("A=1", ALL_MOUNTED, ""),
    "one by mounts": ("AMD_VISIBLE_DEVICES=1", ONE_MOUNTED, ""),
    "all by an annotation": ("A=1", (), "amd.com/gpu=all"),
    "one by an annotation": ("AMD_VISIBLE_DEVICES=all", (), "amd.com/gpu=2"),
    "another after void": ("AMD_VISIBLE_DEVICES=void", ONE_MOUNTED, "amd.com/gpu=3"),
}


@pytest.mark.protects(
    "nri-gate-privileges",
    "a runtime's view of a container's privileges doesn't bypass the NRI gate",
    instead="config.accept_envvar_unprivileged = self._config.accept_envvar_unprivileged",
)
@pytest.mark.parametrize("privileged", [False, True])
@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("handler", ["", "gpu-py", "nvidia", "gpu-x"])
@pytest.mark.parametrize("name", [*WAYS])
def test_no_handler_gives_devices_the_kubelet_has_not_allocated(
    way: InjectionMode, name: str, handler: str, accepts: bool, privileged: bool
) -> None:
    """A handler may have any name, and may see privileges that the plugin can't see."""
    variable, mounts, annotation = WAYS[name]
    notes = (("cdi.k8s.io/x", annotation),) if annotation else ()
    config = way.config
    config.accept_envvar_unprivileged = accepts
    config.accept_volume_mounts = config.accept_annotations = True
    asked = ContainerRequest("team", "pod", "main", handler, (variable,), mounts, notes)
    outcomes = set()
    for by_cdi, names in itertools.product((False, True), ([], [SECOND], [SECOND, THIRD])):
        gate = InjectionMode(config, HOOK, by_cdi, lambda *_, names=names: names)
        try:
            answer = edits(asked, gate)
        except RequestError as error:
            assert "kubelet hasn't allocated" in str(error)  # noqa: PT017 - not each is refused
            continue
        spec = {
            "process": {
                "env": [variable, *answer.get("env", ())],
                "capabilities": {"bounding": ["CAP_SYS_ADMIN"] * privileged},
            },
            "mounts": [{"destination": to, "source": source} for to, source in mounts],
            "annotations": dict(notes),
        }
        found = resolve(spec, config, registry.all_vendors(config))
        ids = {name for grant in (found.grants if found else ()) for name in grant.ids}
        assert ids <= {name for _, name in names}
        outcomes.add(len(names))
    assert 2 in outcomes or "all" in name or "after" in name


@pytest.mark.protects(
    "nri-gate-beside",
    "the NRI gate refuses IMEX channels that the kubelet hasn't allocated",
    instead="if False:",
)
@pytest.mark.parametrize("handler", ["", "gpu-py", "gpu-x"])
def test_imex_channels_are_given_only_if_allocated_by_the_kubelet(
    monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    inventory = machines.machine(machines.gpu(0, 0))
    folder = "/dev/nvidia-caps-imex-channels"
    inventory.nodes = (
        *inventory.nodes,
        *(DeviceNode(f"{folder}/channel{n}", 500, n) for n in (0, 5)),
    )
    monkeypatch.setattr(cache, "get_inventory", lambda *_, **__: inventory)
    gpu = ("nvidia.com/gpu", inventory.devices[0].id)
    config = Config()
    config.accept_volume_mounts = True
    mounts = tuple(
        (f"/var/run/nvidia-container-devices/{each}", "/dev/null") for each in ("0", "imex/5")
    )
    by_runtime = handler == "gpu-py"
    for more, places, is_ours in (
        (("NVIDIA_VISIBLE_DEVICES=all",), (), by_runtime),
        (("NVIDIA_VISIBLE_DEVICES=none",), (), by_runtime),
        ((), mounts, True),
    ):
        env = ("NVIDIA_IMEX_CHANNELS=5", *more) if more else ()
        asked = ContainerRequest("team", "pod", "main", handler, env, places)
        for names in ([gpu], [gpu, ("gpu.nvidia.com/imex-channel", "0")]):
            gate = InjectionMode(config, HOOK, given=lambda *_, names=names: names)
            if is_ours:
                with pytest.raises(RequestError, match="imex-channel=5, and the kubelet hasn't"):
                    edits(asked, gate)
            else:
                assert "NVIDIA_VISIBLE_DEVICES=void" in edits(asked, gate)["env"]
        right = [gpu, ("nvidia.com/imex-channel", "5")]
        edits(asked, InjectionMode(config, HOOK, given=lambda *_, right=right: right))


def test_a_request_for_all_gives_the_allocated_devices(gated: Gated) -> None:
    served, names = gated
    answer = served.engine.create("AMD_VISIBLE_DEVICES=all")
    assert messages(adjustment(answer), 6) == []
    assert environment(answer) == {"AMD_VISIBLE_DEVICES": "none"}
    names.append(("amd.com/gpu", "0x84cafeae17e7620::3"))  # a share of the third device
    answer = served.engine.create("AMD_VISIBLE_DEVICES=all")
    assert nodes(answer) == ["/dev/kfd", "/dev/dri/card2", "/dev/dri/renderD130"]
    names[:] = [("amd.com/gpu", "3")]  # a claim's device, by the name of its CDI device
    assert nodes(served.engine.create("AMD_VISIBLE_DEVICES=all"))[1] == "/dev/dri/card3"


@pytest.mark.protects(
    "nri-refusal",
    "NRI: an internal error refuses only that container, and the plugin continues",
    instead="except ZeroDivisionError as error:",
)
def test_an_internal_error_refuses_only_that_container(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the plugin exited, the gate would be gone and the container would start."""
    served.engine.registration()

    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("a\nb")

    with monkeypatch.context() as patch:
        patch.setattr("gpuhook.cluster.nri.answer.resolve", fail)
        said = refusal(served.engine.create("AMD_VISIBLE_DEVICES=1"))
    assert said == "gpuhook: it failed: AttributeError: 'a\\nb'. Report it"
    assert len(nodes(served.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3


@pytest.mark.protects(
    "nri-long-message",
    "an overlong NRI request is refused without ending the connection",
    instead="is_long = False",
)
def test_an_overlong_request_is_refused_and_the_next_is_answered(served: Served) -> None:
    """The connection must stay open, because the gate is gone without it."""
    served.engine.registration()
    for size in ((4 << 20) + 1, 15 << 20):
        payload = b"\0" * size
        assert "more than 4194304 bytes" in refusal(served.engine.ask("CreateContainer", payload))
        assert len(nodes(served.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3


@pytest.mark.protects(
    "nri-long-synchronize",
    "an overlong list of running containers doesn't keep the NRI plugin from serving",
)
def test_a_large_list_of_running_containers_is_accepted(served: Served) -> None:
    """An older engine sends the list in one message of any length, and needs a response."""
    served.engine.registration()
    served.engine.ask("Configure", wire.message((2, "containerd"), (3, "1.7.24")))
    answer = served.engine.ask("Synchronize", b"\0" * (5 << 20))
    assert messages(answer, 1) == []
    assert served.said == ["Serves containerd 1.7.24"]


@pytest.mark.protects("nri-long-answer", "an overlong NRI response is replaced by a refusal")
def test_an_overlong_answer_becomes_a_refusal(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.engine.registration()
    with monkeypatch.context() as patch:
        many = {"env": [f"A{number}={'x' * 1000}" for number in range(5000)]}
        patch.setattr("gpuhook.cluster.nri.service.answer.decide", lambda *_: NriResponse(many))
        assert "the response is too long" in refusal(served.engine.create("AMD_VISIBLE_DEVICES=1"))
    assert len(nodes(served.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3


def test_a_container_is_refused_where_its_verdict_cannot_be_written(
    way: InjectionMode, tmp_path: Path
) -> None:
    """Otherwise the runtime would find no verdict, or an older one."""
    way.config.gate, way.config.state_dir = True, str(tmp_path / "file")
    (tmp_path / "file").write_text("")
    made = Served(InjectionMode(way.config, HOOK, given=lambda *_: [SECOND]))
    try:
        made.engine.registration()
        pod = ((7, "gpu-py"),)
        said = refusal(made.engine.create("AMD_VISIBLE_DEVICES=1", pod=pod))
        assert "The gate can't write verdicts" in said
        way.config.state_dir = str(tmp_path / "state")
        assert adjustment(made.engine.create("AMD_VISIBLE_DEVICES=1", pod=pod)) == b""
        assert (tmp_path / "state/verdicts/c1").exists()
    finally:
        made.end()


def test_unreadable_settings_refuse_only_containers_that_request_devices(
    way: InjectionMode,
) -> None:
    """gpu-py also refuses only containers that request devices."""
    broken: list[bool] = []

    def current() -> InjectionMode:
        if broken:
            raise ConfigError("config.toml is broken", "Correct it")
        return way

    made = Served(way, current)
    try:
        made.engine.registration()
        assert len(nodes(made.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3
        broken.append(True)
        assert "config.toml is broken" in refusal(made.engine.create("AMD_VISIBLE_DEVICES=1"))
        assert adjustment(made.engine.create("PATH=/bin")) == b""
        broken.clear()
        assert len(nodes(made.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3
    finally:
        made.end()


def test_a_refusal_has_at_most_1024_bytes() -> None:
    """Kubernetes truncates the messages of events, and engines write them into their logs."""
    said = refusal(_refusal(2, "é" * 2000))
    assert 1000 < len(said.encode()) <= 1024


def test_invalid_names_and_variables_refuse_only_their_container(served: Served) -> None:
    """Names and variables that are long, odd or not text must not stop the plugin."""
    served.engine.registration()
    served.engine.create("A" * 200_000, "=", "", "NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES=")
    said = refusal(served.engine.create("AMD_VISIBLE_DEVICES=" + "9," * 50_000))
    assert len(said.encode()) <= 1024
    who = ((2, "evil\n\x1b[2J" * 50), (4, "n\r"))
    served.engine.create("AMD_VISIBLE_DEVICES=1", pod=who)
    assert not any("\n" in each or "\x1b" in each or "\r" in each for each in served.said)
    bad = wire.message((8, b"\xff\xfe=1"))
    assert "isn't understood" in refusal(
        served.engine.ask("CreateContainer", wire.message((2, bad)))
    )
    assert len(nodes(served.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    method=some.sampled_from(["Configure", "Synchronize", "CreateContainer"]), data=some.binary()
)
def test_any_payload_leaves_the_service_running(
    method: str, data: bytes, way: InjectionMode
) -> None:
    made = Served(way)
    try:
        made.engine.registration()
        made.engine.ask(method, data)
        assert len(nodes(made.engine.create("AMD_VISIBLE_DEVICES=1"))) == 3
    finally:
        made.end()


def test_an_invalid_message_ends_the_connection(served: Served) -> None:
    served.engine.registration()
    served.engine._connection.send(PLUGIN, 1, REQUEST, b"\xff\xff\xff")
    served._thread.join(5)
    assert served.failed is not None
    assert "invalid message" in str(served.failed)


class Listener:
    """An engine's socket; ``once`` serves one plugin and closes the connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._socket.settimeout(10)

    def once(self) -> None:
        channel, _ = self._socket.accept()
        reader, writer = os.pipe()
        engine = Engine(channel, reader)
        engine.registration()
        engine.ask("Configure", wire.message((2, "containerd"), (3, "2.1.4")))
        engine.ask("Synchronize")
        assert len(nodes(engine.create("AMD_VISIBLE_DEVICES=1"))) == 3
        channel.close()
        os.close(reader)
        os.close(writer)

    def close(self) -> None:
        self._socket.close()


def test_a_restarted_engine_is_connected_again(
    way: InjectionMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin looks for the engine until it appears, and after each hang-up, until SIGTERM."""
    monkeypatch.setattr("gpuhook.cluster.nri.service._AGAIN", 0.05)
    path, said, failed = tmp_path / "nri.sock", list[str](), list[BaseException]()

    def engine() -> None:
        try:
            time.sleep(0.2)  # the engine isn't there yet
            for _ in range(2):
                listener = Listener(path)
                listener.once()
                listener.close()
                path.unlink()
        except BaseException as error:  # noqa: BLE001 - said below
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=engine)
    try:
        thread.start()
        run(str(path), lambda: way, said.append)
        thread.join()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert failed == []
    assert said.count("Serves containerd 2.1.4") == 2
    assert said[0].startswith(f"The engine at {path} can't be reached")


def test_shutdown_is_answered_and_ends_the_connection(served: Served) -> None:
    served.engine.registration()
    assert messages(served.engine.ask("Shutdown"), 1) == []
    served._thread.join(5)
    assert served.failed is not None
