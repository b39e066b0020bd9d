"""The engines' paged KV memory, as the agent sees it: mapped pools that copy blocks to and from a session's ring.

`pool` says what a pool is, `cpu` and `device` are the two that exist, `memory` makes and maps sealed memory files, and
`cuda` alone imports the CUDA driver. Nothing here knows keys, the store or RPC.
"""
