"""Error classes of this library. A wrong argument raises ValueError or TypeError."""


class UnsupportedError(NotImplementedError):
    """No backend supports the request; `reasons` maps each backend's name to its reasons."""

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]] | None = None):
        self.reasons = dict(reasons or {})
        lines = [f"  {name}: {'; '.join(each)}" for name, each in self.reasons.items()]
        super().__init__("\n".join([message, *lines]))


class CacheFullError(RuntimeError):
    """The block pool has too few free blocks; nothing was allocated."""


class EngineDeadError(RuntimeError):
    """The engine's device no longer computes. The engine cannot continue; start a new process."""


class MissingMetadataError(ValueError, AttributeError):
    """The batch lacks metadata that this type of attention needs, e.g. the encoder's lengths."""
