"""The launcher repeats Python's edits, on real runtimes and engines, and the hook checks them."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from harness.bundles import Bundle
from harness.commands import Result
from harness.driver import Driver
from harness.engines import Engine
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config

from gpuhook.simulate import Options, build, remove

LAUNCHERS = Path("/run/gpuhook/launcher")
BY_RUNTIME = ["docker", "docker_v2", "containerd_runc", "containerd_crun", "podman_runtime"]
WARM_UP = 6  # starts after which the launcher knows all


def records(*words: str) -> list[Path]:
    """Return the records of the edits whose paths hold these words."""
    return [
        path
        for name in ("plain", "helped")
        for path in LAUNCHERS.rglob(name)
        if all(word in str(path) for word in words)
    ]


def allow_another(*words: str) -> None:
    """Let the recorded edits allow a device that nobody gets."""
    found = records(*words)
    assert found
    for path in found:
        text = path.read_text()
        assert '"--allowed","' in text
        path.write_text(text.replace('"--allowed","', '"--allowed","195:77,'))


class Repeating:
    """A bundle that is started again and again, as the engine wrote it."""

    def __init__(
        self, bundle: Bundle, installation: Installation, root: Path, runtime: str, folder: Path
    ) -> None:
        self.bundle = bundle
        self.installation = installation
        self.config = write_config(folder / "etc", root, [runtime])
        past = time.time() - 10
        for place in (self.config, self.config.parent):
            os.utime(place, (past, past))

    def ask(self, env: str, *command: str) -> None:
        self.bundle.environ(env)
        self.bundle.command(*command)

    def run(self) -> Result:
        """Start the bundle as it is, and leave it so."""
        return self.bundle.run(self.installation.runtime, {"GPUHOOK_CONFIG": str(self.config)})

    def start(self) -> Result:
        saved = self.bundle.config.read_bytes()
        done = self.run()
        self.left = self.bundle.spec()
        self.bundle.config.write_bytes(saved)
        return done

    def warm_up(self) -> None:
        """Start it until the launcher repeats; what is younger than 20 ms counts as unsure."""
        for _ in range(WARM_UP):
            self.start().ok()
            if "--allowed" in self.hook_words:
                return

    def set_helper(self, value: str) -> None:
        text = self.config.read_text().replace("[gpuhook]", f"[gpuhook]\nhelper = {value}")
        self.config.write_text(text)

    @property
    def hook_words(self) -> list[str]:
        """The arguments of our hook after the last start."""
        return list(self.left["hooks"]["prestart"][-1]["args"])


@pytest.fixture
def case(
    bundle: Bundle,
    installation: Installation,
    driver: Driver,
    low_level: tuple[str, object],
    tmp_path: Path,
) -> Repeating:
    return Repeating(bundle, installation, driver.root, low_level[0], tmp_path)


@pytest.mark.parametrize("helper", ["true", "false"])
def test_edit_is_repeated_without_python(case: Repeating, driver: Driver, helper: str) -> None:
    case.set_helper(helper)
    case.ask("NVIDIA_VISIBLE_DEVICES=0,2", *look(driver.minors))
    case.start().ok()
    by_python = case.left
    assert "--allowed" not in case.hook_words
    case.warm_up()
    inside = seen(case.start())
    minors = {gpu.minor for gpu in driver.chosen(0, 2)}
    assert inside.gpu_minors == minors
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors
    assert "--allowed" in case.hook_words
    assert ("--helper" in case.hook_words) == (helper == "true")
    assert without_hook_words(case.left) == without_hook_words(by_python)


def without_hook_words(spec: dict[str, Any]) -> str:
    """Return a config.json without what differs from start to start."""
    spec = json.loads(json.dumps(spec))
    spec["hooks"]["prestart"][-1]["args"] = []
    return json.dumps(spec)


CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GPU unplugged": ("all", {"gpus": 4}, {"gpus": 4, "unplugged": frozenset({1})}),
    "GPU plugged in": ("all", {"gpus": 2}, {"gpus": 3}),
    "driver upgraded": (
        "all",
        {"driver_version": "570.86.15"},
        {"driver_version": "580.65.06"},
    ),
    "nodes numbered anew": (
        "1",
        {"gpus": 2, "minors": (0, 1)},
        {"gpus": 2, "minors": (1, 2)},
    ),
    "MIG switched on": (
        "all",
        {"models": ("A100",)},
        {"models": ("A100",), "mig": {0: ("3g.40gb", "1g.10gb")}},
    ),
    "MIG devices changed": (
        "all",
        {"models": ("A100",), "mig": {0: ("3g.40gb", "1g.10gb")}},
        {"models": ("A100",), "mig": {0: ("1g.10gb", "1g.10gb")}},
    ),
}


@pytest.mark.parametrize(("devices", "before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_next_container_is_right(
    bundle: Bundle,
    installation: Installation,
    low_level: tuple[str, object],
    workspace: Path,
    tmp_path: Path,
    devices: str,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """The first container after a change has the rules that one on a new machine has."""
    root = workspace / f"changing-{os.getpid()}"
    build(Options(root=str(root), **before))
    try:
        case = Repeating(bundle, installation, root, low_level[0], tmp_path / "old")
        case.ask(f"NVIDIA_VISIBLE_DEVICES={devices}", "nvidia-smi", "-L")
        case.warm_up()
        assert "--allowed" in case.hook_words
        build(Options(root=str(root), **after))
        told = case.start().ok().stdout
        rules = case.left["linux"]["resources"]["devices"]
        fresh = Repeating(bundle, installation, root, low_level[0], tmp_path / "new")
        assert told == fresh.start().ok().stdout
        assert rules == fresh.left["linux"]["resources"]["devices"]
    finally:
        remove(str(root))


def test_wrong_edit_is_refused_once(case: Repeating, driver: Driver) -> None:
    case.ask("NVIDIA_VISIBLE_DEVICES=5", *look(driver.minors))
    case.warm_up()
    allow_another(str(case.config))
    told = case.start().failed().stderr
    assert "195:77" in told or "crun" in case.config.read_text()
    assert not records(str(case.config))
    assert seen(case.start()).gpu_minors == {gpu.minor for gpu in driver.chosen(5)}


@pytest.mark.parametrize("helper", ["true", "false"])
def test_refused_bundle_is_started_again(case: Repeating, driver: Driver, helper: str) -> None:
    """What the wrong edit has left in config.json goes away with it."""
    case.set_helper(helper)
    case.ask("NVIDIA_VISIBLE_DEVICES=5", *look(driver.minors))
    case.warm_up()
    [right], [wrong] = driver.chosen(5), driver.chosen(0)
    [record] = records(str(case.config))
    text = record.read_text().replace(f'"minor":{right.minor},', f'"minor":{wrong.minor},')
    record.write_text(text.replace(f"195:{right.minor}", f"195:{wrong.minor}"))
    case.run().failed()
    inside = seen(case.run())
    assert inside.gpu_minors == {right.minor}
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == {right.minor}


def test_config_json_that_can_not_be_replaced_is_told(case: Repeating, driver: Driver) -> None:
    """sed has edited then, but nothing comes of it: the container must not start without GPUs."""
    case.ask("NVIDIA_VISIBLE_DEVICES=5", *look(driver.minors))
    case.warm_up()
    place = case.bundle.config
    case.bundle.call("mount", "--bind", place, place).ok()
    try:
        assert "can't be written" in case.run().failed().stderr
    finally:
        case.bundle.call("umount", place).ok()


def test_record_of_somebody_else_is_not_used(case: Repeating) -> None:
    case.ask("NVIDIA_VISIBLE_DEVICES=5", "true")
    case.warm_up()
    assert "--allowed" in case.hook_words
    for path in records(str(case.config)):
        os.chown(path, 1, 1)
    case.start().ok()
    assert "--allowed" not in case.hook_words


def test_broken_record_is_pythons(case: Repeating, driver: Driver) -> None:
    """sed refuses it, and config.json stays as it was until Python edits it."""
    case.ask("NVIDIA_VISIBLE_DEVICES=5", *look(driver.minors))
    case.warm_up()
    for path in records(str(case.config)):
        path.write_text("s|{|\n")
    assert seen(case.start()).gpu_minors == {gpu.minor for gpu in driver.chosen(5)}
    assert "--allowed" not in case.hook_words


@pytest.mark.parametrize("name", BY_RUNTIME)
def test_every_engines_edit_is_repeated(
    request: pytest.FixtureRequest, driver: Driver, name: str
) -> None:
    """What shows that it was repeated: a record that is changed is refused by the hook.

    Docker writes settings in any order, and every order has a record of its own.
    """
    engine: Engine = request.getfixturevalue(name)
    env = ["NVIDIA_VISIBLE_DEVICES=4,1,2"]

    def start() -> Result:
        return engine.run(image("debian"), *look(driver.minors), env=env)

    minors = {gpu.minor for gpu in driver.chosen(1, 2, 4)}
    for _ in range(WARM_UP):
        assert seen(start()).gpu_minors == minors
    allow_another('"NVIDIA_VISIBLE_DEVICES=4/1/2"')
    refused = start().failed()
    # crun shows nothing that a hook says.
    assert "195:77" in str(refused) or "crun" in name or not engine.shows_errors_of_hooks
    assert seen(start()).gpu_minors == minors
