"""Compiles agent.proto into what is committed: a descriptor set and its typed stub.

    python tools/gen_proto.py            write the files
    python tools/gen_proto.py --check    exit 1 if the committed files are not what the .proto says

No Python code is generated (docs/adr/0005): the descriptor set is loaded at run time through protobuf's public API, so
that one build serves every protobuf release that an engine may bring.
"""

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
WIRE = ROOT / "agent" / "kvpool_wire"
PROTO = "kvpool/agent/v1/agent.proto"


def compile_into(folder: Path) -> dict[Path, bytes]:
    """Run protoc in `folder`; returns what each committed file has to hold."""
    descriptors = folder / "agent.binpb"
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={WIRE / 'proto'}",
            f"--descriptor_set_out={descriptors}",
            f"--plugin=protoc-gen-mypy={Path(sysconfig.get_path('scripts')) / 'protoc-gen-mypy'}",
            f"--mypy_out=quiet:{folder}",
            PROTO,
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with exit code {code} on {WIRE / 'proto' / PROTO}")
    stub = (folder / PROTO).with_name("agent_pb2.pyi")
    return {WIRE / "agent.binpb": descriptors.read_bytes(), WIRE / "agent_pb2.pyi": stub.read_bytes()}


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = compile_into(Path(folder))
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_bytes() != content]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the .proto says; run: make proto", file=sys.stderr)
        return 1 if stale else 0
    for path, content in wanted.items():
        path.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
