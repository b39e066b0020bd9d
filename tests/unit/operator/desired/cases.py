"""The pools of the golden files: small, RDMA, highly available, external, and with every field set."""

from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired.facts import Facts
from unit.operator.desired.builders import ALL_MONITORS, facts, generous, pool

RDMA = {
    "transport": {"protocol": "RDMA", "devices": ["mlx5_0", "mlx5_1"], "gidIndex": 3},
    "segment": {"size": "256Gi", "ringSize": "512Mi"},
    "agent": {
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "runtimeClassName": "nvidia",
    },
}
ETCD = {
    "store": {
        "managed": {
            "replicas": 3,
            "ha": "Etcd",
            "etcd": {"endpoints": ["etcd-0.etcd:2379", "etcd-1.etcd:2379"]},
            "leaseTTL": "1m",
            "evictionHighWatermark": 85,
        }
    }
}
EXTERNAL = {"store": {"external": {"masterAddress": "mooncake.store.svc:50051"}}}
EVERYTHING = {
    "version": "0.1.0",
    "store": {
        "managed": {"resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}}
    },
    "transport": {
        "protocol": "RDMA",
        "fallback": "Allow",
        "resourceName": "rdma/hca",
        "hostNetwork": True,
    },
    "segment": {"size": "512Gi", "hugepages": "2Mi"},
    "agent": {
        "image": "kvpool/agent:try",
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                    ]
                }
            }
        },
        "resources": {"requests": {"cpu": "4"}, "limits": {"cpu": "8"}},
        "priorityClassName": "kvpool-agent",
        "drain": {"timeout": "20s", "onTimeout": "Hold"},
    },
    "disruption": {"maxUnavailable": "10%", "maxCacheLossPercent": 5},
    "compatibility": {"engineVersion": "Ignore", "require": {"model": "org/model-8b"}},
    "cache": {"integrity": "Sampled", "retentionInterval": 4096, "loadTimeout": "5s"},
    "engines": {
        "namespaces": {"matchLabels": {"team": "chat"}},
        "mode": "Copy",
        "kvTransferConfig": {"lookupTimeout": "200ms", "saveTimeout": "30s"},
    },
    "telemetry": {
        "otlp": {
            "endpoint": "http://collector.observability.svc:4318",
            "protocol": "HTTP",
            "sampling": "0.05",
        },
        "metrics": {"port": 9500, "serviceMonitor": {"labels": {"release": "prometheus"}, "interval": "1m"}},
    },
    "networkPolicy": "AgentsAndEngines",
    "deletionPolicy": "Delete",
}

CASES: dict[str, tuple[KVStorePool, Facts]] = {
    "tcp": (pool(), facts(nodes=("node-1", "node-0"))),
    "rdma": (pool(RDMA), facts(monitors=ALL_MONITORS)),
    "etcd": (pool(ETCD), facts()),
    "external": (pool(EXTERNAL), facts(monitors=ALL_MONITORS)),
    "everything": (pool(EVERYTHING), facts(settings=generous(), monitors=ALL_MONITORS)),
}
