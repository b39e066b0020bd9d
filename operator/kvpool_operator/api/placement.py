"""The parts of a pod that a pool lets its user choose, and no more: no embedded pod template.

Promises: the shapes and names are Kubernetes' own, so that what people know applies. Refuses what makes no sense for a
DaemonSet (affinity to other pods) and what decides over a node (that is the operator's own setting).
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvpool_operator.api.model import ATOMIC, Int64, Label, LabelKey, Section
from kvpool_operator.api.quantity import Cpu, Size


class TolerationOperator(StrEnum):
    """How a toleration compares."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class SelectorOperator(StrEnum):
    """How a label selector compares."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeOperator(StrEnum):
    """How a node selector compares."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class Toleration(Section):
    """A taint that the agents tolerate."""

    key: LabelKey | None = None
    """Taint key; absent with operator Exists tolerates every taint."""

    operator: TolerationOperator = TolerationOperator.EQUAL
    """Exists: whatever the value. Equal: `value` is the taint's."""

    value: Label | None = None
    """Taint value; only with operator Equal."""

    effect: TaintEffect | None = None
    """Taint effect; absent means all effects."""

    toleration_seconds: Annotated[Int64, Field(ge=0)] | None = None
    """For how many seconds a NoExecute taint is tolerated; absent means for ever."""


class NodeRequirement(Section):
    """A condition on the labels of a node."""

    key: LabelKey
    """Label of the node."""

    operator: NodeOperator
    """In and NotIn compare with `values`; Gt and Lt with the one whole number in it; the others take none."""

    values: Annotated[tuple[Label, ...], Field(max_length=64), ATOMIC] = ()
    """What the label is compared with."""


class NodeTerm(Section):
    """All requirements hold."""

    match_expressions: Annotated[tuple[NodeRequirement, ...], Field(min_length=1, max_length=16), ATOMIC]
    """Requirements, all of which hold."""


class RequiredNodes(Section):
    """Nodes on which agents may run."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=8), ATOMIC]
    """Terms, one of which holds."""


class NodeAffinity(Section):
    """Which nodes agents may run on, by their labels."""

    required_during_scheduling_ignored_during_execution: RequiredNodes
    """Agents run on nodes that one of the terms matches."""


class Affinity(Section):
    """Affinity of the agents. A DaemonSet knows affinity to nodes only."""

    node_affinity: NodeAffinity
    """Which nodes agents may run on, by their labels."""


class LabelRequirement(Section):
    """A condition on the labels of a namespace."""

    key: LabelKey
    """Label of the namespace."""

    operator: SelectorOperator
    """In and NotIn compare with `values`; the others take none."""

    values: Annotated[tuple[Label, ...], Field(max_length=64), ATOMIC] = ()
    """What the label is compared with."""


class LabelSelector(Section):
    """Namespaces, by their labels. An empty selector means all of them."""

    match_labels: Annotated[dict[str, Label], Field(max_length=16)] = Field(default_factory=dict)
    """Labels that the namespace has, all of them."""

    match_expressions: Annotated[tuple[LabelRequirement, ...], Field(max_length=16), ATOMIC] = ()
    """Requirements, all of which hold."""


class Amounts(Section):
    """CPU and memory."""

    cpu: Cpu | None = None
    """CPUs, such as `2` or `500m`."""

    memory: Size | None = None
    """Bytes, such as `8Gi`."""


class Resources(Section):
    """What a container asks for and may use at most."""

    requests: Amounts = Field(default_factory=Amounts)
    """What the scheduler sets aside. Absent amounts are computed from the pool."""

    limits: Amounts = Field(default_factory=Amounts)
    """What the container may use at most. Absent amounts are not limited."""
