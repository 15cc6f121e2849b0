"""Counting backend compilations: after an engine is ready there must be none."""

import weakref

import jax


class CompilationCounter:
    """Counts the programs that this process compiles or loads from the compilation cache, from its making on."""

    def __init__(self):
        self.count = 0
        # JAX offers no way to take a listener back: let it hold nothing but a weak reference.
        counter = weakref.ref(self)

        def listen(event: str, duration_secs: float, **_: object) -> None:
            owner = counter()
            if owner is not None and event == "/jax/core/compile/backend_compile_duration":
                owner.count += 1

        jax.monitoring.register_event_duration_secs_listener(listen)
