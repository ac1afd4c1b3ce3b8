"""A container as the engine describes it to the plugin, and the limits of what is read of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import RequestError, printable
from gpuhook.start.request import sources
from gpuhook.vendors import registry

# An engine gives two seconds, and continues without a plugin that takes longer. So the kubelet gets
# what is left of these, and what a container says is refused where it is long: 0.2 s is enough.
PATIENCE = 1.6  # seconds for an answer
LONGEST = 2 << 20  # bytes: no kernel starts a program with a longer environment (execve(2))
_LONGEST_WORDS = 1 << 16  # characters of all that asks for devices
_MOST = 20_000  # variables, mounts and annotations; of 2,000 services come 14,000 variables
SWARM = "DOCKER_RESOURCE_"  # a swarm's variables begin so: AMD's runtime reads all of them

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Asked:
    """A container that is being created, as far as it says who it is and what it asks for.

    ``mounts`` are (destination, source) pairs. ``annotations`` are those that a runtime may read,
    ``pod_annotations`` the pod's own, which its author writes.
    """

    namespace: str
    pod: str
    name: str
    handler: str
    env: tuple[str, ...]
    mounts: Pairs = ()
    annotations: Pairs = ()
    pod_annotations: Pairs = ()
    id: str = ""

    def __str__(self) -> str:
        return (
            f"The container {printable(self.name)} of pod {printable(self.namespace)}/"
            f"{printable(self.pod)}"
        )


def variables(config: Config) -> tuple[str, ...]:
    """Return the names of all variables by which runtimes decide which devices they give."""
    known = registry.known(config).values()
    ours = [word for each in known for word in (*each.VARIABLES, *each.LEGACY)]
    return (*ours, *(variable for _, variable in sources.swarm_variables(config.swarm_resource)))


def prefixes(config: Config) -> tuple[str, ...]:
    """Return how the names of variables begin that may tell a runtime of a vendor's devices."""
    known = registry.known(config).values()
    words = [word for each in known for word in (*each.VARIABLES, *each.LEGACY)]
    starts = [word.partition("_")[0] for word in words] + [each.NAME.upper() for each in known]
    return tuple(dict.fromkeys((*variables(config), *(f"{word}_" for word in starts), SWARM)))


def markers(config: Config) -> list[bytes]:
    """Return the texts without one of which a request asks for no device.

    A request has its strings as they are (protobuf), so that bytes can be searched for them.
    """
    words = (*prefixes(config), sources.FOLDERS, *config.cdi_annotation_prefixes, CDI)
    return [word.encode() for word in dict.fromkeys(words)]


CDI = "cdi.k8s.io"  # in the names of all annotations by which CDI devices are asked for


def check_length(data: bytes, config: Config) -> None:
    """Raise RequestError for a request that is too long to be parsed, and may ask for devices.

    Parsing takes long, whatever is in it, and a refusal is an answer.
    """
    if any(word in data for word in markers(config)):  # protects: nri-long-request
        raise RequestError(
            f"The container's variables, mounts and annotations have {len(data)} bytes together "
            f"with its pod's, and those of one that asks for devices may have {LONGEST}",
            "Give it fewer or shorter ones",
        )


def about_devices(asked: Asked, config: Config) -> list[str]:
    """Return all that may ask for devices, and what begins as such a variable does."""
    starts = prefixes(config)
    keys = config.cdi_annotation_prefixes
    notes = (*asked.annotations, *asked.pod_annotations)
    return [
        *(each for each in asked.env if each.startswith(starts)),
        *(f"{to}{source}" for to, source in asked.mounts if sources.FOLDERS in to),
        *(f"{key}{text}" for key, text in notes if key.startswith(keys) or CDI in key),
    ]


def check_size(asked: Asked, words: Sequence[str]) -> None:
    """Refuse a container whose words take long to read: a refusal is an answer."""
    length = sum(map(len, words))
    if length > _LONGEST_WORDS:  # protects: nri-longest
        raise RequestError(
            f"{asked} asks for devices by variables, mounts and annotations of {length} characters "
            f"together, and they may have {_LONGEST_WORDS}",
            "Shorten them; each of its variables that begins as a vendor's counts",
        )
    count = len(asked.env) + len(asked.mounts) + len(asked.annotations) + len(asked.pod_annotations)
    if count > _MOST:  # protects: nri-most
        raise RequestError(
            f"{asked} asks for devices and has {count} variables, mounts and annotations, and such "
            f"a container may have {_MOST}",
            "Give it fewer; enableServiceLinks: false spares those of a namespace's services",
        )
