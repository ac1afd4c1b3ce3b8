"""Our own hook that a CDI document has brought: the words that lead it to a helper."""

import os

from gpuhook.ground import names
from gpuhook.ground.config.model import DEFAULT_PATH
from gpuhook.ground.oci.spec import hook_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.oci.spec import Spec
    from gpuhook.start.resolve import Resolved

    # Finds a helper for a container's hook; see ``edit``.
    Helped = Callable[[Spec, Resolved, str], list[str]]

_WORDS = 5  # that lead to a helper (standby.helper.Pipes), after the option


def without_words(spec: "Spec") -> "Spec":
    """Return the spec without the words of an earlier start, whose helper is gone."""
    hooks = spec.hooks(names.CDI_HOOK_STAGE)
    plain = [_plain(hook) for hook in hooks]
    return spec if plain == hooks else spec.put({("hooks", names.CDI_HOOK_STAGE): plain})


def _plain(hook: "dict[str, Any]") -> "dict[str, Any]":
    args = hook.get("args")
    if hook_name(hook) != names.CDI_HOOK or not isinstance(args, list):
        return hook
    if args[1:2] != [names.HELPER_OPTION]:
        return hook
    return {**hook, "args": [args[0], *args[2 + _WORDS :]]}


def with_words(
    spec: "Spec", resolved: "Resolved", config: "Config", folder: str, helped: "Helped | None"
) -> "Spec":
    """Return the spec with words for a helper in our hook, where a document has brought it.

    That has to be the hook of this installation, in ``folder``, and called for this very
    configuration. ``helped`` is as for ``edit``. A helper serves one hook: the first.
    """
    path = os.path.join(os.path.abspath(folder), names.CDI_HOOK)
    options: list[list[str]] = [["--config", config.path]] if config.path else []
    if config.path in (None, DEFAULT_PATH):
        options.append([])
    kinds = [each.KIND for each in resolved.known.values()]
    expected = [[names.CDI_HOOK, *words, kind] for words in options for kind in kinds]
    hooks = spec.hooks(names.CDI_HOOK_STAGE) if helped is not None else []
    for place, hook in enumerate(hooks):
        args = hook.get("args")
        if helped is None or hook.get("path") != path or args not in expected:
            continue
        words = helped(spec, resolved, args[-1])
        if words:
            hooks[place] = {**hook, "args": [args[0], names.HELPER_OPTION, *words, *args[1:]]}
            return spec.put({("hooks", names.CDI_HOOK_STAGE): hooks})
        break
    return spec
