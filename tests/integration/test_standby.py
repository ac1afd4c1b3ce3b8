"""The process that stands ready for the next container: used where it may be, gone where not."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle
from harness.commands import Result, wait_until
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace

LAUNCHERS = Path("/run/gpuhook/launcher")


class Site:
    """A configuration with a standing process of its own, and containers that use it."""

    def __init__(
        self, bundle: Bundle, installation: Installation, driver: Driver, runtime: str, folder: Path
    ) -> None:
        self.bundle = bundle
        self.installation = installation
        self.driver = driver
        self.config = write_config(folder / "etc", driver.root, [runtime])
        (self.config.parent / "state").mkdir()
        past = time.time() - 10
        for place in (self.config, self.config.parent):
            os.utime(place, (past, past))
        self.ready = Path(f"{LAUNCHERS}{self.config}/ready")
        bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
        bundle.command(*look(driver.minors))
        self._plain = bundle.config.read_bytes()

    def run(self, runtime: Path | None = None) -> Result:
        """Lead a container through its life as an engine does, with a new config.json."""
        self.bundle.config.write_bytes(self._plain)
        env = {"GPUHOOK_CONFIG": str(self.config)}
        words: list[str | Path] = [runtime or self.installation.runtime]
        create = [*words, "create", "--bundle", self.bundle.path, self.bundle.name]
        return self.bundle.live(create, words, self.bundle.name, env)

    def works(self) -> None:
        """Start a container and see that it has its GPUs and no others."""
        assert seen(self.run()).gpu_minors == {gpu.minor for gpu in self.driver.chosen(0, 2)}

    @property
    def helper(self) -> int:
        """The helper of the last container."""
        words = self.bundle.spec()["hooks"]["prestart"][-1]["args"]
        return int(words[words.index("--helper") + 1])

    @property
    def children(self) -> set[int]:
        """The children that stand ready."""
        return {int(path.name) for path in self.ready.glob("[0-9]*")}

    @property
    def process(self) -> int:
        """The standing process."""
        return parent_of(min(self.children))

    def is_standing(self) -> bool:
        return len(self.children) == 2 and all(is_running(pid) for pid in self.children)

    def stand(self) -> None:
        """Start a container, and wait until a process stands ready for the next."""
        self.works()
        wait_until(self.is_standing, "a process stands ready")

    def is_gone(self) -> bool:
        """Tell whether nothing of the standing process is left."""
        left = [path for path in self.ready.iterdir() if not path.name.startswith(".lock")]
        return not left and not standing(self.ready)


def standing(folder: Path) -> list[int]:
    """Return the processes that have that folder open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) == str(folder) for fd in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def site(
    bundle: Bundle,
    installation: Installation,
    driver: Driver,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Site]:
    made = Site(bundle, installation, driver, low_level[0], tmp_path)
    yield made
    for pid in standing(made.ready):
        os.kill(pid, signal.SIGKILL)


def test_next_container_is_served_by_a_child(site: Site) -> None:
    site.stand()
    before, process = site.children, site.process
    site.works()
    assert site.helper in before
    wait_until(site.is_standing, "the child is replaced")
    assert site.process == process
    assert site.helper not in site.children
    assert not is_running(site.helper)
