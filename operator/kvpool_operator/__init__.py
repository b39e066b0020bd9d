"""kvpool's control plane.

This package keeps the control plane's name and its import contracts: whatever is added here never imports
torch, Mooncake, the node agent or the engine's client. The operator itself is not part of this release; it has
no modules yet, and nothing here pretends otherwise.
"""
