"""The GPU models that can be simulated: names, sizes, PCI identity and MIG profiles.

The values are those that NVML and ``nvidia-smi`` report for the product.
"""

from dataclasses import dataclass

from gpuhook.base.errors import SimulateError

_NVIDIA = 0x10DE

# nvmlBrandType_t
BRAND_TESLA = 2
BRAND_GEFORCE = 5
BRAND_NVIDIA = 14

# nvmlDeviceArchitecture_t
_VOLTA, _TURING, _AMPERE, _ADA, _HOPPER = 5, 6, 7, 8, 9


# (memory slices, compute slices) of a MIG profile -> its possible first memory slices.
_STARTS = {
    (1, 1): (0, 1, 2, 3, 4, 5, 6),
    (2, 1): (0, 2, 4, 6),
    (2, 2): (0, 2, 4),
    (4, 3): (4, 0),
    (4, 4): (0,),
    (8, 7): (0,),
}


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A profile of MIG devices.

    ``number`` is its NVML_GPU_INSTANCE_PROFILE_ constant, ``id`` nvidia-smi's number of it.
    ``slices`` is in sevenths of the GPU's compute, ``memory_slices`` in eighths of its memory,
    ``memory`` in MiB; ``media`` counts the JPEG and the optical-flow engines, and ``instances`` is
    the maximum number on one GPU.
    """

    name: str
    number: int
    id: int
    slices: int
    memory_slices: int
    instances: int
    memory: int
    multiprocessors: int
    decoders: int
    media: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The memory slices at which it may start, the preferred one first."""
        return _STARTS[self.memory_slices, self.slices]


@dataclass(frozen=True, slots=True)
class Model:
    """A product. ``memory`` is in MiB, clocks in MHz, ``power`` in watts.

    ``nvlinks`` is the number of its NVLinks, and their nvmlNvlinkVersion_t.
    """

    name: str
    brand: int
    architecture: int
    capability: tuple[int, int]
    device: int
    subsystem: int
    memory: int
    multiprocessors: int
    cores: int
    bus_width: int
    clocks: tuple[int, int]  # multiprocessors, memory
    power: int
    pcie_generation: int
    board_part: str
    vbios: str
    fans: int = 0
    ecc: bool = True
    nvlinks: tuple[int, int] = (0, 0)
    mig: tuple[MigProfile, ...] = ()

    @property
    def pci_id(self) -> int:
        """Device and vendor id, combined as in NVML."""
        return self.device << 16 | _NVIDIA

    @property
    def pci_subsystem(self) -> int:
        """Subsystem and vendor id, combined as in NVML."""
        return self.subsystem << 16 | _NVIDIA

    def profile(self, name: str) -> MigProfile:
        """Return the MIG profile of that name; SimulateError, with the known ones, if none."""
        for profile in self.mig:
            if profile.name == name:
                return profile
        if not self.mig:
            raise SimulateError(f"{self.name} has no MIG", "Choose a model with MIG, such as A100")
        known = ", ".join(profile.name for profile in self.mig)
        raise SimulateError(f"{self.name} has no MIG profile {name!r}", f"Use one of {known}")


# name, number, id, slices, memory slices, instances, media engines
_LAYOUT = (
    ("1g.{0}gb", 0, 19, 1, 1, 7, 0),
    ("1g.{0}gb+me", 7, 20, 1, 1, 1, 1),
    ("1g.{1}gb", 9, 15, 1, 2, 4, 0),
    ("2g.{1}gb", 1, 14, 2, 2, 3, 0),
    ("3g.{2}gb", 2, 9, 3, 4, 2, 0),
    ("4g.{2}gb", 3, 5, 4, 4, 1, 0),
    ("7g.{3}gb", 4, 0, 7, 8, 1, 1),
)


def _profiles(
    sizes: tuple[int, int, int, int],
    memory: tuple[int, int, int, int],
    multiprocessors: tuple[int, ...],
    decoders: tuple[int, ...],
) -> tuple[MigProfile, ...]:
    """Return the seven profiles that all MIG models share.

    ``sizes`` are the gigabytes in the names and ``memory`` the MiB of one, two, four and
    eight memory slices; the other two have one number per profile, in the order of _LAYOUT.
    """
    size_of = dict(zip((1, 2, 4, 8), memory, strict=True))
    return tuple(
        MigProfile(
            name=name.format(*sizes),
            number=number,
            id=ident,
            slices=slices,
            memory_slices=memory_slices,
            instances=instances,
            memory=size_of[memory_slices],
            multiprocessors=sms,
            decoders=engines,
            media=media,
        )
        for (name, number, ident, slices, memory_slices, instances, media), sms, engines in zip(
            _LAYOUT, multiprocessors, decoders, strict=True
        )
    )


_HOPPER_SMS, _HOPPER_DECODERS = (16, 16, 26, 32, 60, 64, 132), (1, 1, 1, 2, 3, 4, 7)
_AMPERE_SMS, _AMPERE_DECODERS = (14, 14, 14, 28, 42, 56, 98), (0, 1, 1, 1, 2, 2, 5)

MODELS = {
    "H200": Model(
        name="NVIDIA H200",
        brand=BRAND_NVIDIA,
        architecture=_HOPPER,
        capability=(9, 0),
        device=0x2335,
        subsystem=0x18BE,
        memory=143771,
        multiprocessors=132,
        cores=16896,
        bus_width=6144,
        clocks=(1980, 3201),
        power=700,
        pcie_generation=5,
        board_part="900-21010-0040-000",
        vbios="96.00.A0.00.01",
        nvlinks=(18, 6),
        mig=_profiles(
            (18, 35, 71, 141), (16384, 33280, 70912, 143360), _HOPPER_SMS, _HOPPER_DECODERS
        ),
    ),
    "H100": Model(
        name="NVIDIA H100 80GB HBM3",
        brand=BRAND_NVIDIA,
        architecture=_HOPPER,
        capability=(9, 0),
        device=0x2330,
        subsystem=0x16C1,
        memory=81559,
        multiprocessors=132,
        cores=16896,
        bus_width=5120,
        clocks=(1980, 2619),
        power=700,
        pcie_generation=5,
        board_part="692-2G520-0200-000",
        vbios="96.00.74.00.01",
        nvlinks=(18, 6),
        mig=_profiles((10, 20, 40, 80), (9984, 20096, 40320, 81024), _HOPPER_SMS, _HOPPER_DECODERS),
    ),
    "A100": Model(
        name="NVIDIA A100-SXM4-80GB",
        brand=BRAND_NVIDIA,
        architecture=_AMPERE,
        capability=(8, 0),
        device=0x20B2,
        subsystem=0x147F,
        memory=81920,
        multiprocessors=108,
        cores=6912,
        bus_width=5120,
        clocks=(1410, 1593),
        power=400,
        pcie_generation=4,
        board_part="692-2G506-0210-002",
        vbios="92.00.45.00.05",
        nvlinks=(12, 4),
        mig=_profiles((10, 20, 40, 80), (9728, 19968, 40192, 80640), _AMPERE_SMS, _AMPERE_DECODERS),
    ),
    "A100-40GB": Model(
        name="NVIDIA A100-SXM4-40GB",
        brand=BRAND_NVIDIA,
        architecture=_AMPERE,
        capability=(8, 0),
        device=0x20B0,
        subsystem=0x134F,
        memory=40960,
        multiprocessors=108,
        cores=6912,
        bus_width=5120,
        clocks=(1410, 1215),
        power=400,
        pcie_generation=4,
        board_part="692-2G506-0200-002",
        vbios="92.00.19.00.10",
        nvlinks=(12, 4),
        mig=_profiles((5, 10, 20, 40), (4864, 9984, 20096, 40192), _AMPERE_SMS, _AMPERE_DECODERS),
    ),
    "L4": Model(
        name="NVIDIA L4",
        brand=BRAND_NVIDIA,
        architecture=_ADA,
        capability=(8, 9),
        device=0x27B8,
        subsystem=0x16CA,
        memory=23034,
        multiprocessors=58,
        cores=7424,
        bus_width=192,
        clocks=(2040, 6251),
        power=72,
        pcie_generation=4,
        board_part="900-2G193-0000-000",
        vbios="95.04.29.00.06",
    ),
    "T4": Model(
        name="Tesla T4",
        brand=BRAND_NVIDIA,
        architecture=_TURING,
        capability=(7, 5),
        device=0x1EB8,
        subsystem=0x12A2,
        memory=15360,
        multiprocessors=40,
        cores=2560,
        bus_width=256,
        clocks=(1590, 5001),
        power=70,
        pcie_generation=3,
        board_part="900-2G183-0000-001",
        vbios="90.04.38.00.03",
    ),
    "V100": Model(
        name="Tesla V100-SXM2-16GB",
        brand=BRAND_TESLA,
        architecture=_VOLTA,
        capability=(7, 0),
        device=0x1DB1,
        subsystem=0x1212,
        memory=16384,
        multiprocessors=80,
        cores=5120,
        bus_width=4096,
        clocks=(1530, 877),
        power=300,
        pcie_generation=3,
        board_part="900-2G503-0000-000",
        vbios="88.00.4F.00.09",
        nvlinks=(6, 2),
    ),
    "RTX4090": Model(
        name="NVIDIA GeForce RTX 4090",
        brand=BRAND_GEFORCE,
        architecture=_ADA,
        capability=(8, 9),
        device=0x2684,
        subsystem=0x16F4,
        memory=24564,
        multiprocessors=128,
        cores=16384,
        bus_width=384,
        clocks=(3105, 10501),
        power=450,
        pcie_generation=4,
        board_part="900-1G136-2530-000",
        vbios="95.02.18.80.5F",
        fans=2,
        ecc=False,
    ),
}


def find_model(name: str) -> Model:
    """Return the model; case, blanks, dashes and a leading NVIDIA are ignored."""
    wanted = _squeeze(name).removeprefix("NVIDIA")
    for key, model in MODELS.items():
        if wanted == _squeeze(key):
            return model
    raise SimulateError(f"There is no model {name!r}", f"Use one of {', '.join(MODELS)}")


def _squeeze(name: str) -> str:
    return "".join(letter for letter in name.upper() if letter.isalnum())
