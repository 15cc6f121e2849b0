"""Nested dicts of parameters as flat ones, and back."""

from typing import Any

from jaxinfer.checkpoint.mapping import TreePath


def flatten(tree: dict[str, Any], at: TreePath = ()) -> dict[TreePath, Any]:
    """`{"a": {"b": 1}}` to `{("a", "b"): 1}`, in order."""
    flat: dict[TreePath, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, (*at, key)) if isinstance(value, dict) else {(*at, key): value}
    return flat


def unflatten(flat: dict[TreePath, Any]) -> dict[str, Any]:
    """Inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return tree
