"""Sizes and durations as a custom resource spells them: `64Gi`, `500m` of a CPU, `1m30s`, `25%`.

Promises: one grammar per kind, as a pattern for the definition and as a parser here, and whatever a printer writes its
parser reads back as the same value. Sizes are whole numbers, as bytes or with a Kubernetes suffix; a duration always
names its unit. Refuses fractions of a byte, and to guess.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer

_BINARY: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_DECIMAL: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_MILLISECONDS: Final = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}

SIZE_PATTERN: Final = r"^[0-9]{1,15}([KMGTP]i|[kMGTP])?$"
CPU_PATTERN: Final = r"^([0-9]{1,4}(\.[0-9]{1,3})?|[0-9]{1,7}m)$"
DURATION_PATTERN: Final = r"^([0-9]{1,5}h)?([0-9]{1,6}m)?([0-9]{1,7}s)?([0-9]{1,9}ms)?$"
PERCENT_PATTERN: Final = r"^([1-9][0-9]?|100)%$"

LARGEST_SIZE: Final = 1 << 46
"""64 TiB, more than any node has; sums of it stay far inside 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """What a type looks like in a definition where its Python type does not say it; read by the generator.

    Compared by identity, since `typing` wants what annotates a type to be hashable.
    """

    schema: dict[str, Any]


def parse_size(value: object) -> int:
    """Bytes.

    Raises:
        ValueError: what was found and what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SIZE:
        return value
    match = re.fullmatch(r"([0-9]{1,15})([A-Za-z]{1,2})?", value) if isinstance(value, str) else None
    factor = (_BINARY | _DECIMAL | {"": 1}).get(match[2] or "") if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{value!r} is not a size; write whole bytes or a quantity such as 64Gi, 512Mi or 2G"
        )
    return int(match[1]) * factor


def print_size(size: int) -> str:
    """The shortest binary quantity of `size` bytes; a plain number where none fits."""
    for suffix, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{suffix}"
    return str(size)


def parse_cpu(value: object) -> int:
    """Thousandths of a CPU.

    Raises:
        ValueError: what was found and what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 9999:
        return value * 1000
    if isinstance(value, str) and re.fullmatch(CPU_PATTERN[1:-1], value):
        if value.endswith("m"):
            return int(value[:-1])
        whole, _, fraction = value.partition(".")
        return int(whole) * 1000 + int(fraction.ljust(3, "0"))
    raise ValueError(f"{value!r} is not an amount of CPU; write for example 2, 1.5 or 500m")


def print_cpu(thousandths: int) -> str:
    """Whole CPUs, or thousandths with the suffix m."""
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def parse_duration(value: object) -> int:
    """Milliseconds.

    Raises:
        ValueError: what was found and what is accepted.
    """
    if isinstance(value, str) and value and (match := re.fullmatch(DURATION_PATTERN[1:-1], value)):
        return sum(
            int(part.rstrip("hms")) * factor
            for part, factor in zip(match.groups(), _MILLISECONDS.values(), strict=True)
            if part
        )
    raise ValueError(f"{value!r} is not a duration; write a string such as 10s, 500ms or 1m30s")


def print_duration(milliseconds: int) -> str:
    """Whole hours, minutes, seconds and milliseconds."""
    text, left = "", milliseconds
    for unit, factor in _MILLISECONDS.items():
        if left >= factor:
            text += f"{left // factor}{unit}"
            left %= factor
    return text or "0s"


def parse_amount(value: object) -> int | str:
    """A count, or a share such as `25%`, as it was written.

    Raises:
        ValueError: what was found and what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 10_000:
        return value
    if isinstance(value, str) and re.fullmatch(PERCENT_PATTERN[1:-1], value):
        return value
    raise ValueError(f"{value!r} is neither a number from 1 to 10000 nor a share from 1% to 100%")


def _int_or_string(pattern: str, *, least: int, most: int) -> Wire:
    return Wire(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": least,
            "maximum": most,
            "pattern": pattern,
            "maxLength": 20,
        }
    )


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(print_size, return_type=str),
    _int_or_string(SIZE_PATTERN, least=0, most=LARGEST_SIZE),
]
"""Bytes."""

Cpu = Annotated[
    int,
    BeforeValidator(parse_cpu),
    PlainSerializer(print_cpu, return_type=str),
    _int_or_string(CPU_PATTERN, least=0, most=9999),
]
"""Thousandths of a CPU."""

Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    PlainSerializer(print_duration, return_type=str),
    Wire({"type": "string", "minLength": 2, "maxLength": 32, "pattern": DURATION_PATTERN}),
]
"""Milliseconds."""

Amount = Annotated[
    int | str, BeforeValidator(parse_amount), _int_or_string(PERCENT_PATTERN, least=1, most=10_000)
]
"""A count or a share."""
