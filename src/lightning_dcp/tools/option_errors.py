"""What a parser refuses, in a line or two: which option, what was found, what comes near it."""

from __future__ import annotations

import ast
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser

_TRIED = "Does not validate against any of the Union subtypes"
_REASON = re.compile(r"^ *- (?!Expected an? |Problem with |Does not validate)(.+)", re.MULTILINE)
_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS = re.compile(r"class_path '([\w.]+)'")
_GROUP = re.compile(r"Group '([\w.]+)' does not accept")
_UNKNOWN = re.compile(r"(?:[Oo]ption '|unrecognized arguments: --?)([\w.]+)")
_NO_CLASS = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'|import path string: (\w+)")
_EXPECTED = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal(\[.*?\]))")
_FOUND = re.compile(r"(?:Got|Given) value: (?:NestedArg\(.*val='(.*)'\)$|(.*))")


@contextmanager
def short_errors(parser: ArgumentParser) -> Iterator[None]:
    """Turns an error of a parser, with a list of all options and types in it, into a short one.

    Raises:
        ValueError: An option that does not exist, with those near it; a value of another kind.
    """
    try:
        yield
    except (ArgumentError, ValueError) as error:
        # What a class refuses is a short text of its own, unless other types were tried as well.
        if isinstance(error, ValueError) and _TRIED not in str(error):
            raise
        raise ValueError(shortened(str(error), parser)) from error


def shortened(message: str, parser: ArgumentParser) -> str:
    """The message of a parser's error in a line or two."""
    path: list[str] = []
    known = {action.dest for action in parser._actions}
    for line in message.splitlines():
        if key := _KEY.search(line):
            path.append(key[1])
        elif cls := _CLASS.search(line):
            known |= {".".join([*path, name]) for name in _names_of(_imported(cls[1]))}
        if absent := _NO_CLASS.search(line):
            return _no_class(".".join(path), absent[1], absent[2] or absent[3])
        if unknown := _UNKNOWN.search(line):
            group = _GROUP.findall(line)
            name = ".".join([*path, *group, unknown[1]])
            return no_option(name, known)
    if _TRIED in message and (reasons := _REASON.findall(message)):
        return str(reasons[0])
    expected, found = _EXPECTED.findall(message), _FOUND.search(message)
    if path and expected and found:
        return _wrong_value(".".join(path), expected, found[1] or found[2] or "")
    if "are required: " in message:
        names = re.findall(r"([\w]+)(?:,|$)", message.partition("are required: ")[2])
        return f"give {' and '.join(f'--{name}' for name in names)}, or a --config file that does"
    # YAML that cannot be read, an option without its value: short already.
    return _KEY.sub(r"--\1", message.removeprefix("argument "))


def no_option(name: str, known: Iterable[str]) -> str:
    """Says that there is no such option, and which of the known ones come near."""
    return f"there is no option --{name}{_did_you_mean(_near(name, known), '--')}"


def _no_class(option: str, module: str | None, name: str) -> str:
    if name.startswith("dynamic_cp"):
        return (
            f"--{option} {name} is a name and takes no options: give the class, "
            f"--{option} lightning_dcp.DynamicCPStrategy --{option}.max_seqlen_per_dp_cp_rank 4096"
        )
    modules = [module] if module else ["lightning_dcp", "lightning.pytorch.callbacks"]
    names = {known: where for where in modules for known in dir(sys.modules.get(where))}
    near = [f"{names[one]}.{one}" for one in get_close_matches(name, names)]
    where = f"{module} has no {name}" if module else f"there is no class {name}"
    return f"{f'--{option}: ' if option else ''}{where}{_did_you_mean(near)}"


def _wrong_value(option: str, expected: list[tuple[str, str]], found: str) -> str:
    choices = [str(one) for _, values in expected if values for one in ast.literal_eval(values)]
    kinds = [name.rpartition(".")[2] for name, _ in dict.fromkeys(expected) if name]
    kinds = [kind for kind in kinds if kind != "NoneType"]
    if choices:
        # A class can be given as text: it is no kind of these values.
        kinds = [f"one of {', '.join(choices)}"]
    found = found if len(found) < 80 else f"{found[:77]}..."
    if found.startswith("{'class_path'"):
        return f"--{option} is a class there: give a config of fit as --model FILE"
    near = get_close_matches(found, choices)
    return f"--{option}: expected {' or '.join(kinds)}, found {found}{_did_you_mean(near)}"


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Known names near to this one, or to the longest beginning of it that has some."""
    known, parts = set(known), name.split(".")
    for end in range(len(parts), 0, -1):
        # By the last part alone: a long path would make all names in it alike.
        parent, part, rest = ".".join(parts[: end - 1]), parts[end - 1], parts[end:]
        beside = {one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent}
        near = get_close_matches(part, beside, n=2, cutoff=0.7)
        near += sorted(one for one in beside if one.startswith(part) and one not in near)
        if near and part not in beside:
            begins = [".".join([*parts[: end - 1], one]) for one in near]
            whole = [".".join([one, *rest]) for one in begins]
            return [one for one in whole if one in known] or begins
    return []


def _did_you_mean(near: list[str], dashes: str = "") -> str:
    return f"; did you mean {' or '.join(f'{dashes}{one}' for one in near[:2])}?" if near else ""


def _names_of(cls: Any) -> Iterator[str]:
    """The options of a class, those of the dataclasses in it included, dotted."""
    for name, hint in get_type_hints(cls.__init__).items():
        yield name
        for kind in (hint, *get_args(hint)):
            if is_dataclass(kind):
                yield from (f"{name}.{inner}" for inner in _names_of(kind))


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return object
