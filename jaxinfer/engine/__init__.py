"""The engine: requests, page allocation, scheduling, the step loop.  Only `runner.py` and `sampling.py` import jax."""
