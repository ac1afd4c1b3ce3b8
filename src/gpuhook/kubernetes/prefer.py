"""Which devices a container had better get: the answer to GetPreferredAllocation."""

from collections.abc import Sequence

from gpuhook.kubernetes.settings import Settings
from gpuhook.kubernetes.state import Resource


def prefer(
    resource: Resource,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    settings: Settings,
) -> list[str]:
    """Return ``size`` of the ids that are available, those that must be among them first."""
    del settings
    order = [each for each in resource.offers() if each in set(available)]
    return list(dict.fromkeys([*must_include, *order]))[:size]
