"""What a person may set of the connector, in `kv_connector_extra_config`; everything else is read from vLLM.

Unknown names are refused: a misspelt timeout would be one that nobody has set.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from kvpool_engine.types import Mode

SOCKET_DIR_VARIABLE: Final = "KVPOOL_SOCKET_DIR"
"""Where the pool's folder is, if the configuration does not say so; set by the operator's injection."""

LOOKUP_TIMEOUT: Final = 1.0
LOAD_TIMEOUT: Final = 10.0
SAVE_TIMEOUT: Final = 10.0
LONGEST_TIMEOUT: Final = 600.0
"""Seconds; the agent serves no longer deadlines."""


class SettingsError(ValueError):
    """A setting that cannot be used: its name, its value and what would be accepted."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's own settings.

    Attributes:
        socket_dir: the pool's folder on this node, with `agent.sock` and `fd.sock`.
        mode: how bytes come into the blocks: auto, mapped or copy.
        lookup_timeout: seconds after which a lookup counts as a miss.
        load_timeout: seconds after which what has not arrived is recomputed.
        save_timeout: seconds after which a save is given up.
        fingerprint: names the weights where they cannot be read from disk; part of every key.
    """

    socket_dir: Path
    mode: Mode = Mode.AUTO
    lookup_timeout: float = LOOKUP_TIMEOUT
    load_timeout: float = LOAD_TIMEOUT
    save_timeout: float = SAVE_TIMEOUT
    fingerprint: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """Check what was given.

        Raises:
            SettingsError: naming the setting.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise SettingsError(
                f"kv_connector_extra_config: {', '.join(unknown)} unknown; known are {', '.join(sorted(known))}"
            )
        folder = given.get("socket_dir") or environment.get(SOCKET_DIR_VARIABLE)
        if not folder:
            raise SettingsError(
                "kv_connector_extra_config: socket_dir is missing; name the pool's folder on this node"
                f" (status.socket.hostPath of the KVStorePool) or set {SOCKET_DIR_VARIABLE}"
            )
        return cls(
            socket_dir=Path(folder),
            mode=_mode(given.get("mode", "auto")),
            lookup_timeout=_seconds("lookup_timeout", given.get("lookup_timeout", LOOKUP_TIMEOUT)),
            load_timeout=_seconds("load_timeout", given.get("load_timeout", LOAD_TIMEOUT)),
            save_timeout=_seconds("save_timeout", given.get("save_timeout", SAVE_TIMEOUT)),
            fingerprint=str(given.get("fingerprint", "")),
        )


def _mode(value: object) -> Mode:
    modes = {mode.name.lower(): mode for mode in Mode}
    if not isinstance(value, str) or value.lower() not in modes:
        raise SettingsError(f"kv_connector_extra_config: mode is one of {', '.join(modes)}, got {value!r}")
    return modes[value.lower()]


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_TIMEOUT:
        raise SettingsError(
            f"kv_connector_extra_config: {name} is seconds, above 0 and at most {LONGEST_TIMEOUT:g}, got {value!r}"
        )
    return float(value)
