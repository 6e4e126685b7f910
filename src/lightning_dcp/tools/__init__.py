"""Commands of ``lightning-dcp`` besides LightningCLI's: folders with a ``command.main``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType


@dataclass(frozen=True)
class Command:
    """A command, imported when it runs.

    Attributes:
        name: As typed; the folder with that name holds ``command.main(args)``.
        summary: A line for ``lightning-dcp --help``.
    """

    name: str
    summary: str

    def run(self, args: Sequence[str]) -> None:
        """Runs the command."""
        import_module(f"{__name__}.{self.name}.command").main(list(args))


COMMANDS = MappingProxyType(
    {
        command.name: command
        for command in (
            Command("plan", "predict what dynamic context parallelism does for your lengths"),
            Command("calibrate", "measure your model on this machine, for better predictions"),
            Command("compare", "compare static and dynamic context parallelism on one config"),
        )
    }
)
