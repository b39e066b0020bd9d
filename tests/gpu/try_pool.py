"""The agent's half of the GPU try: maps another process's device memory with the product's own pool, checks every byte.

Prints what it does; exit code 0 when every byte was right, 1 otherwise, with the first difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.pools.cuda import open_cuda_pool
from kvpool_agent.pools.device import CudaPool
from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import PoolError
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout, check_worker
from support.layouts import BLOCKS, LAYOUTS, Laid

Bytes = NDArray[np.uint8]
MARGIN = 1 << 16
RING = 256 << 20
SIZE = 2 << 30


class Failed(AssertionError):
    """A check that failed; the message says which byte."""


class Owner:
    """The other process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("owner.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.file = folder / "bytes"

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """One request, one answer."""
        if self.process.stdin is None or self.process.stdout is None:
            raise Failed("the owner has no pipes")
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"the owner died while it did {what}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def write(self, data: Bytes) -> None:
        """All bytes of the device memory."""
        data.tofile(self.file)
        self.ask("write", path=str(self.file))

    def read(self) -> Bytes:
        """The same, back."""
        self.ask("read", path=str(self.file))
        return np.fromfile(self.file, np.uint8)

    def close(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(30)


def say(text: str) -> None:
    """One line of the account."""
    print(f"test-gpu: {text}", flush=True)


def same(found: Bytes, wanted: Bytes, what: str) -> None:
    """Every byte, or the first that differs."""
    different = np.flatnonzero(found != wanted)
    if different.size:
        first = int(different[0])
        raise Failed(
            f"{what}: {different.size} bytes differ, first {first}: {found[first]} for {wanted[first]}"
        )


def declare(laid: Laid, memory: dict[str, Any]) -> tuple[WorkerLayout, list[int]]:
    """The layout with its storages side by side in the owner's memory, a margin around each."""
    worker, offsets, offset = laid.worker(), [], MARGIN
    for storage in worker.storages:
        storage.device, storage.device_uuid = pb.CUDA, memory["uuid"]
        storage.handle, storage.handle_offset = (
            bytes.fromhex(memory["handle"]),
            memory["handle_offset"] + offset,
        )
        offsets.append(offset)
        offset += storage.size + MARGIN
    return check_worker(laid.identity(), worker), offsets


def image(laid: Laid, offsets: list[int], size: int) -> Bytes:
    """The owner's whole memory when its storages hold what the reference's do."""
    whole = np.full(size, 0xEE, np.uint8)
    for storage, offset in zip(laid.storages, offsets, strict=True):
        whole[offset : offset + storage.size] = storage
    return whole


def try_layout(name: str, owner: Owner, memory: dict[str, Any], ring: SealedMemory, size: int) -> None:
    """Scatter into three blocks and gather all, comparing the whole memory each time."""
    laid = LAYOUTS[name]()
    laid.fill(seed=1)
    layout, offsets = declare(laid, memory)
    owner.write(image(laid, offsets, size))
    pool = open_cuda_pool(layout, ring.view)
    payload = ring.view[64 : 64 + layout.groups[0].payload_bytes]
    for block in (0, 3, BLOCKS - 1):
        payload[:] = np.random.default_rng(block).integers(0, 256, len(payload), np.uint8).tobytes()
        pool.scatter(0, block, payload)
        laid.write(block, bytes(payload))
        same(owner.read(), image(laid, offsets, size), f"{name}: memory after scatter into block {block}")
    for block in range(BLOCKS):
        pool.gather(0, block, payload)
        wanted = np.frombuffer(laid.read(block), np.uint8)
        same(np.frombuffer(payload, np.uint8), wanted, f"{name}: gathered block {block}")
    same(owner.read(), image(laid, offsets, size), f"{name}: memory after gather")
    pool.close()
    try:
        pool.scatter(0, 0, payload)
    except PoolError:
        pass  # that is what closed means
    else:
        raise Failed(f"{name}: a closed pool copied")
    payload.release()
    say(f"ok  {name}: {len(layout.groups[0].parts)} parts, every byte of {size} checked, neighbours included")


def try_ordering(owner: Owner, memory: dict[str, Any], ring: SealedMemory) -> None:
    """A gather behind an event sees the last of many queued fills, never an earlier one."""
    laid = LAYOUTS["all layers in one storage"]()
    layout, _ = declare(laid, memory)
    pool = open_cuda_pool(layout, ring.view)
    payload = ring.view[: layout.groups[0].payload_bytes]
    queued = owner.ask("fill_late", value=0x5A, times=200)
    ordering = pb.Ordering(cuda_event=bytes.fromhex(queued["event"]))
    give_up_at = time.monotonic() + 60
    pool.wait_ordering(ordering, give_up=lambda: time.monotonic() > give_up_at)
    pool.gather(0, 2, payload)
    same(np.frombuffer(payload, np.uint8), np.full(len(payload), 0x5A, np.uint8), "gather behind an event")
    for wrong in (pb.Ordering(), pb.Ordering(cuda_event=b"\0" * 64)):
        try:
            pool.wait_ordering(wrong, give_up=lambda: True)
        except PoolError as error:
            say(f"ok  refused: {error}")
        else:
            raise Failed(f"ordering {wrong} was taken")
    payload.release()
    pool.close()
    say(f"ok  ordering by an event of the other process (fills still running when asked: {queued['busy']})")


def try_refusals(memory: dict[str, Any], ring: SealedMemory) -> None:
    """Wrong device, wrong handle."""
    laid = LAYOUTS["all layers in one storage"]()
    layout, _ = declare(laid, memory)
    (storage,) = layout.storages
    for change in ({"device_uuid": "GPU-00000000-0000-0000-0000-000000000000"}, {"handle": b"\1" * 64}):
        wrong = replace(layout, storages=(replace(storage, **change),))
        try:
            open_cuda_pool(wrong, ring.view)
        except PoolError as error:
            say(f"ok  refused: {error}")
        else:
            raise Failed(f"{change} was taken")


def timed_layout(memory: dict[str, Any], order: str) -> WorkerLayout:
    """A pool as engines have it: 32 layers, 16 tokens, 8 heads of 128, bfloat16; 2 MiB a block."""
    layers, tokens, heads, content = 32, 16, 8, 128
    plane = tokens * heads * content * 2
    if order == "mla":
        shape, axes = [tokens, heads * content * 2], ["token", "content"]
    else:
        inner = [tokens, heads, content] if order == "nhd" else [heads, tokens, content]
        shape, axes = (
            [2, *inner],
            ["kv", *(["token", "head"] if order == "nhd" else ["head", "token"]), "content"],
        )
    blocks = (SIZE - 2 * MARGIN) // (layers * 2 * plane)
    strides = [int(np.prod(shape[axis + 1 :])) * 2 for axis in range(len(shape))]
    form = pb.TensorFormat(dtype="bfloat16", axes=axes, shape=shape)
    identity = pb.Identity(
        groups=[
            pb.Group(
                kind=pb.FULL_ATTENTION,
                block_size=tokens,
                shards_per_stage=1,
                layers=[pb.Layer(name=f"l{layer}", tensors=[form]) for layer in range(layers)],
            )
        ]
    )
    worker = pb.Worker(
        shards=[0],
        num_blocks=[blocks],
        null_blocks=[-1],
        storages=[
            pb.Storage(
                size=layers * blocks * 2 * plane,
                device=pb.CUDA,
                device_uuid=memory["uuid"],
                handle=bytes.fromhex(memory["handle"]),
                handle_offset=memory["handle_offset"],
            )
        ],
        tensors=[
            pb.Tensor(
                layer=f"l{layer}",
                offset=layer * blocks * 2 * plane,
                shape=[blocks, *shape],
                strides=[2 * plane, *strides],
            )
            for layer in range(layers)
        ],
        mode=pb.MAPPED,
    )
    return check_worker(identity, worker)


def rate(pool: CudaPool, layout: WorkerLayout, ring: SealedMemory, way: str) -> float:
    """GB/s over every slot of the ring, one thread, a synchronised copy a block."""
    size = layout.groups[0].payload_bytes
    move = pool.scatter if way == "scatter" else pool.gather
    slots = min(ring.size // size, layout.groups[0].num_blocks)
    views = [ring.view[slot * size : (slot + 1) * size] for slot in range(slots)]
    started = time.perf_counter()
    for block, view in enumerate(views):
        move(0, block, view)
    seconds = time.perf_counter() - started
    for view in views:
        view.release()
    return slots * size / seconds / 1e9


def try_speed(owner: Owner, ring: SealedMemory) -> None:
    """Times are told, not judged."""
    memory = owner.ask("allocate", size=SIZE)
    for order in ("nhd", "hnd", "mla"):
        layout = timed_layout(memory, order)
        pool = open_cuda_pool(layout, ring.view)
        rate(pool, layout, ring, "scatter")  # warms up
        rates = [f"{way} {rate(pool, layout, ring, way):.1f} GB/s" for way in ("scatter", "gather")]
        say(f"    {order}, 32 layers, {layout.groups[0].payload_bytes >> 20} MiB a block: {', '.join(rates)}")
        pool.close()


def run(folder: Path) -> None:
    """All of it."""
    started = time.monotonic()
    size = 4 << 20
    ring = SealedMemory.create("gpu-ring", RING)
    owner = Owner(folder)
    memory = owner.ask("allocate", size=size)
    say(
        f"owner: process {owner.process.pid}, {size} bytes by {memory['by']}, offset {memory['handle_offset']}"
    )
    for name in LAYOUTS:
        try_layout(name, owner, memory, ring, size)
    try_ordering(owner, memory, ring)
    try_refusals(memory, ring)
    owner.close()
    timing = Owner(folder)
    try_speed(timing, ring)
    timing.close()
    ring.close()
    say(f"ok in {time.monotonic() - started:.0f} s")


def main() -> int:
    """Entry point; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(Path(folder))
        except (Failed, PoolError) as error:
            say(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
