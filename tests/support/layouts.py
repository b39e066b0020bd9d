"""KV layouts as engines have them, with the obvious way to read and write a block: one NumPy view per declared tensor.

`LAYOUTS` names one builder per kind. A `Laid` holds real storages, the identity and the worker that declare them, and
the reference against which copies are compared. It refuses to be clever: no fusing, no widening, no shared code with
the product's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool_wire import agent_pb2 as pb

Bytes = NDArray[np.uint8]
Array = NDArray
BLOCKS = 7
LAYERS, TOKENS, HEADS, CONTENT = 3, 4, 2, 6


@dataclass(frozen=True, slots=True)
class View:
    """One declared tensor: a view into storage number `storage`, with its block axis and the meaning of the others."""

    array: Array
    storage: int
    block_axis: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """An engine's memory and how it is declared: one full-attention group, one tensor list per layer."""

    storages: list[Bytes]
    layers: list[list[View]]

    def identity(self) -> pb.Identity:
        """What the layout's formats say."""
        layers = [
            pb.Layer(name=f"layer.{number}", tensors=[_format(view) for view in views])
            for number, views in enumerate(self.layers)
        ]
        group = pb.Group(kind=pb.FULL_ATTENTION, block_size=TOKENS, layers=layers, shards_per_stage=1)
        return pb.Identity(
            model="m",
            fingerprint="f",
            engine="e 1",
            hash_algorithm="sha256",
            hash_block_size=TOKENS,
            scheduler_block_size=TOKENS,
            groups=[group],
        )

    def worker(self) -> pb.Worker:
        """What a rank of that engine declares."""
        return pb.Worker(
            shards=[0],
            num_blocks=[BLOCKS],
            null_blocks=[-1],
            storages=[pb.Storage(size=storage.nbytes, device=pb.CPU) for storage in self.storages],
            tensors=[
                self._declare(f"layer.{number}", part, view)
                for number, views in enumerate(self.layers)
                for part, view in enumerate(views)
            ],
            mode=pb.MAPPED,
        )

    def _declare(self, layer: str, part: int, view: View) -> pb.Tensor:
        return pb.Tensor(
            group=0,
            layer=layer,
            part=part,
            storage=view.storage,
            offset=view.array.ctypes.data - self.storages[view.storage].ctypes.data,
            shape=view.array.shape,
            strides=view.array.strides,
            block_axis=view.block_axis,
        )

    def read(self, block: int) -> bytes:
        """A block's payload: layer by layer, tensor by tensor, each dense in the order of its axes."""
        views = [view for views in self.layers for view in views]
        return b"".join(np.take(view.array, block, axis=view.block_axis).tobytes() for view in views)

    def write(self, block: int, payload: bytes) -> None:
        """The other way round."""
        for view in (view for views in self.layers for view in views):
            target = np.moveaxis(view.array, view.block_axis, 0)[block]
            target[...] = np.frombuffer(payload, target.dtype, target.size).reshape(target.shape)
            payload = payload[target.nbytes :]
        assert not payload

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, padding included."""
        generator = np.random.default_rng(seed)
        for storage in self.storages:
            storage[:] = generator.integers(0, 256, storage.size, np.uint8)


def _format(view: View) -> pb.TensorFormat:
    shape = [extent for axis, extent in enumerate(view.array.shape) if axis != view.block_axis]
    return pb.TensorFormat(dtype=view.array.dtype.name, axes=view.axes, shape=shape)


def _storage(shape: Sequence[int], dtype: str = "float16") -> tuple[Bytes, Array]:
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    return raw, raw.view(dtype).reshape(shape)


NHD = ("token", "head", "content")
HND = ("head", "token", "content")


def _together_per_layer() -> Laid:
    pairs = [_storage((BLOCKS, 2, TOKENS, HEADS, CONTENT)) for _ in range(LAYERS)]
    return Laid([raw for raw, _ in pairs], [[View(a, i, 0, ("kv", *NHD))] for i, (_, a) in enumerate(pairs)])


def _together_hnd() -> Laid:
    pairs = [_storage((BLOCKS, 2, HEADS, TOKENS, CONTENT)) for _ in range(LAYERS)]
    return Laid([raw for raw, _ in pairs], [[View(a, i, 0, ("kv", *HND))] for i, (_, a) in enumerate(pairs)])


def _block_second() -> Laid:
    pairs = [_storage((2, BLOCKS, TOKENS, HEADS, CONTENT)) for _ in range(LAYERS)]
    return Laid([raw for raw, _ in pairs], [[View(a, i, 1, ("kv", *NHD))] for i, (_, a) in enumerate(pairs)])


def _one_storage() -> Laid:
    raw, a = _storage((LAYERS, 2, BLOCKS, TOKENS, HEADS, CONTENT))
    return Laid([raw], [[View(a[layer], 0, 1, ("kv", *NHD))] for layer in range(LAYERS)])


def _layers_in_block() -> Laid:
    raw, a = _storage((BLOCKS, LAYERS, 2, TOKENS, HEADS, CONTENT))
    return Laid([raw], [[View(a[:, layer], 0, 0, ("kv", *NHD))] for layer in range(LAYERS)])


def _layers_in_head() -> Laid:
    raw, a = _storage((BLOCKS, HEADS, LAYERS, TOKENS, CONTENT))
    return Laid([raw], [[View(a[:, :, layer], 0, 0, HND)] for layer in range(LAYERS)])


def _apart_two_storages() -> Laid:
    (raw_k, k), (raw_v, v) = (_storage((LAYERS, BLOCKS, TOKENS, HEADS, CONTENT)) for _ in range(2))
    return Laid([raw_k, raw_v], [[View(k[i], 0, 0, NHD), View(v[i], 1, 0, NHD)] for i in range(LAYERS)])


def _apart_one_storage() -> Laid:
    raw, a = _storage((2, LAYERS, BLOCKS, HEADS, TOKENS, CONTENT))
    return Laid([raw], [[View(a[kv, i], 0, 0, HND) for kv in range(2)] for i in range(LAYERS)])


def _mla_with_scales() -> Laid:
    raw, latent = _storage((LAYERS, BLOCKS, TOKENS, 36), "uint8")
    raw_scales, scales = _storage((LAYERS, BLOCKS, TOKENS), "float32")
    axes = ("token", "content")
    return Laid(
        [raw, raw_scales],
        [[View(latent[i], 0, 0, axes), View(scales[i], 1, 0, ("token",))] for i in range(LAYERS)],
    )


def _padded_pages() -> Laid:
    page = 2 * TOKENS * HEADS * CONTENT + 5
    raw, pages = _storage((BLOCKS, page))
    a = pages[:, 3:-2].reshape(BLOCKS, 2, TOKENS, HEADS, CONTENT, copy=False)
    return Laid([raw], [[View(a, 0, 0, ("kv", *NHD))]])


def _recurrent_states() -> Laid:
    raw = np.zeros((LAYERS, BLOCKS, 200), np.uint8)
    layers = []
    for layer in range(LAYERS):
        conv = raw[layer, :, :30].view("float16").reshape(BLOCKS, 3, 5, copy=False)
        state = raw[layer, :, 32:192].view("float32").reshape(BLOCKS, 2, 4, 5, copy=False)
        layers.append([View(conv, 0, 0, ("tap", "channel")), View(state, 0, 0, ("head", "state", "content"))])
    return Laid([raw.reshape(-1)], layers)


def _heads_named_first() -> Laid:
    raw, a = _storage((BLOCKS, TOKENS, HEADS, CONTENT))
    return Laid([raw], [[View(a.transpose(0, 2, 1, 3), 0, 0, HND)]])


def _content_transposed() -> Laid:
    raw, a = _storage((BLOCKS, HEADS, CONTENT, TOKENS))
    return Laid([raw], [[View(a.transpose(0, 1, 3, 2), 0, 0, HND)]])


def _odd_sizes() -> Laid:
    raw, a = _storage((LAYERS, BLOCKS, 3, 7), "uint8")
    return Laid([raw], [[View(a[i], 0, 0, ("token", "content"))] for i in range(LAYERS)])


def _reversed_layers() -> Laid:
    raw, a = _storage((LAYERS, BLOCKS, TOKENS, CONTENT))
    return Laid([raw], [[View(a[LAYERS - 1 - i], 0, 0, ("token", "content"))] for i in range(LAYERS)])


LAYOUTS: dict[str, Callable[[], Laid]] = {
    "nhd, K and V together, a storage per layer": _together_per_layer,
    "hnd, K and V together, a storage per layer": _together_hnd,
    "block axis second": _block_second,
    "all layers in one storage": _one_storage,
    "all layers inside a block": _layers_in_block,
    "all layers inside a head": _layers_in_head,
    "K and V apart in two storages": _apart_two_storages,
    "K and V apart in one storage": _apart_one_storage,
    "mla with scales": _mla_with_scales,
    "padding between blocks": _padded_pages,
    "recurrent states in padded pages": _recurrent_states,
    "hnd over memory in nhd": _heads_named_first,
    "innermost axis strided": _content_transposed,
    "sizes that nothing divides": _odd_sizes,
    "layers in reverse": _reversed_layers,
}
