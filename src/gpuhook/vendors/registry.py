"""Registry of vendors.

``BUILT_IN`` has the names of every vendor with code: only data, so that a container start imports
nothing more of a vendor that it doesn't request. ``all_vendors`` returns those and the vendors that
a configuration declares.
"""

from gpuhook.base.errors import ConfigError, shown
from gpuhook.core.request.sources import swarm_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import VendorRegistry


# The folders of the vendors with code, in the order in which they are served.
VENDORS = ("nvidia", "amd", "neuron", "gaudi", "ascend", "intel_gpu", "intel_npu")


def complete(names: "ModuleType") -> "ModuleType":
    """Return a vendor's names, with defaults for those that it leaves out."""
    for word, value in (
        ("ANY_NOUN", names.NOUN),  # there are no parts to request
        ("LEGACY", ()),  # no images predate its variables
        ("VOID", next(iter(names.VARIABLES), "")),  # the variable that CDI specs set to void
        ("MOUNTS", f"/var/run/{names.NAME}-container-devices"),  # mounts below are requests
        ("AUTOMATIC", ()),  # no CDI kinds whose names are selectors
        ("SWARM_RESOURCE", ""),  # its names have no form of their own
        ("DEFAULT_KIND", False),
        ("PROGRAM_VARIABLES", ()),  # with which programs select their devices
        ("FIXED_MAJORS", ()),  # of nodes, the same on every host at every boot
        ("PCI_VENDOR", ""),  # as in /sys/bus/pci/devices/*/vendor, without 0x
    ):
        if not hasattr(names, word):
            setattr(names, word, value)
    return names


# A vendor's name -> its names (vendors/NAME/names.py), in the order of VENDORS.
BUILT_IN: "dict[str, ModuleType]" = {
    name: complete(__import__(f"gpuhook.vendors.{name}.names", fromlist=["NAME"]))
    for name in VENDORS
}


def all_vendors(config: "Config") -> "VendorRegistry":
    """Return the names of every vendor: those of BUILT_IN, and those declared in config.toml.

    If a declared vendor uses the variable of one of BUILT_IN, the variable is only for the declared
    one. ConfigError if a declared one has the name or the kind of one of BUILT_IN, or if
    swarm-resource names an unknown vendor.
    """
    found = _with_declared(config) if config.vendors else BUILT_IN
    if "=" in config.swarm_resource:
        _check_swarm(config, found)
    return found


def _with_declared(config: "Config") -> "VendorRegistry":
    from gpuhook.vendors.declared.names import names_of, without  # noqa: PLC0415 - rarely used

    given_away = [table.variable for table in config.vendors]
    found = {name: without(names, given_away) for name, names in BUILT_IN.items()}
    for table in config.vendors:
        for names in BUILT_IN.values():
            for word in {table.name, table.kind} & {names.NAME, names.KIND}:
                raise ConfigError(
                    f"{config.path or 'The configuration'} declares the vendor {table.name}, and "
                    f"{word} is {names.TITLE}'s already",
                    "Choose another one; gpuhook has code for that vendor",
                )
        found[table.name] = complete(names_of(table))
    return found


def _check_swarm(config: "Config", found: "VendorRegistry") -> None:
    """Refuse a swarm-resource variable of an unknown vendor: it would have no effect."""
    for vendor, _ in swarm_variables(config.swarm_resource):
        if vendor and vendor not in found:
            from gpuhook.base.config.loader import wrong_setting  # noqa: PLC0415 - for errors

            problem = f"names the vendor {shown(vendor)}, which isn't one of {', '.join(found)}"
            raise wrong_setting(config, "swarm-resource", problem)
