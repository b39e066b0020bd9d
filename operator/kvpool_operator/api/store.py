"""`spec.store`: the Mooncake master, run by the operator or by somebody else."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvpool_operator.api.model import AS_SET, Distinct, Int32, Section
from kvpool_operator.api.placement import Resources
from kvpool_operator.api.quantity import Duration

_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
DEFAULT_LEASE_TTL = 30_000
"""Milliseconds. Mooncake's own default is 10 s; a load that outlives the lease is thrown away (error -707)."""


class HighAvailability(StrEnum):
    """How several masters agree on one leader."""

    NONE = "None"
    ETCD = "Etcd"


class Etcd(Section):
    """An etcd that the masters elect their leader in and replicate the index through."""

    endpoints: Annotated[
        tuple[
            Annotated[str, Field(max_length=253, pattern=rf"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?:{_PORT}$")],
            ...,
        ],
        Field(min_length=1, max_length=9),
        AS_SET,
        Distinct,
    ]
    """`host:port` of each member. Mooncake speaks plain HTTP to it: keep it inside the cluster's network."""


class ManagedStore(Section):
    """Masters that the operator runs."""

    replicas: Annotated[Int32, Field(ge=1, le=5)] = 1
    """Masters. More than one needs `ha: Etcd`."""

    ha: HighAvailability = HighAvailability.NONE
    """None: a restart of the master loses the index, so every key. Etcd: leader election, and a replicated log that
    keeps it."""

    etcd: Etcd | None = None
    """The etcd of `ha: Etcd`."""

    resources: Resources = Field(default_factory=Resources)
    """CPU and memory of a master. It needs about 1 kB of memory per key."""

    eviction_high_watermark: Annotated[Int32, Field(ge=50, le=99)] = 90
    """Percent of the pool's memory in use at which the master begins to evict."""

    lease_ttl: Duration = Field(default=DEFAULT_LEASE_TTL, alias="leaseTTL")
    """For how long what a lookup saw cannot be evicted. No shorter than `cache.loadTimeout`: what outlives its lease is
    thrown away. Longer leases hold up eviction in a full pool."""


class ExternalStore(Section):
    """A master that somebody else runs. The operator neither changes nor restarts it."""

    master_address: Annotated[
        str,
        Field(
            max_length=259,
            pattern=rf"^([a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?|\[[0-9a-fA-F:.]+\]):{_PORT}$",
        ),
    ]
    """`host:port` of its RPC."""

    lease_ttl: Duration = Field(default=10_000, alias="leaseTTL")
    """What it was started with as `--default_kv_lease_ttl` (Mooncake's default is 10 s)."""


class StoreSpec(Section):
    """The Mooncake master: managed or external, one of the two; managed with its defaults where neither is written."""

    managed: ManagedStore | None = None
    """Masters that the operator runs."""

    external: ExternalStore | None = None
    """A master that somebody else runs."""

    @property
    def run_by_us(self) -> ManagedStore | None:
        """The managed store with its defaults, None for an external one."""
        return None if self.external else self.managed or ManagedStore()

    @property
    def lease_ttl(self) -> int:
        """Milliseconds for which a lookup's findings are good."""
        return self.external.lease_ttl if self.external else (self.managed or ManagedStore()).lease_ttl
