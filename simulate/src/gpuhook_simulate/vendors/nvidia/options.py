"""The options of a simulated driver: their defaults, and their validation."""

import os
import re
from dataclasses import dataclass, field
from enum import Enum

from gpuhook.base.errors import SimulateError, shown

DEFAULT_DRIVER = "580.65.06"
MAX_GPUS = 64
MAX_CHANNELS = 2048  # nvidia's module parameter NVreg_ImexChannelCount
PLATFORMS = ("linux", "wsl", "tegra")
# Options that only the platform linux has.
_LINUX_ALONE = (
    "minors", "mig", "unplugged", "lost", "failure", "library_dir", "driver_files", "compat32",
    "imex_channels", "features",
)  # fmt: skip
NVLINKS = ("none", "pairs", "all")
FEATURES = ("gds", "gdrcopy", "mofed", "nvswitch")
MAX_MINOR = 253  # 254 is nvidia-modeset and 255 nvidiactl

# Driver branch -> the newest CUDA that it supports, from the CUDA toolkit release notes.
_CUDA_OF_BRANCH = {
    450: "11.0",
    460: "11.2",
    470: "11.4",
    510: "11.6",
    515: "11.7",
    520: "11.8",
    525: "12.0",
    530: "12.1",
    535: "12.2",
    545: "12.3",
    550: "12.4",
    555: "12.5",
    560: "12.6",
    565: "12.7",
    570: "12.8",
    575: "12.9",
    580: "13.0",
    590: "13.1",
    615: "13.4",
}

_DRIVER = re.compile(r"[0-9]{2,4}(\.[0-9]{1,4}){1,2}")
_CUDA = re.compile(r"([0-9]{1,2})\.([0-9])")
_LIBRARY_DIR = re.compile(r"(/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.+-]+)+")


class Failure(Enum):
    """A broken machine."""

    NOT_LOADED = "not-loaded"
    VERSION_MISMATCH = "version-mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a simulated machine; ``check`` validates them.

    ``models`` has one model name for all GPUs or one per GPU. ``minors`` has each GPU's
    /dev/nvidiaN number (empty: the same as the index). ``mig`` maps a GPU's index to its
    profiles; a GPU with an empty list is in MIG mode and has no MIG device. ``unplugged``
    are the indices of removed GPUs, ``lost`` of GPUs that are present and don't answer.
    ``driver_files`` is a tree of extracted packages to install into the root; these determine the
    version and the paths. An empty ``cuda_version`` means the driver's, an empty ``library_dir``
    the multiarch folder of this host. ``drm`` adds /dev/dri, ``compat32`` 32-bit libraries,
    ``features`` the devices of some of FEATURES. ``platform`` is one of PLATFORMS, ``nvlink`` one
    of NVLINKS: the remote ends of the GPUs' links.
    """

    root: str
    gpus: int = 1
    models: tuple[str, ...] = ("H200",)
    driver_version: str = ""
    cuda_version: str = ""
    minors: tuple[int, ...] = ()
    mig: dict[int, tuple[str, ...]] = field(default_factory=dict)
    unplugged: frozenset[int] = frozenset()
    init_seconds: float = 0.0
    failure: Failure | None = None
    lost: frozenset[int] = frozenset()
    library_dir: str = ""
    driver_files: str = ""
    drm: bool = True
    compat32: bool = False
    imex_channels: int = 0
    features: frozenset[str] = frozenset()
    seed: str = "gpuhook"
    platform: str = "linux"
    nvlink: str = "none"

    def check(self) -> None:
        """Raise SimulateError for the first option that can't be simulated."""
        _check_counts(self)
        _check_minors(self)
        _check_extras(self)
        _check_platform(self)
        if self.driver_version and not _DRIVER.fullmatch(self.driver_version):
            raise SimulateError(
                f"{self.driver_version!r} is not a driver version", "Write it like 580.65.06"
            )
        if self.cuda_version and not _CUDA.fullmatch(self.cuda_version):
            raise SimulateError(
                f"{self.cuda_version!r} is not a CUDA version", "Write it like 12.4"
            )
        if self.library_dir and not _LIBRARY_DIR.fullmatch(self.library_dir):
            raise SimulateError(
                f"{self.library_dir!r} can't be the library folder",
                "Give an absolute path below the driver root, like /usr/lib64",
            )
        try:
            self.seed.encode()
        except UnicodeEncodeError:
            raise SimulateError(
                f"{shown(self.seed)} can't be the seed", "Give text in UTF-8"
            ) from None
        if self.compat32 and (self.driver_files or os.uname().machine != "x86_64"):
            raise SimulateError(
                "32-bit libraries can be simulated only on x86_64, and not with driver files",
                "Leave out compat32",
            )
        if self.driver_files and (self.driver_version or self.library_dir):
            raise SimulateError(
                "The driver files decide the driver version and the library folder",
                "Leave out the version and the folder, or the driver files",
            )
        if not 0 <= self.init_seconds <= 3600:
            raise SimulateError(
                f"NVML can't take {self.init_seconds:g} seconds to start", "Give 0 to 3600"
            )


def _check_counts(options: Options) -> None:
    if not 0 <= options.gpus <= MAX_GPUS:
        raise SimulateError(f"{options.gpus} GPUs can't be simulated", f"Give 0 to {MAX_GPUS}")
    if len(options.models) not in {1, options.gpus}:
        raise SimulateError(
            f"{len(options.models)} models are given for {options.gpus} GPUs",
            "Give one model for all, or one for each GPU",
        )
    indices = {*options.mig, *options.unplugged, *options.lost}
    for index in sorted(indices):
        if not 0 <= index < options.gpus:
            raise SimulateError(
                f"There is no GPU {index} among {options.gpus}",
                "Count the GPUs from 0, or simulate more of them",
            )


def _check_platform(options: Options) -> None:
    if options.platform not in PLATFORMS:
        raise SimulateError(
            f"There is no platform {options.platform!r}", f"Use one of {', '.join(PLATFORMS)}"
        )
    if options.platform == "linux":
        return
    for name in _LINUX_ALONE:
        if getattr(options, name):
            raise SimulateError(
                f"{name} can't be simulated on the platform {options.platform}",
                f"Leave out {name}",
            )
    if options.nvlink != "none":
        raise SimulateError(
            f"GPUs can't be linked on the platform {options.platform}", "Leave out nvlink"
        )
    if options.platform == "tegra" and options.gpus != 1:
        raise SimulateError("Tegra has one GPU", "Leave out the number of GPUs")


def _check_extras(options: Options) -> None:
    if options.nvlink not in NVLINKS:
        raise SimulateError(
            f"GPUs can't be linked by {options.nvlink!r}", f"Use one of {', '.join(NVLINKS)}"
        )
    if not 0 <= options.imex_channels <= MAX_CHANNELS:
        raise SimulateError(
            f"{options.imex_channels} IMEX channels can't be simulated", f"Give 0 to {MAX_CHANNELS}"
        )
    for feature in sorted(options.features):
        if feature not in FEATURES:
            raise SimulateError(
                f"There is no feature {feature!r}", f"Use some of {', '.join(FEATURES)}"
            )


def _check_minors(options: Options) -> None:
    if not options.minors:
        return
    if len(options.minors) != options.gpus:
        raise SimulateError(
            f"{len(options.minors)} minor numbers are given for {options.gpus} GPUs",
            "Give one for each GPU",
        )
    if len(set(options.minors)) != len(options.minors):
        raise SimulateError("Two GPUs have the same minor number", "Give each GPU its own")
    for minor in options.minors:
        if not 0 <= minor <= MAX_MINOR:
            raise SimulateError(
                f"{minor} can't be the minor number of a GPU", f"Give 0 to {MAX_MINOR}"
            )


def cuda_number(options: Options, driver_version: str) -> int:
    """Return the CUDA version in NVML's form: 12.4 is 12040."""
    text = options.cuda_version or _cuda_of_driver(driver_version)
    major, _, minor = text.partition(".")
    return int(major) * 1000 + int(minor) * 10


def _cuda_of_driver(driver_version: str) -> str:
    branch = int(driver_version.partition(".")[0])
    older = [known for known in _CUDA_OF_BRANCH if known <= branch]
    return _CUDA_OF_BRANCH[max(older, default=min(_CUDA_OF_BRANCH))]


def parse_mig(words: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Parse ``GPU:profile,profile...`` words (only ``GPU:`` is MIG mode without devices)."""
    mig: dict[int, tuple[str, ...]] = {}
    for word in words:
        index, colon, profiles = word.partition(":")
        if not colon or not index.isdecimal() or int(index) in mig:
            raise SimulateError(
                f"{word!r} doesn't describe a GPU's MIG devices",
                "Write GPU:PROFILE,PROFILE... once for each GPU, like 0:3g.71gb,1g.18gb",
            )
        mig[int(index)] = tuple(name.strip() for name in profiles.split(",") if name.strip())
    return mig


def parse_mig_change(words: tuple[str, ...]) -> dict[int, tuple[str, ...] | None]:
    """Parse words as ``parse_mig`` does, and ``GPU:off``, which becomes None: no MIG mode."""
    return {
        index: None if names == ("off",) else names for index, names in parse_mig(words).items()
    }


def parse_failure(word: str) -> Failure | None:
    """Parse ``not-loaded`` or ``version-mismatch``; empty means no failure."""
    if not word:
        return None
    for failure in Failure:
        if failure.value == word:
            return failure
    raise SimulateError(
        f"{word!r} is not a failure", "Use not-loaded or version-mismatch, or --lost GPU,..."
    )


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """Parse a comma-separated list of numbers; ``what`` is its name in the error."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdecimal():
            raise SimulateError(f"{word!r} is not a number in {what}", "Write it like 3,1,0,2")
    return tuple(int(word) for word in words)
