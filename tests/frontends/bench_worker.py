"""A worker that does what it is asked to: `answer` back, `raise`, `exit` or `hang`."""

import os
import time

from jaxinfer.bench import workers


def do(what: str, value: int = 0) -> dict:
    """Also says which process answers."""
    if what == "raise":
        raise ValueError("as asked")
    if what == "exit":
        os._exit(7)
    if what == "hang":
        time.sleep(600)
    return {"value": value, "pid": os.getpid()}


if __name__ == "__main__":
    workers.work(do)
