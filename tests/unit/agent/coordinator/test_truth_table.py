"""The truth table of vLLM 0.32's coordinator: hand-made cases, each produced by the installed code.

Groups: F full, S sliding window (w: window), C chunked local (c: chunk), M Mamba; the number is the block size,
`'` another variant, `*` flagged for EAGLE. Sizes: hash unit/scheduler block. Flags: E use_eagle, P partial hits,
rN retention interval. Presence: units per group. Masks: bits per group, `-` for an empty mask, `ALL` for None.
"""

import re
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator

KINDS = {
    "F": GroupKind.FULL_ATTENTION,
    "S": GroupKind.SLIDING_WINDOW,
    "C": GroupKind.CHUNKED_LOCAL,
    "M": GroupKind.MAMBA,
}
LookupCase: TypeAlias = tuple[str, str, str, str, str, int, int, str]
StoreCase: TypeAlias = tuple[str, str, str, str, int, int, int | None, str]
GROUP = re.compile(r"([FSCM])(\d+)(?:w(\d+))?(?:c(\d+))?('*)(\*?)")

# id, groups, sizes, flags, units present, max_length, hit, masks (of the lookup and of the load alike)
LOOKUPS: list[LookupCase] = [
    ("A01", "F16", "16/16", "", "g0:0-3", 64, 64, "1111"),
    ("A02", "F16", "16/16", "", "g0:0-1,3", 64, 32, "11"),
    ("A03", "F16", "16/16", "", "g0:1-2", 64, 0, "-"),
    ("A04", "F16", "16/16", "", "g0:0-3", 70, 64, "1111"),
    ("A05", "F16", "16/16", "E", "g0:0-3", 64, 48, "111"),
    ("A06", "F16", "16/16", "E", "g0:0", 64, 0, "-"),
    ("A07", "F16*", "16/16", "", "g0:0-3", 64, 48, "111"),
    ("A08", "F16", "16/16", "E", "g0:0-4", 64, 48, "111"),
    ("A09", "F32", "16/32", "", "g0:1,3", 64, 64, "11"),
    ("A10", "F32", "16/32", "", "g0:0,2", 64, 0, "-"),
    ("A11", "F16", "16/16", "", "g0:0-3", 64, 64, "1111"),
    ("A12", "F16", "16/16", "E", "g0:0-3", 64, 48, "111"),
    ("B01", "S16w32", "16/16", "", "g0:0-3", 64, 64, "0011"),
    ("B02", "S16w32", "16/16", "", "g0:2-3", 64, 64, "0011"),
    ("B03", "S16w32", "16/16", "", "g0:0-3,5", 96, 64, "0011"),
    ("B04", "S16w48", "16/16", "", "g0:0,3-4", 96, 16, "1"),
    ("B05", "S16w48", "16/16", "", "g0:1,3-4", 96, 0, "-"),
    ("B06", "S16w128", "16/16", "", "g0:0-2", 48, 48, "111"),
    ("B07", "S16w33", "16/16", "", "g0:2-3", 64, 64, "0011"),
    ("B08", "S16w34", "16/16", "", "g0:2-3", 64, 0, "-"),
    ("B09", "S16w17", "16/16", "", "g0:3", 64, 64, "0001"),
    ("B10", "S16w1", "16/16", "", "g0:2", 64, 48, "001"),
    ("B11", "S16w32", "16/16", "E", "g0:0-3", 64, 48, "011"),
    ("B12", "S16w32", "16/16", "E", "g0:2-3", 64, 0, "-"),
    ("B13", "S16w128", "16/16", "E", "g0:0-1", 64, 16, "1"),
    ("B15", "S16w1", "16/16", "", "g0:0-3", 64, 64, "0001"),
    ("C01", "F16 + S16w32", "16/16", "", "g0:0-3; g1:0-3", 64, 64, "1111 / 0011"),
    ("C02", "F16 + S16w32", "16/16", "", "g0:0,2-3; g1:0-3", 64, 16, "1 / 1"),
    ("C03", "F16 + S16w32", "16/16", "", "g0:0-5; g1:0-3,5", 96, 64, "1111 / 0011"),
    ("C04", "F16 + S16w32", "16/16", "E", "g0:0-4; g1:0-4", 64, 64, "1111 / 0011"),
    ("C05", "F16 + S16w32", "16/16", "E", "g0:0-3; g1:0-3", 64, 48, "111 / 011"),
    ("C06", "F16 + S16w32*", "16/16", "E", "g0:0-4; g1:0-4", 64, 64, "1111 / 0011"),
    ("C07", "F16* + S16w32", "16/16", "E", "g0:0-4; g1:0-4", 64, 64, "1111 / 0011"),
    ("C08", "F16 + S16w32*", "16/16", "E", "g0:0-4; g1:0-3", 64, 48, "111 / 011"),
    ("C09", "F16 + S16w32", "16/16", "", "g0:0-3; g1:2-3", 64, 64, "1111 / 0011"),
    ("C10", "S16w32 + F16", "16/16", "", "g0:0-3; g1:0-1", 64, 32, "11 / 11"),
    ("D01", "F32 + S8w8", "8/32", "", "g0:3,7,11,15; g1:3,7,11,15", 128, 128, "1111 / 0000000000000001"),
    ("D02", "F32 + S8w8", "8/32", "", "g0:3,7,11,15; g1:3,7,11", 128, 96, "111 / 000000000001"),
    ("D03", "F32 + S8w8", "8/32", "", "g0:3,7,11,15; g1:12,14", 128, 0, "- / -"),
    ("D04", "F32 + S8w8", "8/32", "E", "g0:3,7,11,15; g1:11-12", 128, 96, "111 / 000000000001"),
    ("D05", "F32 + S8w8", "8/32", "E", "g0:3,7,11,15; g1:3-4,7-8,11-12,15", 128, 96, "111 / 000000000001"),
    ("D06", "F16 + S8w128", "8/16", "E", "g0:1,3,5,7; g1:0-2", 64, 0, "- / -"),
    ("D07", "F16 + S8w128", "8/16", "", "g0:1,3,5,7; g1:0-2", 64, 16, "1 / 11"),
    ("D08", "F16 + F32", "16/32", "", "g0:0-2; g1:1,3", 64, 32, "11 / 1"),
    ("D09", "F16 + F32", "16/32", "E", "g0:0-7; g1:1,3,5,7", 128, 96, "111111 / 111"),
    ("D10", "F32* + S8w8*", "8/32", "E", "g0:3,7,11,15; g1:0-15", 128, 96, "111 / 000000000001"),
    ("D13", "F32 + S8w8*", "8/32", "E", "g0:3,7,11,15; g1:0-16", 128, 128, "1111 / 0000000000000001"),
    ("D11", "F16 + F24", "8/48", "", "g0:1,3,5,7,9,11; g1:2,5,8", 96, 48, "111 / 11"),
    ("D12", "F32 + S8w24", "8/32", "", "g0:3,7,11,15; g1:0-14", 128, 96, "111 / 000000000111"),
    (
        "E01",
        "F16 + S16w32 + S16w64'",
        "16/16",
        "",
        "g0:0-7; g1:0-2,6-7; g2:0-3,7",
        128,
        48,
        "111 / 011 / 111",
    ),
    ("E02", "F16 + S16w32 + S16w32", "16/16", "", "g0:0-3; g1:0-3; g2:0-2", 64, 48, "111 / 011 / 011"),
    ("E03", "F16 + S16w32 + S16w32'", "16/16", "", "g0:0-3; g1:0-3; g2:0-2", 64, 48, "111 / 011 / 011"),
    (
        "E04",
        "F64 + S16w32 + S16w32*",
        "16/64",
        "E",
        "g0:3,7; g1:2-4,6-7; g2:2-4,6-7",
        128,
        64,
        "1 / 0011 / 0011",
    ),
    (
        "E06",
        "F16 + S16w32* + S16w64'",
        "16/16",
        "E",
        "g0:0-8; g1:0-8; g2:0-4,7",
        128,
        80,
        "11111 / 00011 / 01111",
    ),
    (
        "E07",
        "F16* + S16w32* + S16w64'*",
        "16/16",
        "E",
        "g0:0-8; g1:0-8; g2:0-8",
        128,
        128,
        "11111111 / 00000011 / 00001111",
    ),
    ("E09", "S16w256' + S8w9*", "8/16", "", "g0:1; g1:0-11", 96, 16, "1 / 01"),
    ("E10", "S16w15 + S8w128* + S8w8", "8/16", "E", "g0:1,3,5; g1:0-6; g2:0-2,4-6", 48, 0, "- / - / -"),
    ("E11", "S16w49 + S16w48*", "16/16", "E", "g0:0; g1:0", 16, 0, "- / -"),
    ("E08", "S16w32 + S16w64", "16/16", "", "g0:2-3,6-7; g1:0-7", 128, 128, "00000011 / 00001111"),
    ("F01", "C16c32", "16/16", "", "g0:-", 64, 64, "0000"),
    ("F02", "C16c64", "16/16", "", "g0:4", 96, 80, "00001"),
    ("F03", "F16 + C16c64", "16/16", "", "g0:0-4; g1:4", 96, 80, "11111 / 00001"),
    ("F04", "F16 + C16c64", "16/16", "", "g0:0-5; g1:-", 96, 64, "1111 / 0000"),
    ("F07", "F16* + C16c64", "16/16", "E", "g0:0-6; g1:0-6", 96, 96, "111111 / 000011"),
    ("M01", "M16", "16/16", "", "g0:0,2", 64, 48, "001"),
    ("M02", "F16 + M16", "16/16", "", "g0:0-3; g1:1", 64, 32, "11 / 01"),
    ("M03", "F16 + M16", "16/16", "E", "g0:0-3; g1:0-3", 64, 48, "111 / 001"),
    ("M04", "F16 + M16", "16/16", "E", "g0:0-3; g1:3", 64, 0, "- / -"),
    ("M05", "F32 + M16", "16/32", "", "g0:1,3; g1:1-2", 64, 32, "1 / 01"),
    ("M06", "F32 + M32", "16/32", "P", "g0:1-2; g1:1-2", 64, 48, "11 / 01"),
    ("M07", "F32 + M32", "16/32", "P", "g0:1-2; g1:1", 64, 32, "1 / 1"),
    ("M08", "F32 + M32", "16/32", "EP", "g0:1,3; g1:2", 64, 48, "11 / 01"),
    ("M09", "F32 + M32", "16/32", "EP", "g0:1,3; g1:1", 64, 32, "1 / 1"),
    ("M10", "F32 + M32", "16/32", "P", "g0:1,3; g1:2", 64, 48, "11 / 01"),
    ("M11", "F16 + M32", "16/32", "P", "g0:0-3; g1:2", 64, 48, "111 / 01"),
    (
        "M12",
        "F16 + M16 + M16' + M16''",
        "16/16",
        "",
        "g0:0-5; g1:3,5; g2:3,5; g3:3",
        96,
        64,
        "1111 / 0001 / 0001 / 0001",
    ),
    ("X04", "F16 + S16w32", "16/16", "", "g0:0-3; g1:1-2", 64, 48, "111 / 011"),
]

# id, groups, sizes, flags, token_len, start, num_prompt_tokens, store masks
STORES: list[StoreCase] = [
    ("B15", "S16w1", "16/16", "", 64, 0, None, "0000"),
    ("D01", "F32 + S8w8", "8/32", "", 128, 0, None, "ALL / 0001000100010001"),
    ("D04", "F32 + S8w8", "8/32", "E", 128, 0, None, "ALL / 0001100110011001"),
    ("D05", "F32 + S8w8", "8/32", "E", 128, 0, None, "ALL / 0001100110011001"),
    ("E04", "F64 + S16w32 + S16w32*", "16/64", "E", 128, 0, 130, "ALL / 00111011 / 00111011"),
    ("M02", "F16 + M16", "16/16", "", 64, 0, None, "ALL / 0000"),
    ("R01", "F32 + S8w8", "8/32", "", 128, 0, None, "ALL / 0001000100010001"),
    ("R02", "F32 + S8w8", "8/32", "r64", 128, 0, None, "ALL / 0000000100000001"),
    ("R03", "F32 + S8w8", "8/32", "r0", 128, 0, None, "ALL / 0000000000000000"),
    ("R04", "F32 + S8w8", "8/32", "r0", 128, 0, 100, "ALL / 0000000000010000"),
    ("R05", "F32 + S8w8", "8/32", "r64", 128, 0, 100, "ALL / 0000000100010001"),
    ("R06", "F32 + S8w8", "8/32", "r64", 128, 64, 100, "ALL / 00010001"),
    ("R07", "F32 + S8w8", "8/32", "r0", 128, 0, 128, "ALL / 0000000000010000"),
    ("R08", "F32 + S8w8", "8/32", "Er0", 160, 0, 128, "ALL / 00000001100110000000"),
    ("R09", "F32 + S8w64", "8/32", "", 128, 0, None, "ALL / ALL"),
    ("R10", "F16 + M16", "16/16", "r32", 64, 0, None, "ALL / 0000"),
]


def number(text: str | None) -> int | None:
    return int(text) if text else None


def parse_group(text: str) -> GroupSpec:
    match = GROUP.fullmatch(text)
    assert match, text
    kind, block, window, chunk, variant, eagle = match.groups()
    return GroupSpec(KINDS[kind], int(block), number(window), number(chunk), bool(eagle), variant)


def build(groups: str, sizes: str, flags: str) -> KVCoordinator:
    hash_block, scheduler_block = sizes.split("/")
    retention = re.search(r"r(\d+)", flags)
    return KVCoordinator(
        [parse_group(text) for text in groups.split(" + ")],
        hash_block_size=int(hash_block),
        scheduler_block_size=int(scheduler_block),
        use_eagle="E" in flags,
        partial_hits="P" in flags,
        retention_interval=int(retention[1]) if retention else None,
    )


def presence(text: str, num_units: int) -> list[np.ndarray]:
    groups = []
    for part in text.split("; "):
        units = np.zeros(num_units, dtype=bool)
        for span in part.split(":")[1].strip("-").split(",") if not part.endswith(":-") else []:
            first, _, last = span.partition("-")
            units[int(first) : int(last or first) + 1] = True
        groups.append(units)
    return groups


def bits(masks: Iterable[np.ndarray | None]) -> str:
    shown = ["ALL" if mask is None else "".join("01"[int(bit)] for bit in mask) or "-" for mask in masks]
    return " / ".join(shown)


def units_in(text: str) -> int:
    """The chain reaches to the last unit that is present anywhere."""
    return max((int(unit) + 1 for unit in re.findall(r"(?<![g\d])(\d+)(?!\d*:)", text)), default=0)


@pytest.mark.parametrize("case", LOOKUPS, ids=[case[0] for case in LOOKUPS])
def test_truth_table_lookup_load_mask_and_plan(case: LookupCase) -> None:
    _, groups, sizes, flags, present, max_length, hit, masks = case
    coordinator = build(groups, sizes, flags)
    num_units = max(units_in(present), max_length // coordinator.sizes.hash_block)
    exists = presence(present, num_units)
    found, length = coordinator.find_longest_cache_hit(range(num_units), max_length, exists)
    assert (length, bits(found)) == (hit, masks)
    assert bits(coordinator.load_mask(range(num_units), hit)) == masks
    plan = coordinator.plan(range(num_units), max_length, exists)
    assert (plan.hit_length, bits(group.mask for group in plan.groups)) == (hit, masks)
    coordinator.check_plan(range(num_units), plan)


@pytest.mark.parametrize("case", STORES, ids=[case[0] for case in STORES])
def test_truth_table_store_mask(case: StoreCase) -> None:
    _, groups, sizes, flags, token_len, start, prompt, masks = case
    coordinator = build(groups, sizes, flags)
    got = coordinator.store_mask(token_len, start=start, num_prompt_tokens=prompt)
    assert bits(got) == masks


@pytest.mark.parametrize(
    "case", [case for case in STORES if case[0] in ("D01", "D04", "E04")], ids=lambda case: case[0]
)
def test_what_is_saved_by_mask_can_be_found_again(case: StoreCase) -> None:
    """vLLM #49069: with write and read masks that do not meet, nothing is ever hit."""
    _, groups, sizes, flags, token_len, _, _, _ = case
    coordinator = build(groups, sizes, flags)
    num_units = token_len // coordinator.sizes.hash_block
    exists = []
    for spec, mask in zip(coordinator.groups, coordinator.store_mask(token_len), strict=True):
        stride = spec.block_size // coordinator.sizes.hash_block
        units = np.zeros(num_units, dtype=bool)
        units[stride - 1 :: stride] = True if mask is None else mask
        exists.append(units)
    everything = [np.ones(num_units, dtype=bool) for _ in exists]
    found = coordinator.plan(range(num_units), token_len, exists).hit_length
    assert found == coordinator.plan(range(num_units), token_len, everything).hit_length > 0


@pytest.mark.parametrize(
    ("retention", "shown"), [("", "ALL / 0001000100010001"), ("r64", "ALL / 0001000100010001")]
)
def test_probe_mask_ignores_the_retention_interval(retention: str, shown: str) -> None:
    coordinator = build("F32 + S8w8", "8/32", retention)
    assert bits(coordinator.probe_mask(128)) == shown
