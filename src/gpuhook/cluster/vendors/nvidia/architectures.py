"""Names of NVIDIA's GPU generations, by compute capability."""

# The lowest compute capability -> the name.
_NAMES = (
    ((12, 0), "Blackwell"), ((10, 0), "Blackwell"), ((9, 0), "Hopper"), ((8, 9), "Ada Lovelace"),
    ((8, 0), "Ampere"), ((7, 5), "Turing"), ((7, 0), "Volta"), ((6, 0), "Pascal"),
    ((5, 0), "Maxwell"), ((3, 0), "Kepler"), ((2, 0), "Fermi"), ((1, 0), "Tesla"),
)  # fmt: skip


def parts(capability: str) -> tuple[int, int]:
    """Return the two numbers of a compute capability (9.0), zeros if it is unknown."""
    major, _, minor = capability.partition(".")
    if not major.isdecimal() or not minor.isdecimal():
        return 0, 0
    return int(major), int(minor)


def title(capability: str) -> str:
    """Return the generation's name, Unknown for one that isn't in the list."""
    number = parts(capability)
    newer = number[0] == 11 or number >= (13, 0)
    return next((name for least, name in _NAMES if number >= least and not newer), "Unknown")
