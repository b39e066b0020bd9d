"""How long a prefix is cached, and which chunks a load must fetch for it. Pure; see `KVCoordinator`."""

from kvpool_agent.coordinator.coordinator import KVCoordinator, Masks, Presence, check_plan
from kvpool_agent.coordinator.plan import GroupPlan, Plan, PlanError
from kvpool_agent.coordinator.specs import GroupKind, GroupSpec, SpecError
from kvpool_agent.coordinator.steps import LookupStateError, LookupSteps

__all__ = [
    "GroupKind",
    "GroupPlan",
    "GroupSpec",
    "KVCoordinator",
    "LookupStateError",
    "LookupSteps",
    "Masks",
    "Plan",
    "PlanError",
    "Presence",
    "SpecError",
    "check_plan",
]
