"""SAME_IDENTITY: which weights an engine runs, as one string that is part of every key.

Two engines get the same string only if they compute the same KV from the same tokens: equal configuration of the model
(its path aside), types, quantisation and weights. Weights on disk are told apart by the names and sizes of their files,
the head of each file (in which safetensors lists its tensors) and samples of its bytes, never by time stamps; weights
that lie elsewhere need a pinned revision or a name that a person gives. Reads a few hundred KiB a file, once, at start.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvpool_wire.identity import digest

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
HEAD_BYTES: Final = 256 * 1024
SAMPLES: Final = 32
MOST_TABLE_BYTES: Final = 100 << 20
"""A safetensors file with a longer table is damaged; it is sampled evenly."""
SAMPLE_BYTES: Final = 4096
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "name_or_path"})
"""What differs between two copies of one model and decides no KV."""


class FingerprintError(ValueError):
    """Weights that cannot be told from others; the message says what to set."""


def model_fingerprint(model: Any, *, given: str) -> str:
    """The fingerprint of one model.

    Args:
        model: vLLM's ModelConfig.
        given: what a person set in its place, for weights that are neither on disk nor pinned.

    Raises:
        FingerprintError: nothing tells these weights from others.
    """
    settings = {
        "config": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "sliding window off": bool(getattr(model, "disable_sliding_window", False)),
        # Scalings of the rotary embedding that depend on the length that was configured.
        "length": model.max_model_len if _scales_by_length(model.hf_config.to_dict()) else 0,
    }
    parts = json.dumps(settings, sort_keys=True, default=str)
    return digest("kvpool model 2", parts, _weights(model, given=given), given).hex()


def model_name(model: Any) -> str:
    """The model's name without the place where this node keeps it."""
    path = Path(model.model)
    return path.name if path.is_dir() else str(model.model)


def _weights(model: Any, *, given: str) -> bytes:
    folder = Path(model.model)
    if folder.is_dir():
        try:
            return weights_digest(folder)
        except FingerprintError:
            if given:  # loaded from elsewhere; the name that a person gave stands for them
                return b"given"
            raise
    revision = str(model.revision or getattr(model.hf_config, "_commit_hash", "") or "")
    return f"{model.model}@{revision}".encode()


def check_pinned(model: Any, *, given: str) -> None:
    """Refuse weights that somebody could exchange under the same name.

    Raises:
        FingerprintError: naming the model and what to set.
    """
    revision = str(model.revision or getattr(model.hf_config, "_commit_hash", "") or "")
    if not (given or Path(model.model).is_dir() or _COMMIT.fullmatch(revision)):
        raise FingerprintError(
            f"the weights of {model.model!r} are not on disk and no revision (40 hex digits) pins them: set --revision,"
            ' or "fingerprint" in kv_connector_extra_config to a name that changes whenever the weights do'
        )


def weights_digest(folder: Path) -> bytes:
    """32 bytes over the weights in a folder: names, sizes, heads and samples of all files.

    Raises:
        FingerprintError: there are none.
    """
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not files:
        raise FingerprintError(f"no weights in {folder}; looked for {', '.join(WEIGHTS)}")
    total = hashlib.sha256()
    for path in files:
        total.update(_file_digest(path))
    return total.digest()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    found = hashlib.sha256(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as stream:
        found.update(stream.read(HEAD_BYTES))
        for offset in _sample_offsets(size, _tensors(path)):
            stream.seek(offset)
            found.update(stream.read(SAMPLE_BYTES))
    return found.digest()


def _sample_offsets(size: int, tensors: Iterable[tuple[int, int]]) -> Iterable[int]:
    """Evenly over the file, and at the beginning and in the middle of every tensor: an edit of one matrix shows."""
    last = max(0, size - SAMPLE_BYTES)
    found = {last * step // SAMPLES for step in range(1, SAMPLES + 1)}
    for begin, end in tensors:
        found |= {min(begin, last), min((begin + end) // 2, last)}
    return sorted(found)


def _tensors(path: Path) -> list[tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends, in bytes; empty for files of other kinds."""
    if path.suffix != ".safetensors":
        return []
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= MOST_TABLE_BYTES:
            return []
        try:
            table = json.loads(stream.read(length))
            places = [item["data_offsets"] for name, item in table.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError):
            return []
    return [(8 + length + begin, 8 + length + end) for begin, end in places]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _scales_by_length(config: Any) -> bool:
    text = json.dumps(config, default=str)
    return "longrope" in text or "dynamic" in text
