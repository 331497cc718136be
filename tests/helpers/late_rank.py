"""A rank that comes late on purpose: not before its peers have said that they wait in vain.

However slow the machine is, none of them meets it by chance.
"""

from multiprocessing import get_context


class Told:
    """How many ranks have said it; made before the fork."""

    def __init__(self):
        self._said = get_context("fork").Semaphore(0)

    def say(self):
        self._said.release()

    def wait_for(self, count, limit_s=60.0):
        for _ in range(count):
            assert self._said.acquire(timeout=limit_s), f"need {count} ranks that say it"
