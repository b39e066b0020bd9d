"""What a pool may ask for and not get here: rules that depend on the operator's settings and the pool's release.

Promises: every reason at once, each with its field and how to mend it; nothing that is refused is ever rendered.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool_operator.api.conditions import Reason
from kvpool_operator.api.pool import Fallback, Hugepages, KVStorePool
from kvpool_operator.desired.facts import Facts, HostNetwork
from kvpool_operator.desired.releases import Feature


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that the pool may not have."""

    reason: Reason
    field: str
    message: str

    def __str__(self) -> str:
        """`field: message`."""
        return f"{self.field}: {self.message}"


def refusals(pool: KVStorePool, facts: Facts) -> tuple[Refusal, ...]:
    """Everything that the pool asks for and may not have."""
    return (*_host_network(pool, facts), *_image(pool, facts), *_features(pool, facts))


def _host_network(pool: KVStorePool, facts: Facts) -> Iterator[Refusal]:
    if pool.spec.transport.host_network and facts.settings.host_network is not HostNetwork.PERMITTED:
        yield Refusal(
            Reason.HOST_NETWORK_FORBIDDEN,
            "spec.transport.hostNetwork",
            "this operator does not permit it: leave it out, or ask whoever installed the operator to set"
            " `pools.hostNetwork: Permitted`",
        )


def _image(pool: KVStorePool, facts: Facts) -> Iterator[Refusal]:
    image, allowed = pool.spec.agent.image, facts.settings.allowed_repositories
    if image is not None and not is_allowed(image, allowed):
        yield Refusal(
            Reason.IMAGE_NOT_ALLOWED,
            "spec.agent.image",
            f"{repository(image)} is not one of the repositories that this operator allows"
            f" ({', '.join(allowed) or 'none'}): leave it out for the release's own image",
        )


def repository(image: str) -> str:
    """The repository of an image reference, without digest and tag."""
    name = image.partition("@")[0]
    head, colon, tail = name.rpartition(":")
    return head if colon and "/" not in tail else name


def is_allowed(image: str, allowed: tuple[str, ...]) -> bool:
    """Whether an image comes from one of the repositories; an entry that ends in `/` allows everything below it."""
    name = repository(image)
    # A path that climbs is no repository, whatever it begins with.
    if ".." in name.split("/"):
        return False
    return any(name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in allowed)


def _features(pool: KVStorePool, facts: Facts) -> Iterator[Refusal]:
    spec = pool.spec
    asked = (
        (Feature.HUGEPAGES, spec.segment.hugepages is not Hugepages.NONE, "spec.segment.hugepages"),
        (Feature.FALLBACK, spec.transport.fallback is not Fallback.DENY, "spec.transport.fallback"),
        (Feature.REQUIRED_IDENTITY, spec.compatibility.require is not None, "spec.compatibility.require"),
    )
    for feature, wanted, field in asked:
        if wanted and feature not in facts.release.features:
            yield Refusal(
                Reason.RELEASE_LACKS_FEATURE,
                field,
                f"agents of release {facts.release.name} cannot do this: leave it out, or set spec.version to a release"
                f" with the feature {feature}",
            )
