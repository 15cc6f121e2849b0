"""The run-time type checker that tests/conftest.py applies to every function of jaxinfer, through jaxtyping."""

from beartype import BeartypeConf, beartype

# The numeric tower: an int is accepted where a float is annotated, as type checkers and callers expect.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
