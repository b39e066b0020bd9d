"""Sizes, CPUs, durations and shares: what is read, what is refused, and with which words."""

import pytest

from kvpool_operator.api import quantity


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (4096, 4096),
        ("64Gi", 64 << 30),
        ("1T", 10**12),
        ("5k", 5000),
        ("007Mi", 7 << 20),
        ("1Pi", 1 << 50),
    ],
)
def test_a_size_is_read(text: object, size: int) -> None:
    assert quantity.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "1.5Gi", "1e3", "-1", -1, True, 1.0, None, "1Ei", "1 Gi", "1gi", "Gi", "1Gi\n", "१Gi"]
)
def test_a_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="write whole bytes or a quantity such as 64Gi"):
        quantity.parse_size(text)


@pytest.mark.parametrize(
    ("text", "thousandths"), [(2, 2000), ("2", 2000), ("1.5", 1500), ("500m", 500), ("0.001", 1)]
)
def test_cpu_is_read(text: object, thousandths: int) -> None:
    assert quantity.parse_cpu(text) == thousandths


@pytest.mark.parametrize("text", ["", "1.2345", "m", -1, True, None, "500M", "1,5"])
def test_cpu_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="write for example 2"):
        quantity.parse_cpu(text)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("10s", 10_000),
        ("500ms", 500),
        ("1m30s", 90_000),
        ("1h2m3s4ms", 3_723_004),
        ("90m", 5_400_000),
        ("0s", 0),
    ],
)
def test_a_duration_is_read(text: str, milliseconds: int) -> None:
    assert quantity.parse_duration(text) == milliseconds


@pytest.mark.parametrize("text", ["", "10", 10, "1.5s", "-1s", "1s1m", "s", None, "10s\n", "1d"])
def test_a_duration_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="write a string such as 10s"):
        quantity.parse_duration(text)


@pytest.mark.parametrize("amount", [1, 10_000, "1%", "100%"])
def test_an_amount_stays_as_it_was_written(amount: object) -> None:
    assert quantity.parse_amount(amount) == amount


@pytest.mark.parametrize("amount", [0, "0%", "101%", "5", True, None, 1.5, "5 %"])
def test_an_amount_is_refused(amount: object) -> None:
    with pytest.raises(ValueError, match="neither a number"):
        quantity.parse_amount(amount)
