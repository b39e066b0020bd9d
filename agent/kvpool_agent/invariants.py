"""The invariants by name, one sentence each. They outrank every performance goal.

Each is enforced where a docstring carries its name and guarded by tests that bear it. This module only names them.
"""

from enum import StrEnum


class Invariant(StrEnum):
    """What has to be true at all times, whatever dies in between."""

    PRUNE_ONCE = "The EAGLE prune happens in lookup, once; neither a load mask nor a resume prunes."
    LOAD_SUBSET_OF_VERIFIED = (
        "Every chunk that a plan loads was seen present under the very key that is read."
    )
    MASK_COVERS_HIT = (
        "A load mask has exactly one entry per block that the hit covers; the loader recomputes it."
    )
    LOADED_OR_REPORTED = (
        "When a load ends, every chunk holds its own key's bytes, verified, or is reported failed."
    )
    FENCED = (
        "After a release, a detach or an engine's death no byte of its blocks is written or read any more."
    )
    WHOLE_OR_ABSENT = (
        "A key becomes visible only with all its bytes; a save that ends early leaves nothing to find."
    )
    NO_SAVE_AFTER_FAILURE = (
        "Nothing at or past a failed chunk is saved for its request, on any rank, before its next attempt."
    )
    SAME_IDENTITY = (
        "Engines of different identities live in disjoint key spaces and never read each other's chunks."
    )
    BOUNDED = "Every call has a deadline, every queue a limit; nobody waits longer than the deadline it gave."
    CRASH_ONLY = "Any process may be killed at any time; restart converges by itself and nothing leaks."
