"""`kvpool demo`: the product's main job on this machine, on real parts, every byte checked.

Starts a Mooncake master, two node agents and two engines as processes of their own and plays one story with them. It
knows the agent by its command line and its sockets, as a user does, and the engine side by the client library.
"""
