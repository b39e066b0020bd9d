"""What has to be so on a node before the agent starts, told in words instead of in a worker's traceback.

Refuses to import Mooncake: the agent's process never holds it.
"""

import importlib.metadata
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Final

from kvpool_agent.errors import StartFault

CPU_BUILD: Final = "mooncake-transfer-engine-non-cuda"
CUDA_BUILDS: Final = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_LIBCUDA_SECONDS: Final = 10


def installed(name: str) -> bool:
    """Whether a distribution is installed."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def libcuda_loads() -> bool:
    """Whether the CUDA driver's library loads; tried in a child, since a loaded driver never leaves a process."""
    probe = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    return subprocess.run(probe, capture_output=True, timeout=_LIBCUDA_SECONDS, check=False).returncode == 0


def check_mooncake(
    is_installed: Callable[[str], bool] = installed, has_libcuda: Callable[[], bool] = libcuda_loads
) -> None:
    """Check that exactly one build of Mooncake is there, and that it can be imported.

    Raises:
        StartFault: which is missing, and what to install.
    """
    cuda = [name for name in CUDA_BUILDS if is_installed(name)]
    cpu = is_installed(CPU_BUILD)
    if cpu and cuda:
        raise StartFault(
            f"{CPU_BUILD} and {cuda[0]} are both installed and overwrite each other's files; "
            "uninstall both, then install kvpool[agent-cpu] or kvpool[agent]"
        )
    if not cpu and not cuda:
        raise StartFault("Mooncake is not installed; install kvpool[agent-cpu], or kvpool[agent] with CUDA")
    if cuda and not has_libcuda():
        raise StartFault(
            f"{cuda[0]} is Mooncake's CUDA build and does not import without libcuda.so.1; "
            "run with the NVIDIA container runtime, or install kvpool[agent-cpu]"
        )


def raise_file_limit() -> int:
    """Allow as many open files as the hard limit does (a session holds dozens); returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
