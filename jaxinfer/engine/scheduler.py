"""Who computes what in the next step: continuous batching with chunked prefill, pages, fairness, preemption.

Rules, for each replica on its own:

* Every running sequence decodes in every step.
* The rest of the step is prefill, at most `chunk_size` tokens on each rank.  The oldest prompt is guaranteed half of
  it; what it leaves goes to the other prompts, shortest remainder first, and then to the oldest again.  So a short
  prompt that arrives during a long one is done within two steps, and a stream of short ones does not starve a long
  one.  Where a chunk cannot be halved (one stripe per rank, or one segment per step) the two take turns.
* Pages are taken as the tokens come.  When they run out, a sequence takes those of the youngest one, which goes back
  to waiting and computes its prompt and its output so far again; only younger sequences are robbed.  The oldest can
  therefore always go on, as it was admitted only if the pages hold it alone.
* A sequence whose step raised is a suspect: it runs alone, every other step, until it has decoded a token.  So one bad
  request does not take others with it a second time.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from jaxinfer.engine.pages import PageAllocator
from jaxinfer.engine.request import Sequence, Status
from jaxinfer.engine.step import Capacity, PrefillSegment, Step
from jaxinfer.sharding.layout import Layout


def _age(sequence: Sequence) -> int:
    return sequence.order


def _remainder(sequence: Sequence) -> tuple[int, int]:
    return len(sequence.token_ids) - sequence.num_computed, sequence.order


@dataclass
class _Queues:
    """The sequences of one replica, oldest first: `prompts` are WAITING or in PREFILL, `running` are RUNNING.

    `outstanding` counts the tokens that they have yet to compute, if each takes all it may.
    """

    replica: int
    prompts: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    outstanding: int = 0
    others_turn: bool = False

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.prompts, self.running)

    @property
    def started(self) -> int:
        """Sequences that hold one of the `max_num_seqs` places."""
        return len(self.running) + sum(sequence.status is Status.PREFILL for sequence in self.prompts)


def _longest_segment(layout: Layout, sequence: Sequence, tokens: list[int], pages: list[int]) -> int:
    """The longest next segment of at most `tokens[rank]` tokens on each rank, in the sequence's pages and `pages[rank]`
    more: all that remains of it, or whole rounds of the layout."""
    start, home = sequence.num_computed, sequence.home
    allowance = [
        min(tokens[rank], (len(owned) + pages[rank]) * layout.page_size - layout.local_length(start, rank, home))
        for rank, owned in enumerate(sequence.pages)
    ]
    remaining = len(sequence.token_ids) - start
    # `start` is at a round's beginning, so the segment lies on the ranks as a sequence of its own length does.
    if all(layout.local_length(remaining, rank, home) <= room for rank, room in enumerate(allowance)):
        return remaining
    rounds = min(remaining // layout.round_tokens, min(allowance) // layout.stripe)
    return max(0, rounds) * layout.round_tokens


class _Pack:
    """The prefill segments of one replica in one step, and the room that is left: tokens per rank."""

    def __init__(self, capacity: Capacity):
        self.layout = capacity.layout
        self.tokens = [capacity.chunk_size] * capacity.layout.cp
        self.max_segments = capacity.max_segments
        self.segments: list[PrefillSegment] = []

    @property
    def full(self) -> bool:
        return len(self.segments) == self.max_segments or not any(self.tokens)

    def add(self, sequence: Sequence, count: int) -> PrefillSegment:
        """Adds a segment of `count` tokens, whose pages are allocated."""
        sequence.status = Status.PREFILL
        segment = PrefillSegment(sequence=sequence, start=sequence.num_computed, count=0)
        self.segments.append(segment)
        self.resize(segment, count)
        return segment

    def resize(self, segment: PrefillSegment, count: int) -> None:
        """Changes the length of a segment of the pack."""
        home = segment.sequence.home
        for rank in range(self.layout.cp):
            more = self.layout.local_length(count, rank, home) - self.layout.local_length(segment.count, rank, home)
            self.tokens[rank] -= more
        segment.count = count


class Scheduler:
    """Owns the queues and the pages.  `schedule` makes a step, `commit` books it once it is computed."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self.layout = capacity.layout
        self.pages = PageAllocator(capacity.replicas, capacity.layout, capacity.pages_per_rank)
        self.preemptions = 0
        self._queues = [_Queues(replica) for replica in range(capacity.replicas)]
        self._next_order = 0
        self._suspects_turn = False

    # Sequences come and go.

    def __iter__(self) -> Iterator[Sequence]:
        """Every unfinished sequence."""
        return chain.from_iterable(self._queues)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence at the replica with the fewest outstanding tokens."""
        sequence.order, self._next_order = self._next_order, self._next_order + 1
        queues = min(self._queues, key=lambda queues: queues.outstanding)
        sequence.replica = queues.replica
        sequence.pages = self.pages.no_pages()
        queues.outstanding += sequence.final_length
        queues.prompts.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends an unfinished sequence, wherever it stands, and takes its pages back."""
        self._leave(sequence)
        self._queues[sequence.replica].outstanding -= sequence.final_length - sequence.num_computed
        sequence.status = Status.FINISHED

    def requeue(self, sequence: Sequence) -> None:
        """Sends an unfinished sequence back to waiting, to be computed again from its first token."""
        self._leave(sequence)
        queues = self._queues[sequence.replica]
        queues.outstanding += sequence.num_computed
        sequence.num_computed = 0
        sequence.status = Status.WAITING
        insort(queues.prompts, sequence, key=_age)

    def _leave(self, sequence: Sequence) -> None:
        queues = self._queues[sequence.replica]
        (queues.running if sequence.status is Status.RUNNING else queues.prompts).remove(sequence)
        self.pages.release(sequence)

    def counts(self) -> dict[Status, int]:
        """How many sequences wait, are in prefill and run."""
        running = sum(len(queues.running) for queues in self._queues)
        prefill = sum(queues.started for queues in self._queues) - running
        waiting = sum(len(queues.prompts) for queues in self._queues) - prefill
        return {Status.WAITING: waiting, Status.PREFILL: prefill, Status.RUNNING: running}

    # Steps.

    def schedule(self) -> Step:
        """The next step; empty only if there is no sequence."""
        suspect = min((sequence for sequence in self if sequence.suspect), key=_age, default=None)
        if suspect is None:
            return self._plan(lambda sequence: True)
        self._suspects_turn = not self._suspects_turn
        plans = [lambda sequence: sequence is suspect, lambda sequence: not sequence.suspect]
        step = self._plan(plans[0 if self._suspects_turn else 1])
        # The oldest sequence of the suspect's replica can always go on: it is the suspect, or none at all.
        return self._plan(plans[1 if self._suspects_turn else 0]) if step.empty else step

    def commit(self, step: Step) -> None:
        """Books a computed step, before its tokens are appended."""
        for segment in chain.from_iterable(step.prefill):
            sequence = segment.sequence
            queues = self._queues[sequence.replica]
            queues.outstanding -= segment.count
            sequence.num_computed = segment.end
            if segment.ends_prompt:
                queues.prompts.remove(sequence)
                sequence.status = Status.RUNNING
                insort(queues.running, sequence, key=_age)
        for sequence in chain.from_iterable(step.decode):
            self._queues[sequence.replica].outstanding -= 1
            sequence.num_computed += 1
            sequence.suspect = False

    def _plan(self, allowed: Callable[[Sequence], bool]) -> Step:
        step = Step(prefill=[], decode=[])
        for queues in self._queues:
            prompts = [sequence for sequence in queues.prompts if allowed(sequence)]
            running = [sequence for sequence in queues.running if allowed(sequence)]
            segments, rows = self._plan_replica(queues, prompts, running)
            step.prefill.append(segments)
            step.decode.append(rows)
        return step

    def _plan_replica(
        self, queues: _Queues, prompts: list[Sequence], running: list[Sequence]
    ) -> tuple[list[PrefillSegment], list[Sequence]]:
        pack, rows = _Pack(self.capacity), []
        lead = prompts[0] if prompts else None
        share = self._share_of_lead(queues, len(prompts) > 1)
        # The oldest first: whoever is robbed in this loop has not had its turn yet.
        for sequence in sorted([*running, *prompts[:1]], key=_age):
            if sequence is lead:
                self._guarantee(queues, pack, sequence, share)
            elif sequence.status is Status.RUNNING and self._grow(queues, sequence, len(sequence.token_ids)):
                rows.append(sequence)
        self._fill(queues, pack, prompts[1:])
        if lead is not None:
            self._extend(queues, pack, lead)
            if not pack.segments and not rows:
                self._guarantee(queues, pack, lead, self.capacity.chunk_size, rob_place=True)
        return pack.segments, rows

    def _share_of_lead(self, queues: _Queues, shared: bool) -> int:
        """Tokens per rank that the oldest prompt is guaranteed in this step."""
        stripes = self.capacity.chunk_size // self.layout.stripe
        if not shared:
            return self.capacity.chunk_size
        if stripes > 1 and self.capacity.max_segments > 1:
            return (stripes + 1) // 2 * self.layout.stripe
        queues.others_turn = not queues.others_turn
        return 0 if queues.others_turn else self.capacity.chunk_size

    def _guarantee(self, queues: _Queues, pack: _Pack, lead: Sequence, share: int, rob_place: bool = False) -> None:
        """Packs up to `share` tokens per rank of the oldest prompt, in pages taken from younger sequences if need be.

        `rob_place` takes the youngest sequence's place too: for a replica in which nobody could do anything.
        """
        reachable = self._reachable(queues, lead)
        if lead.status is Status.WAITING:
            if not self._find_home(lead, reachable):
                return
            if queues.started >= self.capacity.max_num_seqs:
                youngest = max((other for other in queues if other.status is not Status.WAITING), key=_age)
                if not rob_place or youngest.order < lead.order:
                    return
                self._preempt(youngest)
        count = _longest_segment(self.layout, lead, [share] * self.layout.cp, reachable)
        if count and self._grow(queues, lead, lead.num_computed + count):
            pack.add(lead, count)

    def _fill(self, queues: _Queues, pack: _Pack, others: list[Sequence]) -> None:
        """Packs the prompts behind the oldest, shortest remainder first, in free pages."""
        places = self.capacity.max_num_seqs - queues.started
        for sequence in sorted(others, key=_remainder):
            if pack.full:
                return
            free = self.pages.free_pages(queues.replica)
            waiting = sequence.status is Status.WAITING
            if waiting and (places <= 0 or not self._find_home(sequence, free)):
                places = 0  # the next that waits is longer: it does not fit either
                continue
            count = _longest_segment(self.layout, sequence, pack.tokens, free)
            if count and self.pages.grow(sequence, sequence.num_computed + count):
                pack.add(sequence, count)
                places -= waiting

    def _extend(self, queues: _Queues, pack: _Pack, lead: Sequence) -> None:
        """Gives the oldest prompt the room that the others left, as far as the free pages reach."""
        segment = next((segment for segment in pack.segments if segment.sequence is lead), None)
        if segment is None:
            self._fill(queues, pack, [lead])
            return
        free = self.pages.free_pages(queues.replica)
        reserved = [self.layout.local_length(segment.count, rank, lead.home) for rank in range(self.layout.cp)]
        room = [left + own for left, own in zip(pack.tokens, reserved, strict=True)]
        count = _longest_segment(self.layout, lead, room, free)
        if count > segment.count and self.pages.grow(lead, lead.num_computed + count):
            pack.resize(segment, count)

    def _find_home(self, sequence: Sequence, available: list[int]) -> bool:
        """Sets the home of a waiting sequence, if the `available` pages hold all of it and one page more on each rank:
        it is not begun only to be robbed at once."""
        spare = self.layout.page_size * self.layout.cp
        home = self.pages.choose_home(min(len(sequence.token_ids) + spare, sequence.final_length), available)
        if home is not None:
            sequence.home = home
        return home is not None

    def _reachable(self, queues: _Queues, sequence: Sequence) -> list[int]:
        """Pages on each rank that are free or held by younger sequences."""
        pages = self.pages.free_pages(queues.replica)
        for other in queues:
            if other.order > sequence.order:
                for rank, owned in enumerate(other.pages):
                    pages[rank] += len(owned)
        return pages

    def _grow(self, queues: _Queues, sequence: Sequence, length: int) -> bool:
        """Gives a sequence the pages for `length` tokens, robbing younger ones if it must; False, and nobody is robbed,
        if that is not enough."""
        if self.pages.grow(sequence, length):
            return True
        reachable = self._reachable(queues, sequence)
        for rank, owned in enumerate(sequence.pages):
            if self.layout.pages_needed(length, rank, sequence.home) > len(owned) + reachable[rank]:
                return False
        while not self.pages.grow(sequence, length):
            self._preempt(max((other for other in queues if any(other.pages)), key=_age))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self.requeue(sequence)
