"""What a worker may declare: what is missing, foreign, doubled, misshapen or overlapping is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from kvpool_wire.identity import check_identity, layout_digest, payload_bytes
from kvpool_wire.layout import LayoutError, Part, check_worker
from support.layouts import BLOCKS, LAYOUTS, Laid

PLAIN = "all layers in one storage"


def plain(name: str = PLAIN) -> tuple[pb.Identity, pb.Worker]:
    laid = LAYOUTS[name]()
    return laid.identity(), laid.worker()


def read_by_parts(laid: Laid, parts: tuple[Part, ...], block: int, size: int) -> bytes:
    """As `Part` documents it."""
    payload = bytearray(size)
    for part in parts:
        kind = f"u{part.itemsize}"
        at = part.offset + block * part.block_stride
        in_block = np.ndarray(part.shape, kind, laid.storages[part.storage].data, at, part.strides)
        np.ndarray(part.shape, kind, payload, part.chunk_offset, part.chunk_strides)[...] = in_block
    return bytes(payload)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_reads_back_as_the_engine_sees_it(name: str) -> None:
    laid = LAYOUTS[name]()
    laid.fill(seed=4)
    identity = laid.identity()
    check_identity(identity)
    layout = check_worker(identity, laid.worker())
    (group,) = layout.groups
    assert group.payload_bytes == payload_bytes(identity.groups[0], 0)
    assert group.layout_digest == layout_digest(identity.groups[0], 0)
    assert (group.shard, group.num_blocks, group.null_block) == (0, BLOCKS, -1)
    assert layout.max_chunk_bytes == group.payload_bytes + 64
    assert sum(part.nbytes for part in group.parts) == group.payload_bytes
    for block in range(BLOCKS):
        assert read_by_parts(laid, group.parts, block, group.payload_bytes) == laid.read(block)


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        (PLAIN, 1),
        ("all layers inside a block", 1),
        ("all layers inside a head", 1),
        ("K and V apart in two storages", 2),
        ("K and V apart in one storage", 1),
        ("mla with scales", 2),
        ("recurrent states in padded pages", 2),
    ],
)
def test_layers_become_few_copies(name: str, copies: int) -> None:
    assert len(check_worker(*plain(name)).groups[0].parts) == copies


def test_nhd_and_hnd_of_one_size_have_different_digests() -> None:
    nhd = check_worker(*plain("nhd, K and V together, a storage per layer")).groups[0]
    hnd = check_worker(*plain("hnd, K and V together, a storage per layer")).groups[0]
    assert nhd.payload_bytes == hnd.payload_bytes
    assert nhd.layout_digest != hnd.layout_digest


def test_copy_mode_needs_shapes_only() -> None:
    identity, worker = plain()
    del worker.storages[:]
    worker.mode = pb.COPY
    for tensor in worker.tensors:
        del tensor.strides[:]
        tensor.storage = 77
    layout = check_worker(identity, worker)
    assert (layout.storages, layout.groups[0].parts) == ((), ())
    assert layout.groups[0].payload_bytes == payload_bytes(identity.groups[0], 0)
    worker.mode = pb.MODE_UNSPECIFIED
    assert check_worker(identity, worker) == layout
    worker.mode = pb.MAPPED
    with pytest.raises(LayoutError, match="mapped mode needs the storages"):
        check_worker(identity, worker)


def test_a_tensor_that_is_left_out_is_named() -> None:
    identity, worker = plain("mla with scales")
    del worker.tensors[3]
    with pytest.raises(
        LayoutError, match=r"group 0 layer 'layer.1' tensor 1 \(float32 .*token.*\) is left out"
    ):
        check_worker(identity, worker)


def _tensor(field: str, value: object, index: int = 1) -> Callable[[pb.Worker], None]:
    def change(worker: pb.Worker) -> None:
        setattr(worker.tensors[index], field, value)

    return change


def _list(field: str, values: list[int]) -> Callable[[pb.Worker], None]:
    def change(worker: pb.Worker) -> None:
        getattr(worker.tensors[1], field)[:] = values

    return change


def _worker(field: str, values: list[int]) -> Callable[[pb.Worker], None]:
    def change(worker: pb.Worker) -> None:
        getattr(worker, field)[:] = values

    return change


def _storage(**fields: object) -> Callable[[pb.Worker], None]:
    def change(worker: pb.Worker) -> None:
        for field, value in fields.items():
            setattr(worker.storages[0], field, value)

    return change


def _twice(worker: pb.Worker) -> None:
    worker.tensors.append(worker.tensors[1])


def _many_storages(worker: pb.Worker) -> None:
    worker.storages.extend([worker.storages[0]] * limits.MAX_STORAGES)


# The plain layout is [layers, 2, blocks, tokens 4, heads 2, content 6] in float16: shapes (2, 7, 4, 2, 6), strides
# (672, 96, 24, 12, 2), 1344 bytes a layer.
SHAPE, STRIDES = [2, BLOCKS, 4, 2, 6], [672, 96, 24, 12, 2]
REFUSED: dict[str, tuple[Callable[[pb.Worker], None], str]] = {
    "group out of range": (_tensor("group", 1), "has groups 0 to 0"),
    "foreign layer": (_tensor("layer", "layer.9"), "'layer.9' tensor 0: the identity's group has no layer"),
    "foreign part": (_tensor("part", 1), "'layer.1' tensor 1: the layer has tensors 0 to 0"),
    "declared twice": (_twice, "'layer.1' tensor 0 is declared twice"),
    "block axis out of range": (_tensor("block_axis", 5), "block_axis 5, but there are axes 0 to 4"),
    "block axis elsewhere": (_tensor("block_axis", 0), "'layer.1'.* at axis 0"),
    "another shape": (_list("shape", [2, BLOCKS, 4, 2, 7]), "'layer.1' tensor 0 .*float16.* has shape"),
    "another number of blocks": (_list("shape", [2, BLOCKS + 1, 4, 2, 6]), "'layer.1' tensor 0 .* has shape"),
    "fewer axes": (_list("shape", [2, BLOCKS, 4, 12]), "'layer.1' tensor 0 .* has shape"),
    "storage out of range": (_tensor("storage", 1), "storage 1, but 1 are declared"),
    "strides missing": (_list("strides", [672, 96, 24, 12]), "4 strides for 5 axes"),
    "negative stride": (_list("strides", [672, 96, 24, 12, -2]), "neither negative"),
    "stride past everything": (_list("strides", [1 << 50, 96, 24, 12, 2]), "past any storage"),
    "stride zero": (_list("strides", [672, 96, 24, 0, 2]), "let blocks or elements overlap"),
    "blocks overlap": (_list("strides", [672, 95, 24, 12, 2]), "let blocks or elements overlap"),
    "K runs into V": (_list("strides", [660, 96, 24, 12, 2]), "let blocks or elements overlap"),
    "runs out of the storage": (
        _tensor("offset", 1344 * 2 + 1, 2),
        "runs to byte 4033 of storage 0, which has 4032",
    ),
    "far offset": (_tensor("offset", (1 << 64) - 1), "of storage 0, which has 4032"),
    "tensors overlap": (
        _tensor("offset", 1344 - 2),
        "'layer.0' tensor 0 .*'layer.1' tensor 0 .* share bytes",
    ),
    "tensors at one place": (_tensor("offset", 0), "share bytes"),
    "no shards": (_worker("shards", []), "worker.shards has 0 entries; one per group of the identity, 1"),
    "two block counts": (_worker("num_blocks", [7, 7]), "worker.num_blocks has 2 entries"),
    "no null blocks": (_worker("null_blocks", []), "worker.null_blocks has 0 entries"),
    "shard out of range": (_worker("shards", [1]), r"worker.shards\[0\] is 1"),
    "no blocks": (_worker("num_blocks", [0]), r"worker.num_blocks\[0\] is 0"),
    "too many blocks": (_worker("num_blocks", [1 << 31]), "worker.num_blocks"),
    "null block out of range": (_worker("null_blocks", [BLOCKS]), r"worker.null_blocks\[0\] is 7"),
    "null block below none": (_worker("null_blocks", [-2]), r"worker.null_blocks\[0\] is -2"),
    "empty storage": (_storage(size=0), r"storages\[0\].size is 0"),
    "storage too large": (_storage(size=1 << 60), r"storages\[0\].size"),
    "device unknown": (_storage(device=pb.DEVICE_UNSPECIFIED), r"storages\[0\].device"),
    "CPU with a handle": (_storage(handle=b"h" * 64), "descriptor travels beside"),
    "CUDA without a handle": (_storage(device=pb.CUDA, device_uuid="GPU-1"), "handle has 0 bytes"),
    "CUDA with a short handle": (
        _storage(device=pb.CUDA, device_uuid="GPU-1", handle=b"h"),
        "handle has 1 bytes",
    ),
    "CUDA without a device": (_storage(device=pb.CUDA, handle=b"h" * 64), "device_uuid is empty"),
    "CUDA far offset": (
        _storage(device=pb.CUDA, device_uuid="GPU-1", handle=b"h" * 64, handle_offset=1 << 60),
        "handle_offset",
    ),
    "too many storages": (_many_storages, "at most 4096"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(case: str) -> None:
    identity, worker = plain()
    assert ([*worker.tensors[1].shape], [*worker.tensors[1].strides]) == (SHAPE, STRIDES)
    change, message = REFUSED[case]
    change(worker)
    with pytest.raises(LayoutError, match=message):
        check_worker(identity, worker)


def test_an_unknown_mode_is_refused() -> None:
    identity, worker = plain()
    worker.mode = 9  # type: ignore[assignment]  # proto3 enums are open: a newer client may send it
    with pytest.raises(LayoutError, match="mode 9"):
        check_worker(identity, worker)


def test_a_segment_that_runs_past_its_block_is_refused() -> None:
    # Layers inside a head, declared as if a head's slice of one layer were as long as the block's stride allows:
    # copying one block would overwrite the next layer's heads.
    laid = LAYOUTS["all layers inside a head"]()
    identity, worker = laid.identity(), laid.worker()
    identity.groups[0].layers[0].tensors[0].shape[1] += 1
    worker.tensors[0].shape[2] += 1
    with pytest.raises(LayoutError, match="share bytes"):
        check_worker(identity, worker)


def test_a_chunk_beyond_the_limit_is_refused() -> None:
    identity, worker = plain()
    identity.groups[0].layers[0].tensors[0].shape[2] = limits.MAX_CHUNK_BYTES
    with pytest.raises(LayoutError, match="a chunk of group 0 has"):
        check_worker(identity, worker)


def test_a_gpu_engine_that_copies_by_itself_needs_no_handle() -> None:
    identity, worker = plain()
    worker.mode = pb.COPY
    worker.storages[0].device = pb.CUDA
    assert len(check_worker(identity, worker).groups[0].parts) == 1


def staged() -> tuple[pb.Identity, pb.Worker]:
    """Two groups that share bytes, layers on two pipeline stages, two KV shards a stage; rank of stage 1, shard 1."""
    form = pb.TensorFormat(dtype="uint8", axes=["token"], shape=[16])
    groups = [
        pb.Group(
            kind=kind,
            block_size=16,
            sliding_window=window,
            shards_per_stage=2,
            layers=[pb.Layer(name=f"{name}.{stage}", tensors=[form], stage=stage) for stage in stages],
        )
        for kind, window, name, stages in (
            (pb.FULL_ATTENTION, 0, "full", (0, 1)),
            (pb.SLIDING_WINDOW, 32, "window", (0, 1)),
            (pb.MAMBA, 0, "state", (0,)),
        )
    ]
    identity = pb.Identity(groups=groups)
    tensors = [
        pb.Tensor(group=group, layer=name, storage=0, shape=[10, 16], strides=[16, 1])
        for group, name in enumerate(["full.1", "window.1"])
    ]
    worker = pb.Worker(
        stage=1,
        shards=[1, 1, 0],
        num_blocks=[10, 10, 0],
        null_blocks=[0, 0, -1],
        storages=[pb.Storage(size=160, device=pb.CPU)],
        tensors=tensors,
    )
    return identity, worker


def test_groups_may_share_bytes_and_a_rank_may_hold_nothing_of_a_group() -> None:
    layout = check_worker(*staged())
    full, window, state = layout.groups
    assert (full.shard, window.shard, state.shard) == (3, 3, None)
    assert full.parts[0].offset == window.parts[0].offset
    assert (state.payload_bytes, state.parts, state.layout_digest) == (0, (), b"")
    assert full.layout_digest != window.layout_digest
    assert (full.null_block, state.null_block) == (0, -1)


def test_a_layer_of_another_stage_is_refused() -> None:
    identity, worker = staged()
    worker.tensors.append(pb.Tensor(group=2, layer="state.0", shape=[10, 16], strides=[16, 1]))
    with pytest.raises(LayoutError, match="belongs to stage 0, this rank is of stage 1"):
        check_worker(identity, worker)


def test_a_rank_without_any_layer_is_refused() -> None:
    identity, worker = staged()
    worker.stage = 2
    del worker.tensors[:]
    with pytest.raises(LayoutError, match="stage 2 of rank 0 holds no layer"):
        check_worker(identity, worker)


def test_fenced_groups_that_share_bytes_block_by_block_are_one_overlap_class() -> None:
    assert check_worker(*staged()).overlap == (0, 0, 2)
    identity, worker = staged()
    worker.storages[0].size = 320
    worker.tensors[1].offset = 160
    assert check_worker(identity, worker).overlap == (0, 1, 2)


def test_fenced_overlap_passes_on_from_group_to_group() -> None:
    """Group 2 shares with 0 and with 1, which lie in different halves of each block."""
    identity, worker = staged()
    forms = ([8], [8], [16])
    for group, shape in zip(identity.groups, forms, strict=True):
        del group.layers[:]
        form = pb.TensorFormat(dtype="uint8", axes=["token"], shape=shape)
        group.layers.append(pb.Layer(name="l", tensors=[form], stage=1))
    del worker.tensors[:]
    for index, (offset, shape) in enumerate(zip((0, 8, 0), forms, strict=True)):
        worker.tensors.add(
            group=index, layer="l", storage=0, offset=offset, shape=[10, *shape], strides=[16, 1]
        )
    worker.shards[2], worker.num_blocks[2], worker.null_blocks[2] = 1, 10, 0
    assert check_worker(identity, worker).overlap == (0, 0, 0)
    del identity.groups[2], worker.tensors[2], worker.shards[2], worker.num_blocks[2], worker.null_blocks[2]
    assert check_worker(identity, worker).overlap == (0, 1)


@pytest.mark.parametrize(
    ("offset", "stride"), [(8, 16), (16, 16), (0, 32)], ids=["half a block", "the next block", "twice as far"]
)
def test_fenced_groups_that_share_bytes_across_block_numbers_are_refused(offset: int, stride: int) -> None:
    """Block 3 of one would be block 4 of the other: no fence by block number could see it."""
    identity, worker = staged()
    worker.storages[0].size = 1000
    worker.tensors[1].offset = offset
    worker.tensors[1].strides[0] = stride
    with pytest.raises(LayoutError, match="groups 0 and 1 share bytes, but block 0 of one"):
        check_worker(identity, worker)


def test_without_storages_nothing_is_known_to_overlap() -> None:
    identity, worker = staged()
    worker.mode = pb.COPY
    del worker.storages[:]
    assert check_worker(identity, worker).overlap == (0, 1, 2)
