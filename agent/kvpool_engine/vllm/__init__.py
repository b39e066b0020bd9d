"""The vLLM connector: `kv_connector: KVPoolConnector`, `kv_connector_module_path: kvpool_engine.vllm`.

Importing this package imports no vLLM; asking it for `KVPoolConnector` does, and checks the version first. The modules
without vLLM in them (`settings`, `pins`, `requests`) decide; `scheduler` and `worker` act; `compat` is the
one place that names what of vLLM is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_engine.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]


def __getattr__(name: str) -> object:
    if name == "KVPoolConnector":
        from kvpool_engine.vllm.connector import KVPoolConnector  # noqa: PLC0415 - brings vLLM in

        return KVPoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
