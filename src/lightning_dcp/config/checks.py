"""Checks of single values that many configurations share, in one wording."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral


def check_at_least(name: str, value: object, minimum: int = 1) -> int:
    """``value`` as a Python int of ``minimum`` or more.

    Args:
        name: The option as the user wrote it, for the error.
        value: What was given; NumPy's integers count as ints.
        minimum: The least that is allowed.

    Raises:
        TypeError: It is no integer; a bool is none either.
        ValueError: It is below the minimum.
    """
    # To Python a bool is an integer: True would count as 1.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; give an int of {minimum} or more"
        )
    if value < minimum:
        raise ValueError(f"{name}={value} must be {minimum} or more")
    return int(value)


def check_above_zero(**options: float) -> None:
    """Raises a ValueError for the first option that is not a finite number above 0."""
    for name, value in options.items():
        # Not "value <= 0", which lets NaN pass.
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and above 0.")


def check_not_negative(**options: float) -> None:
    """Raises a ValueError for the first option that is negative or not finite."""
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and not negative.")


def check_one_of[T](name: str, value: T, choices: Collection[T]) -> T:
    """``value`` if it is one of the choices.

    Raises:
        ValueError: It is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(str, choices))}")
    return value
