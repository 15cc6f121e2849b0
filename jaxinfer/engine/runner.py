"""The only border between host and device: scheduled steps in, sampled tokens out."""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.cache import Cache, allocate
from jaxinfer.configs.attention import Dense, Hybrid
from jaxinfer.configs.kv_format import KVFormat
from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.anchors import Anchors
from jaxinfer.engine.batching import Batcher, Packed, logit_rules, needs_rules, sampling_rows
from jaxinfer.engine.compilations import CompilationCounter
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.reads import ReadCounter
from jaxinfer.engine.request import Sequence
from jaxinfer.engine.sampling import Choice, pack_rows
from jaxinfer.engine.step import Capacity, PrefillSegment, PromptRows, Sampled, SegmentResult, Step, StepResult
from jaxinfer.model.batch import Batch, Form, pack
from jaxinfer.model.params import Tree
from jaxinfer.model.precision import Precision
from jaxinfer.model.transformer import Transformer
from jaxinfer.sharding.rules import Rules

log = logging.getLogger(__name__)

_MOST_COMPILERS = 8
"""Programs that compile at a time on a GPU: tracing has one thread at a time, XLA and ptxas have the others."""


class Runner:
    """Runs steps of one model on one mesh.  Implements `jaxinfer.engine.step.Runner`.

    Args:
        config: the model.
        precision: in which it is held and computed.
        params: its weights, laid out as `parameter_specs` says.
        tables: `{"cos", "sin"}`, float32 `[max_context, rope / 2]`, and for a hybrid policy `"index"`, the projections
            of all layers (see `model.index`), and `"voters"`, of each of the policies (see `model.voters`); replicated.
        policy: which positions its queries read.
        formats: of the layers' caches, one for each.
        anchors: finds the anchors of a hybrid policy.
        cache: shape, type and sharding of the cache's arrays, as `cache_spec` makes them for `formats` and `policy`.
        capacity: what the scheduler may ask for.
        tile_tokens: tokens of context on each rank that prefill attention reads at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        params: Tree,
        tables: Tree,
        policy: Dense | Hybrid,
        formats: tuple[KVFormat, ...],
        anchors: Anchors | None,
        cache: Cache,
        capacity: Capacity,
        rules: Rules,
        mesh: Mesh,
        tile_tokens: int,
    ):
        self.config, self.precision, self.policy, self.capacity = config, precision, policy, capacity
        self.params, self.tables = params, tables
        self._cache_spec, self.cache = cache, allocate(cache)
        self._eos_ids = config.eos_token_ids
        self.rules, self.mesh = rules, mesh
        self._batcher = Batcher(capacity, tile_tokens, policy, anchors)
        ranks = capacity.replicas, capacity.layout.cp
        self._by_rank = rules.sharding(mesh, ("replica", "context"), ranks)
        self._by_replica = rules.sharding(mesh, ("replica",), ranks[:1])
        model = Transformer(config, precision, policy, formats)
        self._reads = ReadCounter(model.policies) if isinstance(policy, Hybrid) else None
        self._programs = Programs(model, params, rules, mesh, capacity.layout, self.cache)
        self.compilations = CompilationCounter()
        """Counts from the end of `compile` on: stays at 0."""

    def compile(self, progress: Any = None) -> None:
        """Compiles every program for every shape that a step can have, and runs each on an empty batch.

        `progress` is called with lines of text about what goes on.
        """
        say = progress or (lambda text: None)
        replicas, width = self.capacity.replicas, self.capacity.max_segments
        nobody: list[list[Any]] = [[] for _ in range(replicas)]
        started = time.monotonic()
        self._compile_steps(nobody, say)
        logits = None
        for tokens in self._batcher.prefill_buckets:
            hidden = self._run_prefill(self._batcher.prefill(nobody, tokens))
            logits = self._row_logits(hidden, nobody)
        say("sampling")
        for rows in self._batcher.decode_buckets:
            self._sample(self._run_decode(nobody, rows), nobody, rows)
            self._sample(self._run_decode(nobody, rows), nobody, rows, with_rules=True)
        assert logits is not None
        for with_rules in (False, True):
            self._sample(logits, nobody, width, with_rules)
        jax.block_until_ready(self._score(logits, np.zeros((replicas, width), np.int32)))
        jax.block_until_ready(self.cache)
        self.compilations = CompilationCounter()
        log.info("compiled all shapes in %.1f s", time.monotonic() - started)

    def _compile_steps(self, nobody: list[list[Any]], say: Callable[[str], None]) -> None:
        """Compiles prefill and decode of all shapes, several at a time; the first call of each finds it compiled."""
        batcher, programs = self._batcher, self._programs
        shapes: list[tuple[str, Any, Batch]] = [
            *(
                (f"prefill of {tokens} tokens per rank", programs.prefill, batcher.prefill(nobody, tokens).batch)
                for tokens in batcher.prefill_buckets
            ),
            *(
                (f"decode of {rows} sequences", programs.decode, batcher.decode(nobody, rows))
                for rows in batcher.decode_buckets
            ),
        ]

        def compile_one(shape: tuple[str, Any, Batch]) -> str:
            name, program, batch = shape
            program.lower(self.params, self.cache, self.tables, *self._put(batch)).compile()
            return name

        say(f"prefill and decode: none of {len(shapes)} shapes ready")
        with ThreadPoolExecutor(_compilers(self.mesh)) as pool:
            compiled = [pool.submit(compile_one, shape) for shape in shapes]
            try:
                for done, future in enumerate(as_completed(compiled), 1):
                    log.info("compiled %s", future.result())
                    say(f"prefill and decode: {done} of {len(shapes)} shapes ready")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def run(self, step: Step) -> StepResult:
        """Computes one step; raises what the device raises.

        Decode is dispatched before prefill, and the tokens of both are on their way to the host while the device
        works on.
        """
        decoded = self._start_decode(step.decode) if any(step.decode) else None
        prefilled = self._prefill(step.prefill) if any(step.prefill) else [[] for _ in step.prefill]
        decode = [[] for _ in step.decode] if decoded is None else _collect(decoded, step.decode)
        # A chunk in the middle of a prompt has no token to wait for.  If the host did not wait for it, it would run
        # ahead of the device: short requests would queue behind chunks sent long before, and an error would meet
        # another step.
        jax.block_until_ready(self.cache)
        reads = self._reads.of_step(step, np.asarray(self.cache.reads)) if self._reads is not None else {}
        return StepResult(prefill=prefilled, decode=decode, reads=reads)

    def cache_alive(self) -> bool:
        """False after a step that took the cache over and failed."""
        return not any(array.is_deleted() for array in jax.tree.leaves(self.cache))

    def reset_cache(self) -> None:
        """A new cache, of zeros."""
        self.cache = allocate(self._cache_spec)

    def _put(self, batch: Batch) -> tuple[jax.Array, Form]:
        """One transfer of all arrays of a batch."""
        packed, form = pack(batch, self.capacity.replicas, self.capacity.layout.cp)
        return jax.device_put(packed, self._by_rank), form

    def _put_rows(self, arrays: Any) -> Any:
        """Arrays whose leading dimension is the replica."""
        return jax.device_put(arrays, self._by_replica)

    def _run_prefill(self, packed: Packed) -> jax.Array:
        self.cache, hidden = self._programs.prefill(self.params, self.cache, self.tables, *self._put(packed.batch))
        return hidden

    def _run_decode(self, sequences: list[list[Sequence]], rows: int | None = None) -> jax.Array:
        batch = self._put(self._batcher.decode(sequences, rows))
        self.cache, logits = self._programs.decode(self.params, self.cache, self.tables, *batch)
        return logits

    def _row_logits(self, hidden: jax.Array, places: list[list[tuple[int, int]]]) -> jax.Array:
        rows = self._batcher.rows(places)
        return self._programs.rows(self.params, hidden, *self._put_rows((rows.rank, rows.index)))

    def _sample(
        self, logits: jax.Array, sequences: list[list[Any]], width: int, with_rules: bool | None = None
    ) -> Choice:
        """Samples rows of logits `[R, width, vocab]` and starts the copy of the result to the host."""
        if with_rules is None:
            with_rules = any(needs_rules(sequence) for group in sequences for sequence in group)
        rules = logit_rules(sequences, width, self.capacity.vocab_size, self._eos_ids) if with_rules else None
        rows = pack_rows(sampling_rows(sequences, width))
        choice = self._programs.sample(logits, *self._put_rows((rows, rules)))
        for array in jax.tree.leaves(choice):
            array.copy_to_host_async()
        return choice

    def _score(self, logits: jax.Array, targets: np.ndarray) -> tuple[jax.Array, ...]:
        return self._programs.score(logits, self._put_rows(targets))

    def _start_decode(self, sequences: list[list[Sequence]]) -> Choice:
        logits = self._run_decode(sequences)
        return self._sample(logits, sequences, logits.shape[1])

    def _prefill(self, segments: list[list[PrefillSegment]]) -> list[list[SegmentResult]]:
        packed = self._batcher.prefill(segments)
        hidden = self._run_prefill(packed)
        results = [[SegmentResult() for _ in group] for group in segments]
        self._sample_ends(segments, packed, hidden, results)
        for r, group in enumerate(segments):
            for s, segment in enumerate(group):
                if segment.sequence.request.logit_rows is not None:
                    results[r][s].logits = self._segment_logits(r, segment, packed.places[r][s], hidden)
                if wants_prompt_logprobs(segment):
                    results[r][s].prompt_logprobs = self._prompt_rows(r, segment, packed.places[r][s], hidden)
        return results

    def _sample_ends(self, segments, packed: Packed, hidden: jax.Array, results: list[list[SegmentResult]]) -> None:
        """Samples the first token of every prompt that ends in this step."""
        ending = [
            [
                s
                for s, segment in enumerate(group)
                if segment.ends_prompt and segment.sequence.request.logit_rows is None
            ]
            for group in segments
        ]
        if not any(ending):
            return
        places: list[list[tuple[int, int]]] = [[] for _ in segments]
        for r, group in enumerate(ending):
            for s in group:
                rank, index = packed.places[r][s]
                places[r].append((int(rank[-1]), int(index[-1])))
        sequences = [[segments[r][s].sequence for s in group] for r, group in enumerate(ending)]
        choice = self._sample(self._row_logits(hidden, places), sequences, self.capacity.max_segments)
        for r, group in enumerate(_collect(choice, sequences)):
            for s, sampled in zip(ending[r], group, strict=True):
                results[r][s].sampled = sampled

    def _blocks(self, replica: int, rows: np.ndarray, places: tuple[np.ndarray, np.ndarray], hidden: jax.Array):
        """Logits of rows of one segment, a block of `max_segments` at a time: (rows of the block, logits)."""
        width = self.capacity.max_segments
        for first in range(0, len(rows), width):
            block = rows[first : first + width]
            wanted: list[list[tuple[int, int]]] = [[] for _ in range(self.capacity.replicas)]
            wanted[replica] = [(int(places[0][row]), int(places[1][row])) for row in block]
            yield block, self._row_logits(hidden, wanted)

    def _segment_logits(self, replica, segment: PrefillSegment, places, hidden: jax.Array) -> np.ndarray:
        rows = np.asarray(segment.logit_rows, np.int64) - segment.start
        blocks = [
            np.asarray(logits)[replica, : len(block)] for block, logits in self._blocks(replica, rows, places, hidden)
        ]
        return np.concatenate([np.zeros((0, self.capacity.vocab_size), np.float32), *blocks])

    def _prompt_rows(self, replica: int, segment: PrefillSegment, places, hidden: jax.Array) -> PromptRows:
        ids = segment.sequence.token_ids
        last = min(segment.end, len(ids) - 1)
        rows = np.arange(segment.start, last) - segment.start
        parts = []
        for block, logits in self._blocks(replica, rows, places, hidden):
            targets = np.zeros((self.capacity.replicas, self.capacity.max_segments), np.int32)
            targets[replica, : len(block)] = ids[segment.start + block[0] + 1 : segment.start + block[-1] + 2]
            scored = self._score(logits, targets)
            parts.append([np.asarray(array)[replica, : len(block)] for array in scored])
        if not parts:
            empty = np.zeros((0,), np.float32), np.zeros((0,), np.int32)
            return PromptRows(
                first_row=segment.start,
                logprobs=empty[0],
                ranks=empty[1],
                top_ids=empty[1][:, None],
                top_logprobs=empty[0][:, None],
            )
        logprobs, ranks, top_ids, top_logprobs = (np.concatenate(part) for part in zip(*parts, strict=True))
        return PromptRows(
            first_row=segment.start, logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs
        )


def wants_prompt_logprobs(segment: PrefillSegment) -> bool:
    return segment.sequence.request.params.prompt_logprobs is not None


def _collect(choice: Choice, sequences: list[list[Sequence]]) -> list[list[Sampled]]:
    """The host's form of a choice; waits for the device."""
    host = jax.tree.map(np.asarray, choice)
    return [
        [_sampled(host, r, n, sequence.request.params.logprobs) for n, sequence in enumerate(group)]
        for r, group in enumerate(sequences)
    ]


def _sampled(choice: Choice, r: int, n: int, logprobs: int | None) -> Sampled:
    token, finite = int(choice.token[r, n]), bool(choice.finite[r, n])
    if logprobs is None or choice.logprob is None:
        return Sampled(token_id=token, finite=finite)
    assert choice.rank is not None and choice.top_token is not None and choice.top_logprob is not None
    top = [(int(choice.top_token[r, n, i]), float(choice.top_logprob[r, n, i])) for i in range(logprobs)]
    return Sampled(
        token_id=token,
        logprob=float(choice.logprob[r, n]),
        rank=int(choice.rank[r, n]),
        top=top,
        finite=finite,
    )


def _compilers(mesh: Mesh) -> int:
    """How many programs compile at a time: one on CPU, whose compiler has all cores for it."""
    return min(_MOST_COMPILERS, os.cpu_count() or 1) if mesh.devices.flat[0].platform == "gpu" else 1
