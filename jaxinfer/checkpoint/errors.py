"""The error of a checkpoint whose content does not fit its configuration."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the message names every kind of fault found."""

    @classmethod
    def of_faults(cls, place: str, faults: dict[str, list[str]]) -> "CheckpointError":
        """One error for many faults: `faults` maps a kind ("missing") to the names; ten of each kind are shown."""
        lines = [f"the checkpoint {place} does not fit its configuration:"]
        for kind, names in faults.items():
            if names:
                more = f" and {len(names) - 10} more" if len(names) > 10 else ""
                lines.append(f"  {len(names)} {kind}: {', '.join(names[:10])}{more}")
        return cls("\n".join(lines))
