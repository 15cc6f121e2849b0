"""What the server can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The server's own options (the engine's are `EngineOptions`)."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    api_key: str | None = None
    """Asked of every request except /health, /ready and /metrics."""
    served_model_name: str | None = None
    """The name that clients give; None: the engine's own."""
    max_body_mb: float = 64.0
    """Largest request body, in units of 2^20 bytes."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM or SIGINT."""

    def __post_init__(self) -> None:
        """Raises ValueError for values that cannot work."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: expected 0 to 65535, got {self.port}")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key: expected a non-empty text, got an empty one")
        if self.max_body_mb <= 0:
            raise ValueError(f"max_body_mb: expected a number above 0, got {self.max_body_mb}")
        if self.drain_timeout < 0:
            raise ValueError(f"drain_timeout: expected 0 or more seconds, got {self.drain_timeout}")
