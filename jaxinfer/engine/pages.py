"""Which page of the cache belongs to whom: integer book-keeping on the host."""

from jaxinfer.engine.request import Sequence
from jaxinfer.sharding.layout import Layout


class PageAllocator:
    """Free lists of the pages on every cp rank of every replica.

    A sequence owns `sequence.pages[rank]`, in the order of its local indices; no page has two owners.
    """

    def __init__(self, replicas: int, layout: Layout, pages_per_rank: int):
        self.layout = layout
        self.pages_per_rank = pages_per_rank
        self._free = [[list(range(pages_per_rank - 1, -1, -1)) for _ in range(layout.cp)] for _ in range(replicas)]
        self._used = [[bytearray(pages_per_rank) for _ in range(layout.cp)] for _ in range(replicas)]

    @property
    def total(self) -> int:
        """Pages of all ranks and replicas."""
        return len(self._free) * self.layout.cp * self.pages_per_rank

    @property
    def total_free(self) -> int:
        """Free pages of all ranks and replicas."""
        return sum(len(free) for ranks in self._free for free in ranks)

    def free_pages(self, replica: int) -> list[int]:
        """Free pages on each rank of a replica."""
        return [len(free) for free in self._free[replica]]

    def choose_home(self, length: int, available: list[int]) -> int | None:
        """The home rank for a sequence of `length` tokens, given the pages `available` on each rank: of the ranks with
        which it fits the one with most pages, so that short prompts spread; None if it does not fit."""
        need = [self.layout.pages_needed(length, turn, 0) for turn in range(self.layout.cp)]
        for home in sorted(range(self.layout.cp), key=lambda rank: (-available[rank], rank)):
            if all(need[(rank - home) % self.layout.cp] <= pages for rank, pages in enumerate(available)):
                return home
        return None

    def no_pages(self) -> list[list[int]]:
        """`Sequence.pages` of a sequence that holds none."""
        return [[] for _ in range(self.layout.cp)]

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Gives the sequence the pages it lacks for its first `length` tokens: all of them, or none and False."""
        free = self._free[sequence.replica]
        missing = [
            self.layout.pages_needed(length, rank, sequence.home) - len(pages)
            for rank, pages in enumerate(sequence.pages)
        ]
        if any(count > len(free[rank]) for rank, count in enumerate(missing)):
            return False
        used = self._used[sequence.replica]
        for rank, count in enumerate(missing):
            for _ in range(count):
                page = free[rank].pop()
                used[rank][page] = 1
                sequence.pages[rank].append(page)
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes all pages of the sequence back.  Raises ValueError for a page that is free already."""
        for rank, pages in enumerate(sequence.pages):
            used = self._used[sequence.replica][rank]
            for page in pages:
                if not used[page]:
                    raise ValueError(f"expected page {page} of rank {rank}, replica {sequence.replica} to be in use")
                used[page] = 0
            self._free[sequence.replica][rank].extend(pages)
        sequence.pages = self.no_pages()
