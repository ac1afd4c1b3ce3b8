"""Read a low-level runtime's command line as runc and crun do: verb, bundle, log.

Sources: runc(8) and runc-create(8), versions 1.1 to 1.4; crun(1), versions 1.8 to 1.28.

Hot path: imports nothing.
"""

# Options before the verb that take the next word as their value. No runtime takes the bundle
# there, but NVIDIA's does not mind, and so the verb is still found.
_GLOBAL_VALUES = frozenset(
    {"root", "log", "log-format", "log-level", "rootless", "criu", "cgroup-manager", "bundle", "b"}
)
# Options after create and run that take the next word as their value.
_VERB_VALUES = frozenset(
    {
        "bundle", "b", "config", "f", "console-socket", "pidfd-socket", "pid-file",
        "preserve-fds",
    }
)  # fmt: skip

CREATING_VERBS = frozenset({"create", "run"})


class Arguments:
    """What a command line means to us.

    ``verb`` is empty where there is none; ``bundle`` is None for the working directory;
    ``config`` is the name of the spec file in the bundle (crun can change it); ``log`` is
    the file that the engine reads errors from, if it gave one.
    """

    def __init__(self, argv: list[str]) -> None:
        """Read the words after the program's name."""
        self.verb = ""
        self.bundle: str | None = None
        self.config = "config.json"
        self.log: str | None = None
        rest = self._read_globals(argv)
        if rest and rest[0] in CREATING_VERBS:
            self.verb = rest[0]
            self._read_verb_options(rest[1:])
        elif rest:
            self.verb = rest[0]

    def _read_globals(self, argv: list[str]) -> list[str]:
        """Read options up to the first word that is none; return it and what follows."""
        index = 0
        while index < len(argv):
            name, value, used = _option(argv, index, _GLOBAL_VALUES)
            if name is None:
                return argv[index + used :]
            if name == "log":
                self.log = value
            elif name in ("bundle", "b") and value is not None:
                self.bundle = value
            index += used
        return []

    def _read_verb_options(self, argv: list[str]) -> None:
        """Read options wherever they stand: both runtimes let them follow the id."""
        index = 0
        while index < len(argv):
            name, value, used = _option(argv, index, _VERB_VALUES)
            if name is None and used:
                return  # "--": only the id follows
            if name in ("bundle", "b") and value is not None:
                self.bundle = value
            elif name in ("config", "f") and value is not None:
                self.config = value
            index += used or 1


def _option(
    argv: list[str], index: int, with_value: frozenset[str]
) -> tuple[str | None, str | None, int]:
    """Read the option at ``index``: its name, its value, how many words it takes.

    Name None: not an option (0 words), or the ``--`` that ends them (1 word).
    """
    word = argv[index]
    if word == "--":
        return None, None, 1
    if not word.startswith("-") or word == "-":
        return None, None, 0
    name, equals, value = word.lstrip("-").partition("=")
    if equals:
        return name, value, 1
    if name in with_value:
        following = argv[index + 1] if index + 1 < len(argv) else None
        return name, following, 2
    if not word.startswith("--") and name[:1] in ("b", "f") and len(name) > 1:
        return name[0], name[1:], 1  # -bDIR, which crun takes
    return name, None, 1
