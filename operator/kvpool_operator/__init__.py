"""kvpool's control plane.

So far its API (`api`: the typed models of the custom resources, from which the CRDs are generated) and the desired
state (`desired`: pure functions from a pool and the cluster's facts to objects). The reconciler and the chart that
runs it are not part of this release, and nothing here pretends otherwise. Never imports torch, Mooncake, the node
agent or the engine's client.
"""
