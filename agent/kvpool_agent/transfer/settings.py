"""How much a worker session may have under way at once. Every limit is BOUNDED's; none changes what bytes are right."""

from dataclasses import dataclass

from kvpool_agent.transfer.types import Integrity


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Limits of one worker session."""

    batch_chunks: int = 32
    """Chunks of one get or put. Measured: one get in flight of 32 to 64 chunks comes closest to the raw store."""

    batch_bytes: int = 64 << 20
    """Bytes of one get or put; a batch must be over well before its lease is."""

    max_transfers: int = 256
    """Transfers under way in one session; more are refused with QueueFull."""

    quarantine_share: float = 0.25
    """Share of the ring that may lie in quarantine before the loader's process is replaced, which frees it."""

    mover_threads: int = 2
    """Threads that verify and copy. Measured: two keep up with the store on two cores, checksums release the GIL."""

    integrity: Integrity = Integrity.ALWAYS
    """How much of what is loaded has its checksum verified. LOADED_OR_REPORTED holds for Always."""

    sample_share: float = 0.125
    """With Sampled: the share of keys, chosen by their digest, whose checksum is verified."""

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could ever move."""
        for name in ("batch_chunks", "batch_bytes", "max_transfers", "mover_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"TransferSettings.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("quarantine_share", "sample_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"TransferSettings.{name} is {getattr(self, name)}; it is a share above 0, at most 1"
                )
