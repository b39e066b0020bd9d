"""Metadata that all children share: whose they are, and what they were made from.

Promises: every child has the pool as its controller, so that it goes with the pool and nobody else's object is taken
for one; hashes do not depend on the order of keys.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvpool_operator.api.model import API_VERSION
from kvpool_operator.api.pool import KIND, KVStorePool
from kvpool_operator.desired import names
from kvpool_operator.desired.names import Component

Manifest = dict[str, Any]

PLACEMENT: Final = frozenset({"nodeSelector", "affinity", "tolerations"})
"""Fields of a pod that decide where it runs and not what it is: growing a pool restarts nobody."""


def metadata(
    pool: KVStorePool, name: str, component: Component, labels: Mapping[str, str] | None = None
) -> Manifest:
    """Metadata of a child."""
    return {
        "name": name,
        "namespace": pool.metadata.namespace,
        "labels": {**(labels or {}), **names.labels(pool, component)},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": pool.metadata.name,
                "uid": pool.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def is_owned(live: Mapping[str, Any], pool: KVStorePool) -> bool:
    """Whether an object that exists is this pool's own. One that is not is never changed, whatever its name."""
    owners = live.get("metadata", {}).get("ownerReferences") or ()
    return any(one.get("controller") and one.get("uid") == pool.metadata.uid for one in owners)


def revision(pod: Mapping[str, Any]) -> str:
    """What a pod is made from, in 16 hex digits, its placement left out."""
    what = {name: value for name, value in pod.items() if name not in PLACEMENT}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def template(pool: KVStorePool, component: Component, pod: Mapping[str, Any]) -> Manifest:
    """A pod template that carries the revision of its pod."""
    return {
        "metadata": {
            "labels": names.labels(pool, component),
            "annotations": {names.REVISION: revision(pod)},
        },
        "spec": dict(pod),
    }
