"""The agent's command line: `kvpool agent` and `python -m kvpool_agent`.

Exit codes: 0 after an orderly end, 2 for a wrong call or configuration, 3 where the node cannot run the agent.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool_agent.config import AgentConfig
from kvpool_agent.config_load import default_config, load_config
from kvpool_agent.errors import ConfigFault, StartFault
from kvpool_agent.telemetry import logs

WRONG_CONFIG = 2
CANNOT_START = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the agent."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration, YAML or JSON")
    parser.add_argument(
        "--check-config", action="store_true", help="read the configuration, say what is wrong, end"
    )
    parser.add_argument(
        "--print-default-config", action="store_true", help="print a complete configuration, end"
    )
    parser.set_defaults(run=run)


def command(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `kvpool agent`."""
    add_arguments(subparsers.add_parser("agent", help="run a node agent", description=__doc__))


def run(arguments: argparse.Namespace) -> int:
    """Run the agent; returns its exit code."""
    if arguments.print_default_config:
        sys.stdout.write(default_config())
        return 0
    if arguments.config is None:
        sys.stderr.write(
            "kvpool agent: --config FILE is missing; --print-default-config shows a complete one\n"
        )
        return WRONG_CONFIG
    try:
        config = load_config(arguments.config, os.environ)
    except ConfigFault as fault:
        sys.stderr.write(
            f"kvpool agent: {fault.source}:\n" + "".join(f"  {line}\n" for line in fault.problems)
        )
        return WRONG_CONFIG
    if arguments.check_config:
        sys.stdout.write(f"{arguments.config}: ok\n")
        return 0
    return serve(config)


def serve(config: AgentConfig) -> int:
    """Run an agent until it is told to end; returns its exit code."""
    from kvpool_agent.server.preflight import check_mooncake  # noqa: PLC0415 - as in _agent

    logs.configure(
        config.log.level, config.log.format, {"pool": config.pool.full_name, "node": config.node.name}
    )
    try:
        check_mooncake()
        asyncio.run(_agent(config))
    except StartFault as fault:
        sys.stderr.write(f"kvpool agent: {fault}\n")
        return CANNOT_START
    return 0


async def _agent(config: AgentConfig) -> None:
    # gRPC and the SDK take most of a second to load: every `kvpool` command would pay for it.
    from kvpool_agent.server.agent import Agent  # noqa: PLC0415

    await Agent(config).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvpool_agent`."""
    parser = argparse.ArgumentParser(prog="python -m kvpool_agent", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))
