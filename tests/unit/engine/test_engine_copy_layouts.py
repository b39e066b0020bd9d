"""Copy mode over every layout that engines have: a block moves whole, and no other byte of the memory moves.

The reference is `support.layouts`: one NumPy view per declared tensor, no arithmetic shared with the product's.
"""

import numpy as np
import pytest

from kvpool_engine.storages import HostStorage
from kvpool_engine.tensors import Declaration, declare
from kvpool_wire.identity import payload_bytes
from support.layouts import BLOCKS, LAYERS, LAYOUTS, Bytes, Laid

EDGES = (0, BLOCKS // 2, BLOCKS - 1)


def declared(laid: Laid) -> Declaration:
    """As an engine declares it: tensors alone, in lists where a layer has several."""
    axes = {f"layer.{number}": views[0].block_axis for number, views in enumerate(laid.layers)}
    tensors = {f"layer.{number}": [view.array for view in views] for number, views in enumerate(laid.layers)}
    return declare(laid.identity(), tensors, block_axis=axes)


def memory_of(laid: Laid) -> list[Bytes]:
    return [storage.copy() for storage in laid.storages]


def copy(declaration: Declaration, block: int, payload: bytearray, *, into_block: bool) -> None:
    """What the copying thread does with one item."""
    for part in declaration.layout.groups[0].parts:
        storage = declaration.storages[part.storage]
        assert isinstance(storage, HostStorage)
        (storage.scatter if into_block else storage.gather)(part, block, memoryview(payload))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_scattered_block_is_whole_and_its_neighbours_are_untouched(name: str) -> None:
    laid, expected = LAYOUTS[name](), LAYOUTS[name]()
    declaration = declared(laid)
    size = declaration.layout.groups[0].payload_bytes
    assert size == payload_bytes(laid.identity().groups[0], 0)
    for block in EDGES:
        laid.fill(seed=block)
        expected.fill(seed=block)
        payload = bytearray(np.random.default_rng(100 + block).integers(0, 256, size, np.uint8).tobytes())
        given = bytes(payload)
        copy(declaration, block, payload, into_block=True)
        expected.write(block, given)
        for found, wanted in zip(laid.storages, expected.storages, strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert payload == given


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_gathered_block_is_what_the_engine_sees_and_the_memory_stays_as_it_was(name: str) -> None:
    laid = LAYOUTS[name]()
    declaration = declared(laid)
    laid.fill(seed=4)
    before = memory_of(laid)
    for block in range(BLOCKS):
        payload = bytearray(declaration.layout.groups[0].payload_bytes)
        copy(declaration, block, payload, into_block=False)
        assert bytes(payload) == laid.read(block)
    for found, wanted in zip(laid.storages, before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_layer_may_be_declared_as_several_tensors() -> None:
    laid = LAYOUTS["K and V apart in two storages"]()
    declaration = declared(laid)
    order = [(tensor.layer, tensor.part, tensor.storage) for tensor in declaration.worker.tensors]
    assert order == [(f"layer.{layer}", part, part) for layer in range(LAYERS) for part in (0, 1)]
    assert [storage.size for storage in declaration.storages] == [raw.nbytes for raw in laid.storages]
    assert len(declaration.layout.groups[0].parts) == 2, "one copy for all keys, one for all values"
