"""Error classes of this library; a caller's mistake is a plain ValueError or TypeError."""


class UnsupportedError(NotImplementedError):
    """No backend can do what was asked; `reasons` has every backend's reasons."""

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]] | None = None):
        self.reasons = dict(reasons or {})
        lines = [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("\n".join([message, *lines]))


class CacheFullError(RuntimeError):
    """The block pool has fewer free blocks than were asked for; nothing was allocated."""


class EngineDeadError(RuntimeError):
    """The engine's device no longer computes: nothing more is served, and the process should be started anew."""


class MissingMetadataError(ValueError, AttributeError):
    """The batch lacks what this type of attention needs (an encoder's lengths, say)."""
