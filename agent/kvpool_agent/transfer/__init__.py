"""Transfers: chunks between an engine's blocks and the store, verified, fenced and reported.

`manager.TransferManager` is the door; one per worker session. `lookup` answers scheduler sessions.
"""
