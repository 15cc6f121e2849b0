"""What is timed on a GPU is alone on it; other workers compile meanwhile."""

import fcntl
import os

LOCK = "CHECK_LOCK"
"""The variable of the environment that names the file."""


class Alone:
    """Holds the card while something is timed."""

    def __enter__(self):
        self.file = open(os.environ[LOCK], "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()
