"""The API of kvpool.dev/v1alpha1 as typed models, and the custom resource definitions that are generated from them.

Promises: what the definitions accept the models accept, and the reverse. Refuses I/O, clocks and Kubernetes clients.
"""
