"""Parse a low-level runtime's command line: verb, bundle, log, root.

gpuhook parses the command lines that engines write: they mean the same to runc 1.1 to 1.4 and
to crun 1.8 to 1.28. If only one of them accepts a command line, or they interpret it differently,
gpuhook doesn't interpret it. The tests compare all this with the real programs.
"""

from gpuhook.base.names import CREATING_VERBS

# Options before the verb and after create and run, with and without a value.
_VALUES_BEFORE = frozenset(
    {"--root", "--log", "--log-format", "--log-level", "--rootless", "--cgroup-manager"}
)
_FLAGS_BEFORE = frozenset({"--debug", "--systemd-cgroup"})
_VALUES_AFTER = frozenset(
    {
        "--bundle", "-b", "--config", "-f", "--pid-file", "--console-socket", "--pidfd-socket",
        "--preserve-fds",
    }
)  # fmt: skip
_FLAGS_AFTER = frozenset(
    {"--no-pivot", "--no-new-keyring", "--no-subreaper", "--detach", "-d", "--keep"}
)
# With these a runtime prints about itself, or fails for an unknown option: it creates nothing.
_TELLING = frozenset({"--help", "-h", "-?", "--usage", "--version", "-v", "-V"})


class Arguments:
    """The parts of a command line that gpuhook uses.

    ``verb`` is create or run if the runtime creates a container, provided it accepts the command
    line. Then ``bundle`` is the folder, None for the working directory, and ``config`` the file
    that crun reads in place of the bundle's config.json, "" for none. Any other verb, including the
    empty one, is only for the runtime; the words after it are in ``rest``. ``log`` is the file from
    which the engine reads errors, if it gave one. ``root`` is the folder in which the runtime keeps
    its state, "" for its default, and ``container`` the id of the new container. ``unclear`` is a
    word of a command line that may create a container, and that runtimes interpret differently; it
    is empty if all is clear.
    """

    def __init__(self, argv: list[str]) -> None:
        """Parse the words after the program's name."""
        self.verb = ""
        self.bundle: str | None = None
        self.config = ""
        self.log: str | None = None
        self.root = ""
        self.container = ""
        self.rest: tuple[str, ...] = ()
        self.unclear = ""
        unclear = self._read(argv)
        if unclear is not None and not CREATING_VERBS.isdisjoint(argv):
            self.unclear = unclear or "an empty word"

    def _read(self, argv: list[str]) -> str | None:
        """Parse options, the verb, and for create and run options and the id.

        Returns the first word that is none of these.
        """
        verb = ""
        ids = 0
        words = iter(argv)
        for word in words:
            if word[:1] not in ("", "-"):
                if verb:
                    ids += 1
                    self.container = word
                elif word in CREATING_VERBS:
                    verb = word
                else:
                    self.verb = word
                    self.rest = (*words,)
                    return None
                continue
            name, equals, value = word.partition("=")
            if ids or word[:3] in ("-b=", "-f="):  # crun takes the = as part of the path
                return word
            if word in _TELLING:
                return None
            if name in (_VALUES_AFTER if verb else _VALUES_BEFORE):
                given = value if equals else next(words, None)
                if given is None:
                    return None  # every runtime refuses that
                if given[:1] in ("", "-"):
                    return word
                self._take(name, given)
            elif name not in (_FLAGS_AFTER if verb else _FLAGS_BEFORE):
                return word
        # Every runtime refuses to create no container, or two at once.
        self.verb = verb if ids == 1 else ""
        return None

    def _take(self, name: str, value: str) -> None:
        """Store an option's value."""
        if name in ("--bundle", "-b"):
            self.bundle = value
        elif name in ("--config", "-f"):
            self.config = "" if value == "config.json" else value  # crun's name for the bundle's
        elif name == "--root":
            self.root = value
        elif name == "--log":
            elsewhere = value.partition(":")[0] in ("file", "journald", "syslog")  # crun's words
            self.log = None if elsewhere else value
