"""The one command: whichever extra is installed gives its subcommand, the others are named as missing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvpool_wire import VERSION, cli


@dataclass(frozen=True)
class Entry:
    name: str
    load: Callable[[], Callable[[argparse._SubParsersAction], None]]


def hello(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("hello")
    parser.add_argument("--code", type=int, default=0)
    parser.set_defaults(run=lambda arguments: arguments.code)


def absent() -> Callable[[argparse._SubParsersAction], None]:
    raise ModuleNotFoundError("No module named 'grpc'", name="grpc")


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Entry("hello", lambda: hello), Entry("agent", absent)]

    def entry_points(*, group: str) -> list[Entry]:
        assert group == "kvpool.commands"
        return found

    monkeypatch.setattr(cli, "entry_points", entry_points)


def test_a_subcommand_runs_and_its_exit_code_is_the_commands() -> None:
    assert cli.main(["hello"]) == 0
    assert cli.main(["hello", "--code", "3"]) == 3


def test_a_command_whose_extra_is_missing_is_named_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    assert "agent: grpc is not installed" in capsys.readouterr().out


def test_a_command_that_is_not_there_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["agent"])
    assert stopped.value.code == 2
    assert "invalid choice: 'agent'" in capsys.readouterr().err


def test_no_command_at_all_shows_the_help_and_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: kvpool" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvpool {VERSION}\n"
