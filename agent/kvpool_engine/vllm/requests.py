"""What the scheduler's side knows of one request: its name towards the agent, its lookup, how far it is saved.

Decides which requests are cached at all: where something beside the tokens decides the KV and is not part of the key,
the request is neither looked up nor saved (SAME_IDENTITY).
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool_engine.plan import Plan
from kvpool_engine.types import Extras, MissReason
from kvpool_wire import limits

if TYPE_CHECKING:
    from kvpool_engine.vllm.messages import LoadJob

LONGEST_ID: Final = 192
"""Bytes of vLLM's request id that are kept as they are; the agent takes names of at most 256."""


def uncacheable(request: Any) -> str:
    """Why a request is not cached; empty if it is."""
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "prompt_embeds"
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming"
    if len((request.cache_salt or "").encode()) > limits.MAX_STRING_BYTES:
        return "cache_salt"
    return ""


def wire_key(request_id: str, serial: int) -> str:
    """A name for one attempt of one request that no other attempt has."""
    raw = request_id.encode()
    name = request_id if len(raw) <= LONGEST_ID else hashlib.sha256(raw).hexdigest()
    return f"{name}#{serial}"


@dataclass(slots=True)
class Tracked:
    """One request, from its first lookup to its end."""

    request: Any
    key: str
    reason: str
    """Why it is not cached."""
    preemptions: int
    lookup: "Future[Plan] | None" = None
    asked: float = 0.0
    """When `lookup` was sent, `time.monotonic()`."""
    plan: Plan | None = None
    offered: int | None = None
    """External tokens that vLLM was told of and has not yet taken or left."""
    saved: int = 0
    """Tokens from the start that the store has, or that a save was made for."""
    prefill_end: int = 0
    """Tokens that this attempt prefills: what it generates later is not saved."""
    load: "LoadJob | None" = None
    load_failed: bool = False
    """The next lookup is a miss: what is gone would be found and missed again for ever (vLLM issue 55297)."""
    extras: Extras = field(default_factory=Extras)
    attempt: int = 0
    """How often it was computed again after a load that failed or was given up (NO_SAVE_AFTER_FAILURE)."""

    @property
    def cached(self) -> bool:
        """True when the request may be looked up and saved."""
        return not self.reason

    def begin_again(self, key: str, preemptions: int) -> str:
        """The request lost its blocks: nothing that is under way for it counts; returns the name that it had."""
        old, self.key = self.key, key
        self.preemptions = preemptions
        self.attempt += 1
        self.drop_lookup()
        self.saved = 0
        self.prefill_end = 0
        self.load = None
        return old

    def drop_lookup(self) -> None:
        """Forget what was found; the next question is a new one."""
        if self.lookup is not None:
            self.lookup.cancel()
        self.lookup = None
        self.plan = None
        self.offered = None

    def answer(
        self,
        ask: Callable[[], "Future[Plan]"],
        *,
        patience: float,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> Plan | None:
        """The lookup's plan, or None while it is under way; a plan that has outlived its lease is asked for again.

        A lookup that is under way for more than `patience` seconds is a miss (BOUNDED): a request never waits for
        longer, not even for a client that is stuck.
        """
        if self.plan is not None and self.plan.hit_length and self.plan.good_until < clock():
            self.drop_lookup()
        if self.plan is None:
            if self.lookup is None:
                self.lookup, self.asked = ask(), stopwatch()
            if not self.lookup.done():
                if stopwatch() - self.asked <= patience:
                    return None
                self.drop_lookup()
                self.plan = Plan.miss(MissReason.DEADLINE)
                return self.plan
            self.plan = self.lookup.result()
            self.lookup = None
        return self.plan
