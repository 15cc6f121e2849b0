"""Where each token of a sequence lives on the context-parallel ranks.

Positions are dealt to the ranks in stripes, round robin: with `cp` ranks, stripes of `stripe` tokens and a sequence
whose first stripe lies on rank `home`, position `p` lies on rank `(p // stripe + home) % cp`.  Under a causal mask this
block-cyclic order balances the work of any chunk to within one stripe per rank (the idea of striped attention,
arXiv 2311.09431), and because a token is computed by the rank that keeps its latent, cache writes need no
communication.

This module holds integer arithmetic only; every function takes Python ints, numpy arrays or traced jax arrays alike.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Block-cyclic placement of positions over `cp` ranks, in pages of `page_size` tokens.

    Raises ValueError if a size is not positive or `stripe` does not divide `page_size`.
    """

    cp: int
    stripe: int
    page_size: int

    def __post_init__(self):
        if min(self.cp, self.stripe, self.page_size) < 1:
            raise ValueError(f"expected positive sizes, got {self}")
        if self.page_size % self.stripe:
            raise ValueError(f"expected a stripe that divides the page of {self.page_size} tokens, got {self.stripe}")

    @property
    def round_tokens(self) -> int:
        """Tokens after which the deal is back at the home rank: `stripe * cp`."""
        return self.stripe * self.cp

    def rank(self, position, home):
        """The rank that computes and stores `position`."""
        return (position // self.stripe + home) % self.cp

    def local_index(self, position):
        """The index of `position` among the tokens of its sequence on its rank."""
        return position // self.round_tokens * self.stripe + position % self.stripe

    def position(self, local_index, rank, home):
        """Inverse of (`rank`, `local_index`): the position of a rank's token."""
        turn = (rank - home) % self.cp
        return (local_index // self.stripe * self.cp + turn) * self.stripe + local_index % self.stripe

    def local_length(self, length, rank, home):
        """How many of the positions `0 .. length-1` lie on `rank`; they are its local indices `0 .. n-1`."""
        turn = (rank - home) % self.cp
        stripes, rest = length // self.stripe, length % self.stripe
        return (stripes + self.cp - 1 - turn) // self.cp * self.stripe + (stripes % self.cp == turn) * rest

    def pages_needed(self, length: int, rank: int, home: int) -> int:
        """Pages that a sequence of `length` tokens occupies on `rank`."""
        return -(-self.local_length(length, rank, home) // self.page_size)
