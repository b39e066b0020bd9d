"""The engine's side of kvpool: a client library for schedulers and workers.

`kvpool_engine.client` is synchronous, `kvpool_engine.aio` asynchronous; `tensors` declares an engine's KV, `shm`
allocates memory that an agent can map. Needs grpcio, protobuf, numpy and opentelemetry-api; torch only where torch
tensors come in. Never imports the agent.
"""
