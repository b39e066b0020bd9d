"""Runs a program that dies with its parent: `python -m kvpool_demo.tether PROGRAM ARGUMENT...`.

For programs that do not watch their parent themselves. The kernel delivers SIGKILL when the parent is gone; the check
after the request closes the race with a parent that died before it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then become the program."""
    parent = int(os.environ.pop("KVPOOL_TETHER_PARENT", "0"))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent and os.getppid() != parent:
        sys.exit("the parent is gone")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
