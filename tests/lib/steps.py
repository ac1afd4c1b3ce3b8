"""Steps of a container start, with the registered vendors passed in, as the programs do it."""

from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.oci.spec import Spec
from gpuhook.core import edit as editing
from gpuhook.core import resolve as resolving
from gpuhook.core.resolve import Allocation, Progress
from gpuhook.vendors.registry import all_vendors


def resolve(
    spec: dict[str, Any], config: Config, progress: Progress | None = None, **more: Any
) -> Allocation | None:
    return resolving.resolve(spec, config, all_vendors(config), progress, **more)


def edit(spec: Spec, config: Config, folder: str, **more: Any) -> Spec | None:
    edited = editing.edit(spec, config, all_vendors(config), folder, **more)
    return None if edited is None else edited.finish()
