"""One process of the demo's engines: its scheduler, or one of its ranks.

    python -m kvpool_demo.engine scheduler SOCKET_DIR ENGINE_ID
    python -m kvpool_demo.engine rank SOCKET_DIR ENGINE_ID RANK mapped|copy

Reads one JSON object a line on standard input, answers each with one line on standard output, ends at end of file.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from opentelemetry import trace

from kvpool_demo import model
from kvpool_demo.content import HASH_BYTES, Prompt
from kvpool_engine.client import SchedulerClient, WorkerClient
from kvpool_engine.plan import Plan
from kvpool_engine.types import ChunkFailure, FailReason, Mode, TransferResult

Answer = dict[str, Any]
LOAD_SECONDS = 5.0
SAVE_SECONDS = 20.0


def prompt_of(call: Answer) -> Prompt:
    """The prompt that a call names."""
    return Prompt(call["prompt"], tuple((name, count) for name, count in call["parts"]))


def context_of(call: Answer) -> trace.SpanContext:
    """The request's trace, begun by the demo, as an engine's front end would hand it on."""
    return trace.SpanContext(
        int(call["trace"], 16), int(call["span"], 16), is_remote=True, trace_flags=trace.TraceFlags(1)
    )


class Engine(Protocol):
    """What serves calls."""

    def calls(self) -> dict[str, Callable[[Answer], Answer]]:
        """By name."""
        ...

    def close(self) -> None:
        """Detach."""
        ...


class Scheduler:
    """Looks prompts up and joins what the ranks report."""

    def __init__(self, socket_dir: str, engine_id: str) -> None:
        self._client = SchedulerClient(socket_dir, model.identity(), engine_id)
        self._client.connect()

    def calls(self) -> dict[str, Callable[[Answer], Answer]]:
        """By name."""
        return {"store": self._store, "lookup": self._lookup, "resume": self._resume}

    def close(self) -> None:
        """Detach."""
        self._client.close()

    def _store(self, _: Answer) -> Answer:
        """Whether the node's share of the pool is mounted; an agent serves without it, as it does without a master."""
        status = self._client.status(deadline=2.0)
        return {"mounted": status.store_reachable and status.segment_bytes > 0}

    def _lookup(self, call: Answer) -> Answer:
        prompt = prompt_of(call)
        with trace.use_span(trace.NonRecordingSpan(context_of(call))):
            # A hit on the whole prompt is of no use: one token has to be computed.
            plan = self._client.lookup(
                call["request"], prompt.hashes(model.BLOCK_TOKENS), prompt.tokens - 1, deadline=2.0
            )
        return {
            "plan": plan.to_bytes().hex(),
            "hit": plan.hit_length,
            "pruned": plan.pruned_tokens,
            "miss": plan.miss_reason.value,
            "keys": plan.probed_keys,
            "chunks": [int(mask.sum()) for mask in plan.masks],
        }

    def _resume(self, call: Answer) -> Answer:
        failed = [
            ChunkFailure(item["group"], item["chunk"], FailReason(item["reason"])) for item in call["failed"]
        ]
        plan = Plan.from_bytes(bytes.fromhex(call["plan"]))
        return {"resume": self._client.resume(call["request"], plan, call["start"], failed)}


class Rank:
    """Computes, saves, loads and checks one rank's blocks."""

    def __init__(self, socket_dir: str, engine_id: str, rank: int, mode: Mode) -> None:
        # torch takes two seconds to import, and a scheduler needs none of it.
        from kvpool_demo.kv import RankPool  # noqa: PLC0415

        identity = model.identity()
        self._pool = RankPool(identity, rank=rank, mode=mode)
        self._client = WorkerClient(socket_dir, identity, engine_id, self._pool.declaration, mode=mode)
        self._client.connect()

    def calls(self) -> dict[str, Callable[[Answer], Answer]]:
        """By name."""
        return {
            "mode": lambda _: {"mode": (self._client.mode or Mode.AUTO).name.lower()},
            "poison": self._poison,
            "compute": self._compute,
            "save": self._save,
            "load": self._load,
            "check": self._check,
        }

    def close(self) -> None:
        """Detach."""
        self._client.close()

    def _poison(self, _: Answer) -> Answer:
        self._pool.poison()
        return {}

    def _compute(self, call: Answer) -> Answer:
        units = prompt_of(call).hashes(model.BLOCK_TOKENS)
        first = call["start"] // model.BLOCK_TOKENS
        for group, blocks in enumerate(call["blocks"]):
            self._pool.compute(group, units[first : first + len(blocks)], blocks)
        return {}

    def _save(self, call: Answer) -> Answer:
        prompt = prompt_of(call)
        units = prompt.hashes(model.BLOCK_TOKENS)
        begun = time.perf_counter()
        with trace.use_span(trace.NonRecordingSpan(context_of(call))):
            transfer = self._client.save(
                call["request"],
                units,
                call["start"],
                len(units) * model.BLOCK_TOKENS,
                call["blocks"],
                num_prompt_tokens=prompt.tokens,
                deadline=SAVE_SECONDS,
            )
            result = transfer.wait(SAVE_SECONDS)
        return _account(result, time.perf_counter() - begun)

    def _load(self, call: Answer) -> Answer:
        plan = Plan.from_bytes(bytes.fromhex(call["plan"]))
        begun = time.perf_counter()
        with trace.use_span(trace.NonRecordingSpan(context_of(call))):
            transfer = self._client.load(
                call["request"], plan, call["start"], call["blocks"], deadline=LOAD_SECONDS
            )
            result = transfer.wait(LOAD_SECONDS)
        return _account(result, time.perf_counter() - begun)

    def _check(self, call: Answer) -> Answer:
        held = [
            {int(block): bytes.fromhex(unit_hash) for block, unit_hash in blocks.items()}
            for blocks in call["held"]
        ]
        return asdict(self._pool.check(held, call["unsure"]))


def _account(result: TransferResult, seconds: float) -> Answer:
    return {
        "good": result.good,
        "already": result.already_stored,
        "bytes": result.bytes,
        "failed": [{"group": f.group, "chunk": f.chunk, "reason": int(f.reason)} for f in result.failed],
        "resume": result.resume_length,
        "error": result.error,
        "skipped": result.skipped,
        "seconds": seconds,
    }


def serve(engine: Engine) -> None:
    """Answer calls until end of file."""
    calls = engine.calls()
    for line in sys.stdin:
        call = json.loads(line)
        answer = calls[call["call"]](call)
        print(json.dumps({"answer": answer}), flush=True)


def main(arguments: list[str]) -> int:
    """Entry point."""
    role, socket_dir, engine_id, *rest = arguments
    engine: Engine
    if role == "scheduler":
        engine = Scheduler(socket_dir, engine_id)
    else:
        engine = Rank(socket_dir, engine_id, int(rest[0]), Mode[rest[1].upper()])
    print(json.dumps({"answer": {"hash_bytes": HASH_BYTES}}), flush=True)
    try:
        serve(engine)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
