"""The `kvpool demo` command: starts everything, plays the story, prints the account, leaves nothing behind."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvpool_demo.nodes import attach, finish, start_agent
from kvpool_demo.otlp import SpanRecord, TraceReceiver, tree
from kvpool_demo.processes import DemoFault, Fleet, start_master
from kvpool_demo.scenario import Account, Say, play

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXAMPLES = """examples:
  kvpool demo                 play the story, about twenty seconds
  kvpool demo --json          the account as one JSON object, for scripts
  kvpool demo --keep-logs     keep every process's log and print where
"""


def command(subparsers: "Subparsers") -> None:
    """Add `demo` to the `kvpool` command (entry point)."""
    parser = subparsers.add_parser(
        "demo",
        help="two nodes share a KV cache on this machine, every byte checked",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print the account as one JSON object instead of prose"
    )
    parser.add_argument(
        "--keep-logs", action="store_true", help="keep the folder with all logs and say where it is"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Play; returns 0 if every promise was kept, 1 if not, 130 after Ctrl-C."""
    for signum in _ENDINGS:
        signal.signal(signum, _interrupt)
    begun = time.monotonic()
    try:
        with _folder(keep=arguments.keep_logs) as folder:
            account = _play(folder, quiet=arguments.json)
        return _conclude(account, time.monotonic() - begun, as_json=arguments.json)
    except BrokenPipeError:
        # Whoever read the story has gone; the last line has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except DemoFault as fault:
        return _failed(str(fault), as_json=arguments.json)
    except KeyboardInterrupt:
        _failed("interrupted; everything that it started has ended", as_json=arguments.json)
        return 130
    except Exception as error:  # noqa: BLE001 - whatever it was, the last line and the exit code say that it failed
        traceback.print_exc()
        return _failed(f"{type(error).__name__}: {error}", as_json=arguments.json)


def _failed(why: str, *, as_json: bool) -> int:
    """The account of a story that did not come to its end; the exit code for it."""
    print(json.dumps({"ok": False, "faults": [why]}) if as_json else f"demo: FAILED {why}", flush=True)
    return 1


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    # Once is enough: a second signal must not end the clearing up that the first one began.
    for signum in _ENDINGS:
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """A folder for sockets and logs, in /tmp because a Unix socket's path is short; gone afterwards unless kept."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-", dir="/tmp"))
    try:
        yield folder
    finally:
        if keep:
            print(f"logs: {folder}", flush=True)
        else:
            shutil.rmtree(folder)


def _play(folder: Path, *, quiet: bool) -> Account:
    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    receiver = TraceReceiver()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    try:
        with Fleet(folder, environment) as fleet:
            say(
                "Starting a Mooncake master, two agents and two engines (one scheduler and two ranks each) ..."
            )
            _, address = start_master(fleet)
            starting = [
                start_agent(fleet, "node A", "copy", master=address, ip="127.0.0.1"),
                start_agent(fleet, "node B", "mapped", master=address, ip="127.0.0.1"),
            ]
            node_a, node_b = (finish(fleet, one) for one in starting)
            attach(node_a)
            attach(node_b)
            account = play(node_a, node_b, say)
            _show_trace(receiver, account, say)
            return account
    finally:
        receiver.close()


def _show_trace(receiver: TraceReceiver, account: Account, say: Say) -> None:
    trace, span, request = account.shown_trace.split("/")

    def complete(spans: list[SpanRecord]) -> bool:
        names = [found.name for found in spans if found.trace == trace]
        return names.count("kvpool.load") >= 2 and "kvpool.lookup" in names

    spans = receiver.wait(complete, timeout=3.0)
    own = [found for found in spans if found.trace == trace]
    account.expect(
        complete(spans), f"the trace of {request} is not complete: {sorted(found.name for found in own)}"
    )
    if own:
        root = SpanRecord(
            trace,
            span,
            "",
            "request",
            f"engine, {request}",
            min(s.begun for s in own),
            max(s.ended for s in own),
        )
        say("One request's trace:")
        for line in tree([root, *own], trace):
            say(f"  {line}")


def _conclude(account: Account, seconds: float, *, as_json: bool) -> int:
    summary = {
        "ok": not account.faults,
        "seconds": round(seconds, 1),
        "loaded_chunks": account.loaded_chunks,
        "loaded_bytes": account.loaded_bytes,
        "failed_chunks": account.failed_chunks,
        "right_bytes": account.right_bytes,
        "faults": account.faults,
    }
    if as_json:
        print(json.dumps(summary))
        return 1 if account.faults else 0
    if account.faults:
        for fault in account.faults:
            print(f"  broken: {fault}")
        print(f"demo: FAILED {len(account.faults)} promises broken, after {seconds:.1f} s")
        return 1
    print(
        f"demo: ok {account.loaded_chunks} chunks loaded and right, {account.failed_chunks} reported failed, 0 wrong, "
        f"in {seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    from kvpool_wire.cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
