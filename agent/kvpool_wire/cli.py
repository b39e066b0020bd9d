"""The `kvpool` command. Subcommands come from the entry points of whichever extra is installed.

An entry point of the group `kvpool.commands` names a function `(subparsers) -> None` that adds its own parser and sets
`run`, a function from the parsed arguments to an exit code.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from kvpool_wire import VERSION

EXAMPLES = """examples:
  kvpool demo                         two nodes share a KV cache on this machine, every byte checked
  kvpool agent --config agent.yaml    run a node agent
"""


def build_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and a line for each subcommand whose extra is not installed."""
    parser = argparse.ArgumentParser(
        prog="kvpool",
        description="One shared, trustworthy KV cache for the inference engines of a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvpool {VERSION}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    missing: list[str] = []
    for entry in sorted(entry_points(group="kvpool.commands"), key=lambda found: found.name):
        try:
            add = entry.load()
        except ImportError as error:
            missing.append(f"{entry.name}: {error.name or error} is not installed")
            continue
        add(subparsers)
    return parser, missing


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code, 2 for a wrong call."""
    parser, missing = build_parser()
    if missing:
        parser.epilog = EXAMPLES + "\nnot available here:\n  " + "\n  ".join(missing)
    arguments = parser.parse_args(argv)
    run = getattr(arguments, "run", None)
    if run is None:
        parser.print_help(sys.stderr)
        return 2
    return int(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
