"""What a pool should consist of: pure functions from a pool and what is known of the cluster to Kubernetes objects.

Promises: the same input gives the same objects; one file per child; `None` means that a child is not wanted. Refuses
I/O, clocks and randomness, so that every object here can be compared with a golden file.
"""
