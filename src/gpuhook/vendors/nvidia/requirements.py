"""Requirements of an image for the host: NVIDIA_REQUIRE_*, their grammar and check.

    requirement = alternative *( " " alternative )     one of them must hold
    alternative = factor *( "," factor )               all of them must hold
    factor      = property operator value
    operator    = "=" / "!=" / "<" / "<=" / ">" / ">="

Properties are cuda and driver (versions), arch (a GPU's compute capability) and brand
(= and != only). A factor about another property is ignored, as is an
alternative that has no factor left; a requirement without alternatives always holds.
"""

from gpuhook.base.errors import RequirementError, shown
from gpuhook.vendors.nvidia.model import selection
from gpuhook.vendors.nvidia.variables import DISABLE_REQUIRE, REQUIRE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuhook.core.contract import Grant
    from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory

    Factor = tuple[str, str, str]  # property, operator, value
    Alternatives = tuple[tuple[Factor, ...], ...]

_MAX_VERSION = 64  # characters; no real version is a third as long
_OPERATORS = ("!=", "<=", ">=", "=", "<", ">")  # longer ones first
_OPERATOR_CHARACTERS = "<>=!"
_VERSIONS = ("cuda", "driver", "arch")
_PROPERTIES = (*_VERSIONS, "brand")


def parse(text: str) -> "Alternatives":
    """Return a requirement as alternatives of (property, operator, value) factors.

    Raises RequirementError for a malformed part anywhere in the text.
    """
    alternatives = []
    for alternative in text.split():
        parsed = [_factor(factor, text) for factor in alternative.split(",") if factor]
        factors = tuple(factor for factor in parsed if factor[0] in _PROPERTIES)
        if factors:
            alternatives.append(factors)
    return tuple(dict.fromkeys(alternatives))


def _factor(factor: str, text: str) -> "Factor":
    end = len(factor)
    for character in _OPERATOR_CHARACTERS:
        position = factor.find(character)
        if position >= 0:
            end = min(end, position)
    name, rest = factor[:end].lower(), factor[end:]
    for operator in _OPERATORS:
        if rest.startswith(operator):
            value = rest[len(operator) :]
            _check_factor(name, operator, value, factor, text)
            return name, operator, value
    raise _malformed(factor, "has none of the operators = != < <= > >=", text)


def _check_factor(name: str, operator: str, value: str, factor: str, text: str) -> None:
    if not name or not value:
        raise _malformed(factor, "lacks a property or a value", text)
    if name in _VERSIONS and parse_version(value) is None:
        raise _malformed(factor, "does not compare with a version number", text)
    if name == "brand" and operator not in ("=", "!="):
        raise _malformed(factor, "orders brands, which have no order", text)
    if name == "brand" and any(character in value for character in _OPERATOR_CHARACTERS):
        raise _malformed(factor, "has two operators", text)


def _malformed(factor: str, problem: str, text: str) -> RequirementError:
    whole = "" if factor == text else f" in the requirement {shown(text)}"
    return RequirementError(
        f"{shown(factor)}{whole} {problem}",
        f"Correct the image's {REQUIRE}* variable, or set {DISABLE_REQUIRE}=true",
    )


def holds(alternatives: "Alternatives", facts: "Mapping[str, str]") -> bool:
    """Tell whether a parsed requirement holds.

    ``facts`` maps properties to the host's values. A property that is missing, empty or (for a
    version) unreadable makes a factor about it true, since nothing contradicts it.
    """
    if not alternatives:
        return True
    have = {name: parse_version(facts.get(name) or "") for name in _VERSIONS}
    return any(
        all(_factor_holds(factor, facts, have) for factor in factors) for factors in alternatives
    )


def _factor_holds(
    factor: "Factor", facts: "Mapping[str, str]", versions: "Mapping[str, tuple[int, ...] | None]"
) -> bool:
    name, operator, value = factor
    actual = facts.get(name)
    if not actual:
        return True
    if name == "brand":
        return (actual.lower() == value.lower()) == (operator == "=")
    have, want = versions[name], parse_version(value)
    if have is None or want is None:
        return True
    if operator == "=":
        return have == want
    if operator == "!=":
        return have != want
    if operator == "<":
        return have < want
    if operator == "<=":
        return have <= want
    return have > want if operator == ">" else have >= want


def check(grant: "Grant") -> None:
    """Raise RequirementError unless every requirement holds for every selected GPU.

    Without a selected GPU, only cuda and driver are known.
    """
    inventory = grant.inventory
    different: dict[tuple[str, ...], Gpu | None] = {}
    for gpu in selection(inventory, grant.devices).gpus or (None,):
        different.setdefault(tuple(_facts(inventory, gpu).values()), gpu)
    for text in grant.request.options.requirements:
        alternatives = parse(text)
        for gpu in different.values():
            if not holds(alternatives, _facts(inventory, gpu)):
                raise _unmet(text, alternatives, inventory, gpu)


def _facts(inventory: "NvidiaInventory", gpu: "Gpu | None") -> dict[str, str]:
    facts = {"cuda": inventory.cuda_version, "driver": inventory.driver_version}
    if gpu is not None:
        facts["arch"] = gpu.architecture
        facts["brand"] = gpu.brand
    return facts


def _unmet(
    text: str, alternatives: "Alternatives", inventory: "NvidiaInventory", gpu: "Gpu | None"
) -> RequirementError:
    facts = _facts(inventory, gpu)
    asked_about = {factor[0] for factors in alternatives for factor in factors}
    has = ", ".join(f"{name} {facts[name]}" for name in _PROPERTIES if facts.get(name))
    where = f" (GPU {gpu.index})" if gpu is not None and {"arch", "brand"} & asked_about else ""
    remedy = "Use a host with such a GPU"
    if {"cuda", "driver"} & asked_about:
        remedy = f"Update the driver, use an image made for CUDA {inventory.cuda_version} or older"
    return RequirementError(
        f"The container requires {shown(text)} and this host has {has}{where}",
        f"{remedy}, or set {DISABLE_REQUIRE}=true to start without this check",
    )


def parse_version(text: str) -> tuple[int, ...] | None:
    """Return a version's numbers, trailing zeros dropped (9 = 9.0), None if it is invalid."""
    if len(text) > _MAX_VERSION:
        return None
    parts = text.split(".")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        return None
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
