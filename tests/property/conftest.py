"""Hypothesis for this folder: the same examples on every run, few enough for a slow machine.

KVPOOL_HYPOTHESIS_EXAMPLES raises the number of examples of every property (the runs stay reproducible); raise pytest's
--timeout with it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvpool",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("KVPOOL_HYPOTHESIS_EXAMPLES", "70")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
if "KVPOOL_PROPERTIES" not in os.environ:  # a profile asked for by name wins
    settings.load_profile("kvpool")
