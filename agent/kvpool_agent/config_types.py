"""Sizes and durations as people write them: `64Gi`, `10s`, `1m30s`.

Promises that whatever `print_*` gives, `parse_*` takes back as the same value. Sizes are Kubernetes quantities in
whole bytes; durations are Go's strings without fractions of a millisecond. Refuses bare numbers for durations: nobody
can tell seconds from milliseconds.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Final

from pydantic import BeforeValidator, PlainSerializer

_BINARY: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_DECIMAL: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_QUANTITY: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<suffix>[KMGTP]i|[kMGTP])?")
_UNITS: Final = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_DURATION: Final = re.compile(
    r"(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?!s))?(?:(?P<s>\d+(?:\.\d{1,3})?)s)?(?:(?P<ms>\d+)ms)?"
)


def parse_size(value: object) -> int:
    """Bytes of a Kubernetes quantity.

    Raises:
        ValueError: what was found and what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a quantity such as 64Gi, 512Mi or 2G")
    try:
        amount = Decimal(match["number"]) * (_BINARY | _DECIMAL | {"": 1})[match["suffix"] or ""]
    except InvalidOperation as error:
        raise ValueError(f"{value!r} is not a size: its number is too long") from error
    if amount != int(amount):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(amount)


def print_size(size: int) -> str:
    """The shortest binary quantity of `size` bytes."""
    for suffix, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{suffix}"
    return str(size)


def parse_duration(value: object) -> float:
    """Seconds of a duration string.

    Raises:
        ValueError: what was found and what is accepted.
    """
    text = value.strip() if isinstance(value, str) else ""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"{value!r} is not a duration; write a string such as 10s, 500ms or 1m30s")
    milliseconds = sum(Decimal(match[unit] or 0) * factor for unit, factor in _UNITS.items())
    return float(milliseconds / 1000)


def print_duration(seconds: float) -> str:
    """The duration as a string of whole hours, minutes, seconds and milliseconds."""
    left = round(seconds * 1000)
    text = ""
    for unit, factor in _UNITS.items():
        if left >= factor:
            text += f"{left // factor}{unit}"
            left %= factor
    return text or "0s"


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(print_size, return_type=str)]
"""Bytes."""

Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(print_duration, return_type=str)]
"""Seconds."""
