"""The training run: schedule, compiled programs, clocks, and what is written down on the way."""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.configs.model import ModelConfig
from launch.bundled_model import data, export, loss, model, optimizer
from launch.bundled_model.checkpoint import restore, save
from launch.bundled_model.data import Batch, Loader
from launch.bundled_model.report import Tally, held_out_report

SHORT = 2048
SHORT_EVERY = 4
"""In the phases of longer sequences every so-manieth step takes short ones."""
WARM_UP = 0.01
FINAL_RATE = 0.05
BIAS_RATE = 1e-3
BIAS_REST = 0.1
"""Last share of the training in which the routers' biases rest."""
MTP_WEIGHTS = (0.3, 0.1)
"""Before and in the last phase."""
CLIP_EVERY = 25
SCORE_LIMIT = 100.0
LOG_SECONDS = 20.0
EVALUATE_SECONDS = 90.0
SAVE_SECONDS = 75.0
RESERVE_SECONDS = 25.0
"""Kept at the end of a call for the last evaluation, checkpoint and export."""
AHEAD_STEPS = 2
"""Steps that may be under way on the device while the host goes on."""


class Schedule:
    """Phases of sequence lengths, and what the step sizes are at a time, in minutes of training."""

    def __init__(self, phases: str, decay_from: float):
        """`phases` is "LENGTH:MINUTES,..."; the learning rate falls from `decay_from` minutes to the end."""
        self.phases = [(int(n), float(m)) for n, m in (item.split(":") for item in phases.split(","))]
        self.total = sum(minutes for _, minutes in self.phases)
        self.decay_from = decay_from
        if not 0 <= decay_from < self.total:
            raise ValueError(f"expected --decay-from below the {self.total} minutes of the phases, got {decay_from}")

    @property
    def lengths(self) -> list[int]:
        return sorted({SHORT, *(length for length, _ in self.phases)})

    def phase(self, minutes: float) -> int:
        """Which phase it is, counted from 0."""
        end = 0.0
        for number, (_, duration) in enumerate(self.phases):
            end += duration
            if minutes < end:
                return number
        return len(self.phases) - 1

    def length(self, minutes: float, step: int) -> int:
        """Tokens of a sequence at a step."""
        length = self.phases[self.phase(minutes)][0]
        return SHORT if step % SHORT_EVERY == 0 else length

    def knobs(self, minutes: float) -> optimizer.Knobs:
        """Learning rate, bias step and weight of the multi-token prediction."""
        rate = min(1.0, minutes / (WARM_UP * self.total) + 0.01)
        if minutes > self.decay_from:
            done = (minutes - self.decay_from) / (self.total - self.decay_from)
            rate *= max(1.0 - (1.0 - FINAL_RATE) * done, FINAL_RATE)
        bias = 0.0 if minutes > (1 - BIAS_REST) * self.total else BIAS_RATE
        last = self.phase(minutes) == len(self.phases) - 1
        return optimizer.Knobs(np.float32(rate), np.float32(bias), np.float32(MTP_WEIGHTS[last]))


class Programs:
    """The compiled programs, compiled in threads: training begins when the first is ready."""

    def __init__(self, config: ModelConfig, state: optimizer.State, rows: dict[int, int], attention: model.Attention):
        dtype = jnp.bfloat16
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
        knobs = optimizer.Knobs(*(jax.ShapeDtypeStruct((), jnp.float32),) * 3)
        step = jax.jit(partial(optimizer.train_step, config=config, dtype=dtype, attention=attention), donate_argnums=0)
        correct = jax.jit(partial(loss.correct_tokens, config=config, dtype=dtype, attention=attention))
        probe = jax.jit(partial(_clip, config, dtype), donate_argnums=0)
        pool = ThreadPoolExecutor(8)
        self._futures: dict[str, Future[Callable]] = {}
        for length in sorted(rows):
            batch = _abstract_batch(rows[length], length)
            self._futures[f"step {length}"] = pool.submit(_compile, step, abstract, batch, knobs)
        tokens = jax.ShapeDtypeStruct((1, SHORT), jnp.int32)
        self._futures["clip"] = pool.submit(_compile, probe, abstract.params, tokens)
        for length in sorted(rows):
            batch = _abstract_batch(_evaluation_rows(length), length)
            self._futures[f"correct {length}"] = pool.submit(_compile, correct, abstract.params, batch)

    def get(self, name: str) -> Callable:
        return self._futures[name].result()

    def ready(self, name: str) -> bool:
        return self._futures[name].done()


def _compile(function: Any, *arguments: Any) -> Callable:
    return function.lower(*arguments).compile()


def _clip(config: ModelConfig, dtype: Any, params: model.Tree, tokens: jax.Array) -> tuple[model.Tree, jax.Array]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    largest = model.largest_scores(config, model.cast(params, dtype), tokens, positions)
    return model.clip_queries_and_keys(config, params, largest, SCORE_LIMIT), jnp.max(largest)


def _abstract_batch(rows: int, length: int) -> Batch:
    shape = (rows, length + data.LOOKAHEAD)
    return Batch(
        jax.ShapeDtypeStruct(shape, jnp.uint16),
        jax.ShapeDtypeStruct(shape, jnp.uint16),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def _evaluation_rows(length: int) -> int:
    return max(8, 131072 // length)


class Trainer:
    """A run: state, data, programs and clocks."""

    def __init__(self, args: argparse.Namespace, begun: float):
        self.begun, self.args = begun, args
        jax.config.update("jax_compilation_cache_dir", str(args.work / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self.schedule = Schedule(args.phases, args.decay_from)
        self.config = export.bundled_config()
        cache = args.work / "tokens"
        data.prepare(args.corpus, cache, args.seed)
        self.loader = Loader(args.corpus, cache, args.seed, args.workers, ahead=2 * args.workers)
        self.rows = {length: max(1, args.batch_tokens // length) for length in self.schedule.lengths}
        self.state = jax.jit(optimizer.initial_state, static_argnums=(0, 1))(self.config, args.seed)
        self.trained, self.batches = args.start_minutes * 60, dict.fromkeys(self.schedule.lengths, 0)
        if args.start_from is not None:
            params = export.parameters(self.config, args.start_from)
            self.state = self.state._replace(params=jax.tree.map(jnp.asarray, params))
        saved = restore(args.work / "checkpoint.npz", self.state)
        if saved is not None:
            self.state, progress = saved
            self.trained = progress["trained"]
            self.batches |= {int(length): number for length, number in progress["batches"].items()}
        self.programs = Programs(self.config, self.state, self.rows, args.attention)
        held = data.load(args.corpus, cache, held_out=True)
        self.held = {n: data.make_batch(held, args.seed, n, _evaluation_rows(n), 0) for n in self.schedule.lengths}
        self.held_sizes = data.bytes_per_token(args.corpus, cache)
        self.streams = {n: self.loader.stream(n, self.rows[n], self.batches[n]) for n in self.schedule.lengths}
        self.log = (args.out / "metrics.jsonl").open("a")
        self.largest_score = jnp.float32(0)
        self.say(event="start", device=jax.devices()[0].device_kind, trained_minutes=self.trained / 60)

    def say(self, **values: Any):
        """A line on the screen and in the metrics."""
        values = {"wall_s": round(time.monotonic() - self.begun, 1), **values}
        self.log.write(json.dumps(values) + "\n")
        self.log.flush()
        print(" ".join(f"{name}={_short(value)}" for name, value in values.items()), flush=True)

    def left(self) -> float:
        """Seconds of this call that may still go into training."""
        return self.args.minutes * 60 - RESERVE_SECONDS - (time.monotonic() - self.begun)

    def next_batch(self, length: int) -> Batch:
        self.batches[length] += 1
        return self.streams[length].next()

    def step(self, length: int, knobs: optimizer.Knobs) -> tuple[loss.Report, jax.Array]:
        batch = jax.device_put(self.next_batch(length))
        self.state, report, norm = self.programs.get(f"step {length}")(self.state, batch, knobs)
        return report, norm

    def clip(self, batch: Batch):
        """Clips queries and keys, and keeps the largest score."""
        params, self.largest_score = self.programs.get("clip")(
            self.state.params, jnp.asarray(batch.tokens[:1, :SHORT].astype(np.int32))
        )
        self.state = self.state._replace(params=params)

    def evaluate(self):
        """Held-out bits per byte of each part and accuracy of whole answers, by length."""
        for length in self.schedule.lengths:
            if not self.programs.ready(f"correct {length}"):
                continue
            batch = self.held[length]
            right, nll = self.programs.get(f"correct {length}")(self.state.params, jax.device_put(batch))
            report = held_out_report(batch, np.asarray(right), np.asarray(nll), self.held_sizes)
            self.say(event="held-out", length=length, **report)

    def save(self):
        """A checkpoint to continue from."""
        progress = {"trained": self.trained, "batches": self.batches}
        save(self.args.work / "checkpoint.npz", self.state, progress)

    def run(self):
        """Trains until the schedule or this call is over."""
        tally, running, clip_batch = Tally(), [], self.held[SHORT]
        self.programs.get(f"step {SHORT}")
        self.say(event="compiled")
        logged = evaluated = saved = clock = time.monotonic()
        steps = int(self.state.step)
        while self.left() > 0 and self.trained < self.schedule.total * 60:
            minutes = self.trained / 60
            length = self.schedule.length(minutes, steps)
            name = f"step {length}"
            if not self.programs.ready(name):
                self.programs.get(name)
                clock = time.monotonic()
            report, norm = self.step(length, self.schedule.knobs(minutes))
            steps += 1
            running.append((length, report, norm))
            if len(running) > AHEAD_STEPS:
                tally.add(*jax.device_get(running.pop(0)), self.rows)
            if steps % CLIP_EVERY == 0:
                self.clip(clip_batch)
            now = time.monotonic()
            self.trained, clock = self.trained + now - clock, now
            if now - logged > LOG_SECONDS:
                line = tally.line(now - logged)
                score = round(float(self.largest_score), 1)
                bias = jax.device_get(self.state.params["moe"]["moe"]["router_bias"])
                line |= {"s_max": score, "bias": float(np.abs(bias).max())}
                self.say(step=steps, minutes=round(self.trained / 60, 2), **line)
                if not np.isfinite(line["loss"]):
                    raise FloatingPointError("the loss is not finite: continue from the checkpoint at a lower rate")
                tally, logged = Tally(), now
            if now - evaluated > EVALUATE_SECONDS:
                self.evaluate()
                evaluated = time.monotonic()
            if now - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
            if evaluated > now or saved > now:
                clock = time.monotonic()
                logged += clock - now
        self.save()
        self.evaluate()
        export.export(
            self.args.out / "model",
            self.config,
            export.HF_CONFIG,
            jax.device_get(self.state.params),
            self.args.corpus / "tokenizer.json",
        )
        done = self.trained >= self.schedule.total * 60
        self.say(event="complete" if done else "stopped", step=steps, minutes=round(self.trained / 60, 2))

    def smoke(self, steps: int = 12):
        """Compiles every program and measures each step, keeping nothing."""
        for length in self.schedule.lengths:
            self.programs.get(f"step {length}")
            self.say(event="compiled", length=length)
        knobs = self.schedule.knobs(1.0)
        for length in self.schedule.lengths:
            for _ in range(3):
                report, norm = self.step(length, knobs)
            jax.block_until_ready(norm)
            begun = time.monotonic()
            for _ in range(steps):
                report, norm = self.step(length, knobs)
            first = float(norm)
            seconds = time.monotonic() - begun
            rate = steps * self.rows[length] * length / seconds
            memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
            line = {"tokens_per_s": round(rate), "step_ms": 1e3 * seconds / steps, "peak_gib": memory}
            self.say(event="speed", length=length, **line, loss=float(report.loss), grad=first)
            # The same batch again and again: the device alone.
            batch = jax.device_put(self.next_batch(length))
            begun = time.monotonic()
            for _ in range(steps):
                self.state, report, norm = self.programs.get(f"step {length}")(self.state, batch, knobs)
            jax.block_until_ready(norm)
            self.say(event="device", length=length, step_ms=1e3 * (time.monotonic() - begun) / steps)
        self.clip(self.held[SHORT])
        self.evaluate()
        self.say(event="smoke over", s_max=float(self.largest_score))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}:{_short(item)}" for name, item in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
