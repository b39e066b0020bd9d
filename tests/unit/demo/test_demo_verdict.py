"""The demo's check can fail: a flipped byte and a foreign write are seen and counted, and end in exit code 1."""

import argparse
import json
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool_demo import command, kv, model
from kvpool_demo.content import POISON
from kvpool_demo.processes import DemoFault
from kvpool_demo.scenario import ALICE, Account, check, load
from kvpool_engine.types import Mode

LAYERS = {model.FULL: 9, model.WINDOW: 8}
BLOCK_BYTES = 16_384
UNITS = ALICE.hashes(model.BLOCK_TOKENS)[:3]
POOL_BLOCKS = 32
BLOCKS = [7, 20, 31]
HELD = [dict(zip(BLOCKS, UNITS, strict=True)), {9: UNITS[2]}]
NOTHING_UNSURE: list[list[int]] = [[], []]


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """The demo's pools have 142 MB a rank; a sixteenth shows the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "BLOCKS", POOL_BLOCKS)
        yield


@pytest.fixture(scope="module", params=[Mode.MAPPED, Mode.COPY], ids=["mapped", "copy"])
def made(request: pytest.FixtureRequest, small: None) -> kv.RankPool:
    return kv.RankPool(model.identity(), rank=1, mode=request.param)


@pytest.fixture
def pool(made: kv.RankPool) -> kv.RankPool:
    """A rank that has computed three blocks of one group and one of the other."""
    made.poison()
    made.compute(model.FULL, UNITS, BLOCKS)
    made.compute(model.WINDOW, UNITS[2:], [9])
    return made


def flip(pool: kv.RankPool, layer: str, block: int) -> None:
    """One bit of the last byte of a block."""
    raw = pool._tensors[layer].view(torch.uint8)
    last = raw[:, block] if pool._axes[layer] == 1 else raw[block]
    last[-1, -1, -1, -1] ^= 1


def test_what_was_computed_is_right_to_the_byte(pool: kv.RankPool) -> None:
    blocks = 3 * LAYERS[model.FULL] + LAYERS[model.WINDOW]
    assert pool.check(HELD, NOTHING_UNSURE) == kv.Verdict(blocks * BLOCK_BYTES, 0, 0)


@pytest.mark.parametrize(
    ("layer", "block"),
    [("model.layers.0.attn", 20), ("draft.layers.0.attn", 31), ("model.layers.15.attn", 9)],
)
def test_one_flipped_bit_is_one_wrong_block(pool: kv.RankPool, layer: str, block: int) -> None:
    flip(pool, layer, block)
    found = pool.check(HELD, NOTHING_UNSURE)
    assert (found.wrong_blocks, found.touched_blocks) == (1, 0)
    assert found.right_bytes == (3 * LAYERS[model.FULL] + LAYERS[model.WINDOW] - 1) * BLOCK_BYTES


@pytest.mark.parametrize("block", [model.NULL_BLOCK, 8, POOL_BLOCKS - 2])
def test_one_foreign_byte_is_one_touched_block(pool: kv.RankPool, block: int) -> None:
    flip(pool, "model.layers.0.attn", block)
    found = pool.check(HELD, NOTHING_UNSURE)
    assert (found.wrong_blocks, found.touched_blocks) == (0, 1)


def test_blocks_of_failed_chunks_are_not_judged_and_their_neighbours_are(pool: kv.RankPool) -> None:
    for block in (8, 10):
        flip(pool, "model.layers.0.attn", block)
    assert pool.check(HELD, [[8], []]).touched_blocks == 1


def test_a_block_that_was_never_loaded_is_wrong(pool: kv.RankPool) -> None:
    assert pool.check([{**HELD[0], 8: UNITS[0]}, HELD[1]], NOTHING_UNSURE).wrong_blocks == LAYERS[model.FULL]


def test_content_differs_by_key_layer_and_rank(pool: kv.RankPool) -> None:
    other = kv.RankPool(model.identity(), rank=0, mode=Mode.COPY)
    assert other.check([{}, {}], NOTHING_UNSURE) == kv.Verdict(0, 0, 0)
    other.compute(model.FULL, UNITS[:1], [7])
    mine, theirs = (one._blocks_of("model.layers.0.attn")[7] for one in (pool, other))
    assert (mine != theirs).any()
    assert (mine != pool._blocks_of("model.layers.2.attn")[7]).any()
    assert (mine != pool._blocks_of("model.layers.0.attn")[20]).any()
    assert (mine != POISON).any()


class OneRank:
    """A node whose only rank is checked in this process."""

    name = "node B"

    def __init__(self, pool: kv.RankPool) -> None:
        self._pool = pool

    def check(self) -> list[dict[str, Any]]:
        found = self._pool.check(HELD, NOTHING_UNSURE)
        return [{name: getattr(found, name) for name in ("right_bytes", "wrong_blocks", "touched_blocks")}]


@pytest.mark.parametrize(
    ("block", "words"), [(7, "node B rank 0: 1 wrong blocks"), (8, "node B rank 0: 1 foreign writes")]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_byte_ends_in_failed_and_exit_code_1(
    pool: kv.RankPool, capsys: pytest.CaptureFixture[str], block: int, words: str, as_json: bool
) -> None:
    flip(pool, "model.layers.0.attn", block)
    account = Account()
    check(OneRank(pool), lambda _: None, account)  # type: ignore[arg-type]
    assert command._conclude(account, 1.0, as_json=as_json) == 1
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert (json.loads(lines[-1])["ok"], json.loads(lines[-1])["faults"]) == (False, [words])
    else:
        assert lines == [f"  broken: {words}", "demo: FAILED 1 promises broken, after 1.0 s"]


def test_a_right_account_ends_in_ok_and_exit_code_0(
    pool: kv.RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account(loaded_chunks=5, failed_chunks=2)
    check(OneRank(pool), lambda _: None, account)  # type: ignore[arg-type]
    assert command._conclude(account, 1.04, as_json=False) == 0
    assert capsys.readouterr().out == (
        "demo: ok 5 chunks loaded and right, 2 reported failed, 0 wrong, in 1.0 s\n"
    )


@pytest.fixture
def signals_kept() -> Iterator[None]:
    """`run` installs handlers of its own."""
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in kept.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (DemoFault("node A ended"), 1, "demo: FAILED node A ended"),
        (KeyError("hit"), 1, "demo: FAILED KeyError: 'hit'"),
        (
            OSError(28, "No space left on device"),
            1,
            "demo: FAILED OSError: [Errno 28] No space left on device",
        ),
        (KeyboardInterrupt(), 130, "demo: FAILED interrupted; everything that it started has ended"),
    ],
    ids=["fault", "bug", "machine", "Ctrl-C"],
)
def test_whatever_happens_the_last_line_says_failed_and_the_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals_kept: None,
    error: BaseException,
    code: int,
    last: str,
) -> None:
    folders = []

    def broken(folder: Any, *, quiet: bool) -> Account:
        folders.append(folder)
        assert folder.is_dir()
        raise error

    monkeypatch.setattr(command, "_play", broken)
    assert command.run(argparse.Namespace(json=False, keep_logs=False)) == code
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == last
    assert ("Traceback" in shown.err) == (type(error) in (KeyError, OSError))
    assert not folders[0].exists()


def test_a_chunk_that_is_neither_loaded_nor_reported_breaks_the_account() -> None:
    """LOADED_OR_REPORTED as the demo sees it: good and failed together are what the plan named."""
    plan = SimpleNamespace(masks=[np.ones(2, np.bool_), np.zeros(2, np.bool_)])
    result = {"failed": [], "good": 2, "bytes": 1, "seconds": 1.0}
    node = SimpleNamespace(
        blocks=lambda count: [[1, 2], [1, 2]],
        on_ranks=lambda call, **_: [result, result | {"good": 1}],
        note=lambda *_: None,
        unsure=[set(), set()],
    )
    asked = SimpleNamespace(id="alice@B", prompt=ALICE, fields=dict)
    account = Account()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool_demo.scenario.Plan", SimpleNamespace(from_bytes=lambda _: plan))
        load(node, asked, {"plan": ""}, lambda _: None, account)  # type: ignore[arg-type]
    assert account.faults == ["alice@B: 3 good + 0 failed of 2 x 2 chunks"]
