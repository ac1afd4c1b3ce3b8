"""Requirements on every vendor's devices in a container, as tests shared by all vendors.

A vendor's test file has a class for each sort of device, a ``Contract`` with a ``Case``, in
addition to its own tests. The fixtures ``devices`` and ``config`` are in conftest.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from harness import vendors
from harness.bundles import Bundle
from harness.commands import run
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left
from harness.vendor_attach import attached
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import MODES, USER, Devices, Seen, as_user, in_mode, nodes_seen

NO_GROUPS = "[features]\nno-additional-gids-for-device-nodes = true\n"
NVIDIAS = "NVIDIA_VISIBLE_DEVICES=5"

ANY_MODES = pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])

Labels = Sequence[int | str]


class Expected(Protocol):
    """The view from a container that has some of the devices, named by their labels."""

    def __call__(
        self, found: Devices, /, *labels: int | str, opened: str = "ENXIO"
    ) -> dict[str, Seen]:
        """Return the nodes that the container has, and the result of opening each."""


@dataclass(frozen=True)
class Case:
    """A vendor's simulated machine, the requests of its containers, and the expected results.

    Variables are written NAME=value. ``groups`` are the groups of the devices' nodes.
    ``variables`` are the container's variables that begin with one of ``beginnings``.
    ``links`` are some of the links that the hook makes.
    """

    vendor: str
    count: int
    settings: Mapping[str, object]
    made: Sequence[str]  # lines that the simulator prints
    kind: str
    patterns: Sequence[str]  # of the device paths that containers look at
    expected: Expected
    asked: tuple[Sequence[str], Labels]
    other: Sequence[tuple[str, Sequence[str], Sequence[str]]]  # variable, paths, paths that open
    beside: tuple[str, Labels]
    refused: Mapping[str, str]  # variable -> error message
    by_hook: tuple[str, Labels]
    undone: Sequence[str]  # what the hook without gpu-py logs as 'undone'
    listed: tuple[str, Labels, Labels]  # variable, devices of its container, all devices
    explained: tuple[str, Sequence[str]]
    info: str
    findings: tuple[str, Sequence[tuple[str, str]]]  # check, and each finding's status and words
    by_podman: tuple[str, Labels]
    by_document: Sequence[tuple[Sequence[str], Labels]]  # device names, without the CDI kind
    groups: frozenset[int] = frozenset()
    beginnings: Sequence[str] = ()
    variables: Sequence[str] = ()
    in_document: Sequence[str] = ()  # variables of a container that has devices by a CDI spec
    links: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def machine(self, installation: Installation, folder: Path) -> Iterator[Devices]:
        """Simulate the machine in a folder."""
        root = folder / f"{self.vendor}-driver"
        made = vendors.devices(installation, root, self.vendor, self.count, **self.settings)
        with made as found:
            lines = [line.strip() for line in found.made.splitlines()]
            assert all(line in lines for line in self.made), found.made
            yield found

    @property
    def look(self) -> tuple[str, ...]:
        """The command that looks at the devices from inside a container."""
        return vendors.look(*self.patterns)


def given_any(
    bundle: Bundle,
    config: Path,
    devices: Devices,
    mode: str,
    asked: tuple[str, str],
    kind: str,
    look: Sequence[str],
) -> None:
    """Start a container that asks for any device, and check that it gets one complete device.

    ``asked`` is a vendor's variable and its value.
    """
    folder = bundle.path / "any-cdi"
    folder.mkdir()
    section, plain = "[nvidia-container-runtime]\n", config.with_name("plain.toml")
    plain.write_text(config.read_text())  # explain has no steps in mode cdi, so it reads this copy
    text = config.read_text().replace(section, f'{section}mode = "{mode}"\n')
    config.write_text(f'{text}[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{folder}"]\n')
    words: list[str | Path] = [devices.installation.command, "cdi", "generate", "--config", config]
    run([*words, f"--kind={kind}", "--output", folder]).ok()
    bundle.environ("=".join(asked))
    devices.start(bundle, config)
    listed = [each for each in devices.ask(config, "list")["devices"] if each["containers"]]
    [chosen] = [each for each in listed if bundle.name in each["containers"]]
    assert chosen["vendor"] == devices.vendor
    plan = devices.ask(plain, "explain", "-e", f"{asked[0]}={chosen['id']}")["operations"]
    nodes = {each["destination"] for each in plan if each["kind"] == "device"}
    inside = nodes_seen(bundle.call(bundle.runtime, "exec", bundle.name, *look))
    assert {path: seen[0] for path, seen in inside.items()} == dict.fromkeys(nodes, "ENXIO")


class Contract:
    """The tests that every vendor's devices must pass."""

    case: ClassVar[Case]

    @RUNTIMES
    @MODES
    def test_only_the_requested_devices_are_given(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        variables, labels = self.case.asked
        in_mode(config, mode)
        bundle.change(as_user)
        bundle.environ(*variables)
        bundle.command(*self.case.look)
        with nothing_left(devices.root, pid=bundle.namespace.pid):
            done = devices.started(bundle, config)
        assert nodes_seen(done) == self.case.expected(devices, *labels)
        assert vendors.groups_seen(done) == {USER, *self.case.groups}
        assert sorted(vendors.variables_seen(done, *self.case.beginnings)) == sorted(
            self.case.variables
        )
        links = vendors.links_seen(done)
        assert links.items() >= self.case.links.items() if mode == "hook" else links == {}

    @ONE
    @MODES
    def test_a_user_without_the_device_groups_is_denied_access(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        variable, labels = self.case.by_hook
        in_mode(config, mode)
        config.write_text(config.read_text() + NO_GROUPS)
        bundle.change(as_user)
        bundle.environ(variable)
        bundle.command(*self.case.look)
        done = devices.started(bundle, config)
        opened = "EACCES" if self.case.groups - {USER} else "ENXIO"
        assert nodes_seen(done) == self.case.expected(devices, *labels, opened=opened)
        assert vendors.groups_seen(done) == {USER}

    @RUNTIMES
    @MODES
    def test_unrequested_devices_cannot_be_opened(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        in_mode(config, mode)
        for variable, paths, own in self.case.other:
            bundle.environ(variable)
            bundle.command(*vendors.make_and_open(devices, paths))
            assert vendors.opened(devices.started(bundle, config), paths) == {
                path: "ENXIO" if path in own else "EPERM" for path in paths
            }
            bundle.call("rm", "-f", *(bundle.root / f"by-hand-{n}" for n in range(len(paths)))).ok()

    @ONE
    @MODES
    def test_devices_are_given_beside_an_nvidia_gpu(
        self, bundle: Bundle, config: Path, devices: Devices, driver: Driver, mode: str
    ) -> None:
        variable, labels = self.case.beside
        in_mode(config, mode)
        bundle.environ(variable, NVIDIAS)
        bundle.command(*vendors.look(*self.case.patterns, driver=driver))
        with nothing_left(driver.root, devices.root, pid=bundle.namespace.pid):
            done = devices.started(bundle, config)
        assert nodes_seen(done) == self.case.expected(devices, *labels)
        assert vendors.gpus_seen(done, driver) == {5}

    @ONE
    def test_an_unsatisfiable_request_is_refused_in_one_sentence(
        self,
        bundle: Bundle,
        config: Path,
        devices: Devices,
        low_level: tuple[str, Namespace],
        refused: str,
    ) -> None:
        bundle.environ(refused)
        with nothing_left(devices.root, bundle.root, pid=bundle.namespace.pid):
            said = devices.refused(bundle, config)
        assert re.fullmatch(f"gpu-py: {self.case.refused[refused]}\n", said), said
        bundle.call(low_level[0], "state", bundle.name).failed()

    def test_hook_alone_gives_device_nodes_without_process_changes(
        self, bundle: Bundle, config: Path, devices: Devices, low_level: tuple[str, Namespace]
    ) -> None:
        """The hook adds nodes and their rules; only a runtime can change the process."""
        variable, labels = self.case.by_hook
        devices.hook(bundle, config)
        bundle.environ(variable)
        bundle.command(*self.case.look)
        done = bundle.run(low_level[0])
        assert nodes_seen(done) == self.case.expected(devices, *labels)
        assert vendors.groups_seen(done) == {0}
        asked = [variable] if variable.startswith(tuple(self.case.beginnings)) else []
        assert vendors.variables_seen(done, *self.case.beginnings) == asked
        assert sorted(vendors.logged(config)["undone"]) == sorted(self.case.undone)

    @ONE
    def test_list_explain_and_doctor_name_the_devices(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        variable, held, every = self.case.listed
        bundle.environ(variable)
        devices.start(bundle, config)
        every_vendors = devices.ask(config, "list")["devices"]
        listed = [each for each in every_vendors if each["vendor"] == self.case.vendor]
        assert {each["label"]: each["containers"] for each in listed} == {
            str(label): [bundle.name] if label in held else [] for label in every
        }
        variable, selected = self.case.explained
        explained = devices.ask(config, "explain", "-e", variable)
        assert explained["selected"] == selected
        assert explained["undone"] == []
        info = run([devices.installation.command, "info", "--config", config]).ok().stdout
        assert re.search(self.case.info, info, re.MULTILINE), info
        check, wanted = self.case.findings
        findings = devices.ask(config, "doctor")["findings"]
        found = [each for each in findings if each["check"] == check]
        assert [each["status"] for each in found] == [status for status, _ in wanted]
        for each, (_, words) in zip(found, wanted, strict=True):
            assert words in each["message"]

    @RUNTIMES
    @ANY_MODES
    @pytest.mark.parametrize("is_qualified", [False, True], ids=["any", "KIND=any"])
    def test_a_request_for_any_device_is_served(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str, is_qualified: bool
    ) -> None:
        variable = self.case.listed[0].partition("=")[0]
        word = f"{self.case.kind}=any" if is_qualified else "any"
        given_any(bundle, config, devices, mode, (variable, word), self.case.kind, self.case.look)

    @RUNTIMES
    def test_devices_are_attached_to_a_running_container_and_detached(
        self, bundle: Bundle, config: Path, devices: Devices, low_level: tuple[str, Namespace]
    ) -> None:
        """Attach gives nodes, access and driver files; detach removes the first two."""
        bundle.command("sleep", "1000")
        bundle.detach(low_level[0], config)
        for names, labels in self.case.by_document:
            asked = [f"{self.case.kind}={name}" for name in names]
            with attached(bundle, config, devices, asked) as running:
                expected = self.case.expected(devices, *labels)
                assert nodes_seen(running.call(*self.case.look)) == expected
                every = {path for _, paths, _ in self.case.other for path in paths}
                running.opens(sorted(every), {numbers for _, numbers, *_ in expected.values()})
            assert nodes_seen(running.call(*self.case.look)) == {}
            running.opens(sorted(every), set())

    def test_podman_gives_devices_by_hook_and_by_cdi_spec(
        self, devices: Devices, driver: Driver, host: Namespace, workspace: Path, archive: Path
    ) -> None:
        """Debian 12's podman ignores groups in CDI specs."""
        case, folder = self.case, workspace / f"{self.case.vendor}-podman"
        own = write_config(folder.with_name(f"{folder.name}-etc"), driver.root, ["runc"])
        devices.configured(own, tail=NO_GROUPS)
        with (
            podman_with_hook(devices, own, folder, host, archive) as engine,
            documents(devices, own, folder.with_name(f"{folder.name}-cdi"), case.kind),
        ):
            variable, labels = case.by_podman
            done = engine.run(image("debian"), *case.look, env=(variable,))
            assert nodes_seen(done) == case.expected(devices, *labels)
            for names, labels in case.by_document:
                done = run_with(engine, case.look, *(f"{case.kind}={name}" for name in names))
                assert nodes_seen(done) == case.expected(devices, *labels)
                seen = vendors.variables_seen(done, *case.beginnings)
                assert sorted(seen) == sorted(case.in_document)
