"""What an injection has done so far, as the calls that undo it.

Hot path: imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Journal:
    """The steps that were done, each noted as what takes it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def record(self, undo: "Callable[[], None]") -> None:
        """Remember how to take back the step that was just done."""
        self._undo.append(undo)

    def roll_back(self) -> list[str]:
        """Undo every step, last first; return what could not be undone, in words."""
        failures = []
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except OSError as error:
                failures.append(str(error))
        return failures
