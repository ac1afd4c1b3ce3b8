"""A container as the engine describes it to the plugin, and the limits of its description."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, printable
from gpuhook.core.request import sources
from gpuhook.vendors import registry

# An engine waits two seconds, and continues without a plugin that takes longer. So the kubelet gets
# the rest of PATIENCE, and long descriptions are refused: 0.2 s is enough for reading one.
PATIENCE = 1.6  # seconds for a response
LONGEST = 2 << 20  # bytes: no kernel starts a program with a longer environment (execve(2))
_LONGEST_WORDS = 1 << 16  # characters of all requests for devices
_MOST = 20_000  # variables, mounts and annotations; 2,000 services make 14,000 variables
SWARM = "DOCKER_RESOURCE_"  # the prefix of a swarm's variables: AMD's runtime reads all of them

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ContainerRequest:
    """The identity and the requests of a container that is being created.

    ``mounts`` are (destination, source) pairs. ``annotations`` are those that a runtime may read,
    ``pod_annotations`` the pod's own, which its author writes. ``rlimits`` are the engine's
    soft limits of its process, (name, decimal number).
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
    rlimits: Pairs = ()
    pod_uid: str = ""

    def __str__(self) -> str:
        return (
            f"The container {printable(self.name)} of pod {printable(self.namespace)}/"
            f"{printable(self.pod)}"
        )


def variables(config: Config) -> tuple[str, ...]:
    """Return the names of all variables with which runtimes select devices."""
    vendors = registry.all_vendors(config).values()
    ours = [word for each in vendors for word in (*each.VARIABLES, *each.LEGACY)]
    return (*ours, *(variable for _, variable in sources.swarm_variables(config.swarm_resource)))


def prefixes(config: Config) -> tuple[str, ...]:
    """Return the prefixes of variables that may select a vendor's devices in a runtime."""
    vendors = registry.all_vendors(config).values()
    words = [word for each in vendors for word in (*each.VARIABLES, *each.LEGACY)]
    starts = [word.partition("_")[0] for word in words] + [each.NAME.upper() for each in vendors]
    return tuple(dict.fromkeys((*variables(config), *(f"{word}_" for word in starts), SWARM)))


def markers(config: Config) -> list[bytes]:
    """Return texts of which every request for devices contains one.

    Protobuf doesn't encode strings, so a request's bytes can be searched for them.
    """
    vendors = registry.all_vendors(config).values()
    limits = [end for each in vendors for end in getattr(each, "MEMORY_ANNOTATIONS", ())[1:]]
    words = (*prefixes(config), sources.FOLDERS, *config.cdi_annotation_prefixes, CDI, *limits)
    return [word.encode() for word in dict.fromkeys(words)]


CDI = "cdi.k8s.io"  # in the names of all annotations that request CDI devices


def check_length(data: bytes, config: Config) -> None:
    """Raise RequestError for a request that is too long for parsing, and may ask for devices.

    Parsing would take too long whatever it contains, and a refusal is a response in time.
    """
    if any(word in data for word in markers(config)):  # protects: nri-long-request
        raise RequestError(
            f"The container's variables, mounts and annotations have {len(data)} bytes together "
            f"with its pod's, and those of one that asks for devices may have {LONGEST}",
            "Give it fewer or shorter ones",
        )


def about_devices(asked: ContainerRequest, config: Config) -> list[str]:
    """Return all entries that may request devices, with all variables of these prefixes."""
    starts = prefixes(config)
    keys = config.cdi_annotation_prefixes
    notes = (*asked.annotations, *asked.pod_annotations)
    return [
        *(each for each in asked.env if each.startswith(starts)),
        *(f"{to}{source}" for to, source in asked.mounts if sources.FOLDERS in to),
        *(f"{key}{text}" for key, text in notes if key.startswith(keys) or CDI in key),
    ]


def check_size(asked: ContainerRequest, words: Sequence[str]) -> None:
    """Refuse a container whose entries take too long: a refusal is a response in time."""
    length = sum(map(len, words))
    if length > _LONGEST_WORDS:  # protects: nri-longest
        raise RequestError(
            f"{asked} asks for devices by variables, mounts and annotations of {length} characters "
            f"together, and they may have {_LONGEST_WORDS}",
            "Shorten them; each variable with a vendor's prefix counts",
        )
    count = len(asked.env) + len(asked.mounts) + len(asked.annotations) + len(asked.pod_annotations)
    if count > _MOST:  # protects: nri-most
        raise RequestError(
            f"{asked} asks for devices and has {count} variables, mounts and annotations, and such "
            f"a container may have {_MOST}",
            "Give it fewer; enableServiceLinks: false omits those of a namespace's services",
        )
