"""A simulated machine whose driver can be updated, and the driver folder for this driver."""

from pathlib import Path

from harness.commands import Result, run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

INSIDE = "/usr/local/nvidia"
# The variables that CUDA's images set.
SETTINGS = (
    f"PATH={INSIDE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    f"LD_LIBRARY_PATH={INSIDE}/lib:{INSIDE}/lib64",
)
OLD, NEW = "570.86.15", "580.65.06"


class Machine:
    """A driver that only one test uses, and the driver folder for it."""

    def __init__(self, installation: Installation, folder: Path, minors: str = "3,1") -> None:
        self._installation = installation
        self._minors = minors
        self.root = folder / "driver"
        self.folder = folder / "kept/driver"
        self.driver = self.install(OLD)
        self.config = write_config(folder / "config", self.root, ["runc"])

    def install(self, version: str) -> Driver:
        """Replace the installed driver with another version."""
        count = len(self._minors.split(","))
        options = (f"--gpus={count}", f"--minors={self._minors}", f"--driver-version={version}")
        self.driver = simulate(self._installation, self.root, *options)
        return self.driver

    def keep(self, *words: str | Path, start: bool = False) -> Result:
        """Run gpuhook driver-folder, for this folder unless another is named."""
        last = words[-1] if words and str(words[-1]).startswith("/") else self.folder
        options = [word for word in words if word != last]
        words = ("driver-folder", f"--config={self.config}", *options, last)
        return run([self._installation.command, *words], start=start)

    @property
    def older(self) -> list[Path]:
        """The driver folders that were replaced and are still there."""
        return [*self.folder.with_name(".driver.gpuhook").glob("*")]

    def destroy(self) -> None:
        """Remove the simulated driver."""
        run([self._installation.command, "simulate", "--remove", self.root])
