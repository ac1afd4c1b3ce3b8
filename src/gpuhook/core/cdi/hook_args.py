"""Our own hook from a CDI spec, and the arguments that a start adds to it.

They lead the hook to a worker, and list the mounts of the CDI spec that the hook makes.
"""

from gpuhook.base import names
from gpuhook.base.errors import SpecError
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.spec import hook_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.base.oci.spec import Spec

    Entry = dict[str, Any]  # a hook or a mount, as in config.json

HOOKS = ("hooks", names.CDI_HOOK_STAGE)
MOUNTS_OPTION = "--mounts"
_WORDS = 5  # arguments that lead to a worker (prefork.hook_worker.Pipes), after the option


def without_words(spec: "Spec") -> "Spec":
    """Return the spec without the arguments of an earlier start, whose worker is gone."""
    hooks = spec.hooks(names.CDI_HOOK_STAGE)
    plain = [_plain(hook) for hook in hooks]
    return spec if plain == hooks else spec.put({HOOKS: plain})


def _plain(hook: "Entry") -> "Entry":
    if not _is_ours(hook):
        return hook
    words = _after_helper(hook)
    rest = words if _mounts(words) is None else words[2:]
    return {**hook, "args": [hook["args"][0], *rest]}


def _is_ours(hook: "Entry") -> bool:
    args = hook.get("args")
    return hook_name(hook) == names.CDI_HOOK and isinstance(args, list) and bool(args)


def _after_helper(hook: "Entry") -> "list[Any]":
    words: list[Any] = hook["args"][1:]
    return words[1 + _WORDS :] if words[:1] == [names.HELPER_OPTION] else words


def _mounts(words: "list[Any]") -> "Any":
    """Return the argument with the mounts left to our hook, None if there is none."""
    return words[1] if words[:1] == [MOUNTS_OPTION] and len(words) > 1 else None


def mounts_of(spec: "Spec", kind: str) -> list[tuple[str, str]]:
    """Return the mounts that the hook for this kind makes, as pairs of source and destination.

    SpecError if the argument was changed.
    """
    for hook in spec.hooks(names.CDI_HOOK_STAGE):
        if _is_ours(hook) and hook["args"][-1] == kind:
            word = _mounts(_after_helper(hook))
            return [] if word is None else _parse(word, spec.path)
    return []


def _parse(word: str, path: str) -> list[tuple[str, str]]:
    try:
        pairs = [(source, place) for source, place in jsontext.loads(word)]
        if all(isinstance(each, str) and each[:1] == "/" for pair in pairs for each in pair):
            return pairs
    except (ValueError, TypeError):
        pass
    raise SpecError(
        f"The mounts in the arguments of {names.CDI_HOOK} in {path} aren't pairs of paths",
        "Recreate the container, so that the engine writes the bundle again",
    )
