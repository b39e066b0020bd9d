"""What all models share: frozen, camelCase, read from objects that an API server has already pruned and defaulted.

Promises: the same JSON means the same here and behind the definition: a null is an absent field, numbers and booleans
are not guessed from strings. A field that this release does not know is ignored, since the API server prunes what its
own definition does not know and an older operator has to live beside a newer definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvpool_operator.api.quantity import Wire

GROUP: Final = "kvpool.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"


class Section(BaseModel):
    """A part of an object. Frozen; `None` means that the field is absent."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        # An API server drops nulls of fields that are not nullable before it applies defaults.
        if isinstance(value, dict):
            return {name: field for name, field in value.items() if field is not None}
        return value

    def tree(self) -> dict[str, Any]:
        """The section as JSON, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an object: where (`spec.store.managed`), and in words, what and how to mend it."""

    field: str
    message: str

    def __str__(self) -> str:
        """`field: message`."""
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidObjectError(ValueError):
    """An object that the models refuse; `problems` names every field."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def problems_of(error: ValidationError) -> tuple[Problem, ...]:
    """A validation error, field by field, in the words of the API."""
    return tuple(
        Problem(
            ".".join(str(part) for part in detail["loc"]),
            "is required" if detail["type"] == "missing" else detail["msg"].removeprefix("Value error, "),
        )
        for detail in error.errors(include_url=False)
    )


def _distinct(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(value)) != len(value):
        raise ValueError("names an entry twice")
    return value


Int32 = Annotated[int, Strict(), Wire({"format": "int32"})]
Int64 = Annotated[int, Strict(), Wire({"format": "int64"})]
Flag = Annotated[bool, Strict()]
Label = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
"""Value of a Kubernetes label."""

LABEL_KEY_PATTERN: Final = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
LONGEST_LABEL_KEY: Final = 317
LabelKey = Annotated[str, Field(min_length=1, max_length=LONGEST_LABEL_KEY, pattern=LABEL_KEY_PATTERN)]
"""Name of a Kubernetes label, with or without its prefix."""

Distinct = AfterValidator(_distinct)
"""A list without duplicates; the definition says `x-kubernetes-list-type: set`."""


def unique_by(field: str) -> AfterValidator:
    """A list whose entries differ in `field`; the definition says `x-kubernetes-list-type: map`."""

    def check(value: tuple[Any, ...]) -> tuple[Any, ...]:
        _distinct(tuple(getattr(entry, field) for entry in value))
        return value

    return AfterValidator(check)


def as_map(field: str) -> Wire:
    """A list that server-side apply merges by `field`."""
    return Wire({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]})


AS_SET: Final = Wire({"x-kubernetes-list-type": "set"})
ATOMIC: Final = Wire({"x-kubernetes-list-type": "atomic"})


class Metadata(Section):
    """What is read of an object's metadata."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace."""

    uid: str = ""
    """Identity in time; a pool that is made anew under an old name has a new one."""

    generation: Int64 = 0
    """Number of the spec."""

    deletion_timestamp: str | None = None
    """When deletion began; absent while the object lives."""
