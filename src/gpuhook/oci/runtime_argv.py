"""Read a low-level runtime's command line: verb, bundle, spec, log.

What engines write is read here: it means the same to runc 1.1 to 1.4 and to crun 1.8 to 1.28.
All else that these take is left to runtime_parsers.
"""

from gpuhook.names import CREATING_VERBS

# Options before the verb and after create and run, those that take a value and those that don't.
_VALUES_BEFORE = frozenset(
    {"--root", "--log", "--log-format", "--log-level", "--rootless", "--cgroup-manager"}
)
_FLAGS_BEFORE = frozenset({"--debug", "--systemd-cgroup"})
_VALUES_AFTER = frozenset(
    {"--bundle", "-b", "--pid-file", "--console-socket", "--pidfd-socket", "--preserve-fds"}
)
_FLAGS_AFTER = frozenset(
    {"--no-pivot", "--no-new-keyring", "--no-subreaper", "--detach", "-d", "--keep"}
)


class Arguments:
    """What a command line means to us.

    ``verb`` is empty where there is none, or where the runtime only tells of itself;
    ``bundle`` is None for the working directory; ``config`` is the path of the spec, absolute
    or else relative to the bundle (crun can change it); ``log`` is the file that the engine
    reads errors from, if it gave one. ``ambiguous``: it has another meaning for crun.
    """

    def __init__(self, argv: list[str], *, crun: bool | None = None) -> None:
        """Read the words after the program's name, as crun or as runc does.

        Not told which, read them as the one that takes them; as runc, if both do.
        """
        self.verb = ""
        self.bundle: str | None = None
        self.config = "config.json"
        self.log: str | None = None
        self.ambiguous = False
        if not self._read_plain(argv):
            from gpuhook.oci.runtime_parsers import read  # noqa: PLC0415 - no engine writes such

            meaning, self.ambiguous = read(argv, crun=crun)
            self.verb, self.bundle, self.config, self.log = meaning

    def _read_plain(self, argv: list[str]) -> bool:
        """Read whole options and then, for create and run, the id; tell whether this is all."""
        index = 0
        while index < len(argv):
            word = argv[index]
            name, equals, value = word.partition("=")
            if name in (_VALUES_AFTER if self.verb else _VALUES_BEFORE):
                if not equals:
                    index += 1
                    value = argv[index] if index < len(argv) else ""
                if not self._take(name, value) or word[:3] == "-b=":
                    return False
            elif word not in (_FLAGS_AFTER if self.verb else _FLAGS_BEFORE):
                if not word or word[0] == "-":
                    return False
                if self.verb:
                    return index == len(argv) - 1
                self.verb = word
                if word not in CREATING_VERBS:
                    return True
            index += 1
        return False

    def _take(self, name: str, value: str) -> bool:
        """Note an option's value; tell whether it can be nothing else."""
        if name in ("--bundle", "-b"):
            self.bundle = value
        elif name == "--log":
            self.log = value
            return value[:1] == "/" and ":" not in value  # crun knows file:PATH
        return value[:1] not in ("", "-")
