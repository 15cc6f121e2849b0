"""Run-time checks of the annotations of jaxinfer while the tests run: jaxtyping's import hook with beartype."""

from typing import Any

import jax
import jaxtyping
from beartype import BeartypeConf, beartype

# The numeric tower: an int is accepted where a float is annotated, as type checkers and callers expect.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Makes every later import of a module of jaxinfer decorate its functions and dataclasses with `checked`."""
    register = jax.tree_util.register_dataclass

    def register_unchecked(nodetype: type, *args: Any, **kwargs: Any) -> type:
        # `jax.tree.map` builds such a class with specifications, None or anything else in place of its arrays.
        nodetype.__no_type_check__ = True
        return register(nodetype, *args, **kwargs)

    jax.tree_util.register_dataclass = register_unchecked
    jaxtyping.install_import_hook("jaxinfer", f"{__name__}.checked")
