"""Option classes to a command line: dataclasses whose fields are the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from jsonargparse import ArgumentParser

from lightning_dcp.tools.option_errors import short_errors

# Flags: given without a value they mean true. As text, which postponed annotations are.
_BOOLS = ("bool", "bool | None")


def parse_options(
    args: Sequence[str], *, command: str, description: str, classes: Sequence[type]
) -> list[Any]:
    """Parses a command line whose options are the fields of some dataclasses.

    Args:
        args: The command line.
        command: Name of the command.
        description: For ``--help``.
        classes: Frozen dataclasses without a field name in common; the string under a field is its
            help text.

    Returns:
        An object of each class.

    Raises:
        SystemExit: ``--help``.
        ValueError: An option that does not exist, or a value that it does not take.
    """
    parser = new_parser(command, description)
    parser.add_argument("--config", action="config", help="YAML file that holds options.")
    for cls in classes:
        parser.add_class_arguments(cls)
    flags = {f"--{f.name}" for cls in classes for f in fields(cls) if f.type in _BOOLS}
    with short_errors(parser):
        values = parser.instantiate(parser.parse_args(_with_values(args, flags)))
    return [cls(**{field.name: values[field.name] for field in fields(cls)}) for cls in classes]


def new_parser(command: str, description: str) -> ArgumentParser:
    """A parser whose errors :func:`~.option_errors.short_errors` shortens; no abbreviations."""
    return ArgumentParser(
        prog=f"lightning-dcp {command}",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
    )


def _with_values(args: Sequence[str], flags: set[str]) -> list[str]:
    """A flag without a value means true, and a second --model is added to the first."""
    given, seen = [], False
    for arg, after in zip(args, [*args[1:], "--"], strict=False):
        name, sign, value = arg.partition("=")
        if name == "--model":
            given.append(f"--model{'+' if seen else ''}{sign}{value}")
            seen = True
        else:
            given.append(f"{arg}=true" if arg in flags and after.startswith("-") else arg)
    return given
