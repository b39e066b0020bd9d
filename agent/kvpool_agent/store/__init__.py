"""The store behind a small protocol: Mooncake in separate processes, or a fake in memory.

`protocol` says what may be asked; `mooncake_store.MooncakeStore` and `memory.MemoryStore` answer. Of this package
only `mooncake.py`, which runs in worker processes, imports Mooncake.
"""
