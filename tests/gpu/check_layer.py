"""Times the attention half of DeepSeek-V3 layers on one Hopper GPU, by kernel: `python -m tests.gpu.check_layer`.

Prefill of 8,192 tokens at the end of 8K and of 64K, decode of 64 sequences of 8K: what the attention kernel, the matrix
products and the rest take, with the libraries' products and with those that XLA chooses by timing.  Before that, small
forms against the reference kernels, and the kernels that write the cache and rotate queries against their jnp forms.
Cases run in processes of their own (see `workers`): all compile first, then they take turns on the GPU.
"""

import argparse
import dataclasses
import fcntl
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.bench.timing import alone, measure
from jaxinfer.configs.kv_format import FORMATS
from jaxinfer.configs.presets import preset
from jaxinfer.kernels import dispatch
from jaxinfer.kernels.cache_write import cache_write
from jaxinfer.kernels.latents import QuantizedLatents
from jaxinfer.kernels.mla_cost import absorbed_is_cheaper
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.rope import rope
from jaxinfer.sharding.mesh import AXES
from tests.gpu import workers
from tests.gpu.attention_half import Half

MODULE = "tests.gpu.check_layer"
LOCK, COMPILING = "CHECK_GPU_LOCK", "CHECK_COMPILING"
"""Environment variables with the paths of the locks that all workers share."""
HELD_SECONDS, CASE_SECONDS, REPEATS, LAYERS = 20, 100, 5, 2
ERROR = 2e-2
"""Bound on the difference from the reference kernels' bfloat16 results, relative to their norm."""
SCALE_ERROR = 2.0**-20
"""Bound on the relative difference of scales: 16 units of the last place, 5 of which other orders of addition give."""
DIMS = {"heads": 128, "nope": 128, "rope": 64, "v": 128, "kv_rank": 512}
FLAGS = "--xla_gpu_enable_command_buffer="
LIBRARY = f"{FLAGS} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"

GROUPS = {
    "attention": r"mla_prefill|mla_decode(?!_merge)",
    "merge of parts": r"mla_decode_merge",
    "products": r"gemm|nvjet|cutlass|xmma|sm90|splitK|cublas",
    "rope": r"^rope",
    "cache_write": r"cache_write",
}


@contextmanager
def compiling() -> Iterator[None]:
    """Held while a case compiles: nothing is timed beside it (see `timing`)."""
    with open(os.environ[COMPILING], "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def timing() -> Iterator[None]:
    with open(os.environ[COMPILING], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with alone(os.environ[LOCK], HELD_SECONDS):
            yield


def v3(layers: int, tile_tokens: int = 4096, kv: str = "bf16") -> Half:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), AXES)
    return Half(
        config=preset("deepseek-v3", {"num_layers": layers}), mesh=mesh, layers=layers, tile_tokens=tile_tokens, kv=kv
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def numbers(seed: jax.Array, shape: tuple[int, ...], dtype: Any, size: float) -> jax.Array:
    """Even numbers of standard deviation `size` from a hash of the index: no memory beside the result."""
    index = functools.reduce(
        lambda s, d: s * jnp.uint32(shape[d]) + jax.lax.broadcasted_iota(jnp.uint32, shape, d),
        range(len(shape)),
        jnp.uint32(0),
    )
    bits = (index + seed.astype(jnp.uint32) * jnp.uint32(97)) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    return (((bits >> 8).astype(jnp.float32) / 2**24 - 0.5) * (12**0.5 * size)).astype(dtype)


def values_of(shapes: tuple, batch: Any) -> tuple:
    """Weights, cache, x, rope and batch for a program's operands: products keep the size of what they multiply."""
    weights, cache, x, tables, _ = shapes
    columns = {"o": int(np.prod(weights["o"].shape[2:]))}
    made = {
        name: numbers(jnp.int32(n), a.shape, a.dtype, float(columns.get(name, a.shape[-1])) ** -0.5)
        for n, (name, a) in enumerate(weights.items())
    }
    made |= {name: jnp.ones(made[name].shape, jnp.bfloat16) for name in made if "norm" in name}
    held = jax.tree.map(lambda a: numbers(jnp.int32(50), a.shape, a.dtype, 40.0 if a.dtype == jnp.int8 else 1.0), cache)
    (latents,) = held.latents
    if isinstance(latents, QuantizedLatents):
        size = 1 / 40 if latents.values.dtype == jnp.int8 else 1.0
        scale = jnp.full(latents.scale.shape, size, jnp.float32)
        held = held._replace(latents=(dataclasses.replace(latents, scale=scale),))
    pairs = np.arange(tables[0].shape[1]) / tables[0].shape[1]
    angles = np.arange(tables[0].shape[0])[:, None] * np.power(10000.0, -pairs)
    rotations = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    stream = numbers(jnp.int32(60), x.shape, x.dtype, 1.0)
    put = functools.partial(jax.tree.map, lambda value, shape: jax.device_put(value, shape.sharding))
    return put((made, held, stream, rotations, batch), shapes)


def batch_of(half: Half, kind: str, tokens: int, context: int) -> tuple[Any, int]:
    return half.prefill_batch(tokens, context) if kind == "prefill" else half.decode_batch(tokens, context)


def time_half(kind: str, tokens: int, context: int, tile_tokens: int = 4096, kv: str = "bf16") -> dict:
    half = v3(LAYERS, tile_tokens, kv)
    batch, pages = batch_of(half, kind, tokens, context)
    shapes = half.operands(batch, pages)
    with compiling():
        program = half.program(batch, shapes[1]).lower(*shapes).compile()
        weights, *state, tables, places = values_of(shapes, batch)
        state[:] = jax.block_until_ready(program(weights, *state, tables, places))

    def call(_):
        state[:] = program(weights, *state, tables, places)

    def wait(_):
        jax.block_until_ready(state)

    with timing():
        found = measure(call, wait, REPEATS)
        begin = time.perf_counter()
        for _ in range(REPEATS):
            call(0)
        wait(0)
        span = (time.perf_counter() - begin) / REPEATS / LAYERS
    groups: dict[str, float] = {}
    rest: dict[str, list[float]] = {}
    for name, seconds in found.kernels:
        group = next((g for g, pattern in GROUPS.items() if re.search(pattern, name)), None)
        groups[group or "rest"] = groups.get(group or "rest", 0) + seconds / LAYERS
        if group is None:
            rest.setdefault(name, []).append(seconds / LAYERS)
    total = found.seconds / LAYERS
    other = total - groups.get("attention", 0) - groups.get("products", 0)
    said = (
        f"{1e6 * total:.0f} us a layer by {found.clock}, {1e6 * span:.0f} with gaps and copies; outside attention and "
        f"products {100 * other / total:.1f} %; "
        + ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in sorted(groups.items(), key=lambda g: -g[1]))
        + f"; {len(found.kernels) / LAYERS:.0f} kernels"
    )
    most = sorted(rest.items(), key=lambda item: -sum(item[1]))[:10]
    kernels = {f"{name[:40]} x{len(times) / LAYERS:g}": round(1e6 * sum(times), 1) for name, times in most}
    return {"said": said, "kernels": kernels, "all": [(name, seconds) for name, seconds in found.kernels]}


def check_half(kind: str, tokens: int, context: int, kv: str = "bf16") -> dict:
    """The stream and the cache after two layers, with the kernels and with the reference."""
    half = v3(LAYERS, kv=kv)
    batch, pages = batch_of(half, kind, tokens, context)
    shapes = half.operands(batch, pages)
    chosen = dispatch.choose
    with compiling():
        kernel = half.program(batch, shapes[1]).lower(*shapes).compile()
        dispatch.choose = lambda op, implementation, reason_against: "reference"
        reference = half.program(batch, shapes[1]).lower(*shapes).compile()
        dispatch.choose = chosen
        given = [values_of(shapes, batch) for _ in range(2)]
        before = np.asarray(given[0][2])
    with alone(os.environ[LOCK], HELD_SECONDS):
        one, out = jax.device_get(kernel(*given[0]))
        other, wanted = jax.device_get(reference(*given[1]))
    error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted - before))
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    # The second layer's latents are of a stream that differs in the last bits.
    found = [difference(a[0], b[0], a[0].nbytes, 1e-2) for a, b in pairs]
    said = f"error {error:.1e}; the first layer's cache: {', '.join(text for text, _ in found)}"
    good = error < ERROR and all(good for _, good in found)
    return {"said": said} if good else {"said": said, "failed": f"; bounds {ERROR} and 1e-2"}


def difference(a: np.ndarray, b: np.ndarray, written: int, bound: float) -> tuple[str, bool]:
    """How far two arrays of a cache are apart of which so many bytes were written, and whether that is within bounds.

    What is rounded to 8 or 16 bits is the same but for a share of the bytes, at most `bound`.  Scales are float32, and
    the order in which 512 squares are added shows in their last bits.
    """
    if a.dtype == np.float32:
        largest = float(np.max(np.abs(a - b) / np.maximum(np.abs(b), np.finfo(np.float32).tiny)))
        return f"scales off by {largest:.1e} of themselves", largest <= SCALE_ERROR
    share = float(np.sum(a.view(np.uint8) != b.view(np.uint8))) / written
    return f"{share:.1e} of the bytes of {a.dtype.name} differ", share < bound


def cache_operands(kv: str, tokens: int, pages: int) -> tuple:
    parts = FORMATS[kv].parts(512, 64)
    arrays = {name: jnp.zeros((2, pages, 64, count), dtype) for name, (count, dtype) in parts.items()}
    cache = QuantizedLatents(**arrays) if FORMATS[kv].quantized else arrays["values"]
    rng = np.random.default_rng(0)
    places = rng.permutation(pages * 64)[:tokens] if tokens < 1024 else np.arange(tokens)
    page, offset = jnp.asarray(places // 64, jnp.int32), jnp.asarray(places % 64, jnp.int32)
    page = page.at[-1].set(pages)
    latents = jnp.asarray(rng.normal(size=(tokens, 576)), jnp.bfloat16)
    angles = jnp.asarray(rng.uniform(0, 6, size=(tokens, 32)), jnp.float32)
    norm = jnp.asarray(rng.uniform(0.5, 2, size=512), jnp.bfloat16)
    return cache, jnp.int32(1), page, offset, latents, norm, jnp.cos(angles), jnp.sin(angles)


def check_cache_write(kv: str, tokens: int) -> dict:
    """Bits and times of the two forms, the cache taken over as in the model."""

    def write(implementation, cache, layer, page, offset, latents, norm, cos, sin):
        return cache_write(cache, layer, page, offset, latents, norm, 1e-6, cos, sin, implementation=implementation)

    answers, times = {}, {}
    with compiling():
        cache, *rest = cache_operands(kv, tokens, 2048)
        programs = {
            form: jax.jit(functools.partial(write, form), donate_argnums=0).lower(cache, *rest).compile()
            for form in ("reference", "mosaic")
        }
    for form, program in programs.items():
        state = [jax.tree.map(jnp.copy, cache)]

        def call(_, state=state, program=program):
            state[0] = program(state[0], *rest)

        with timing():
            found = measure(call, lambda _, state=state: jax.block_until_ready(state), 16)
        times[form], answers[form] = (found.seconds, len(found.kernels)), jax.device_get(state[0])
    pairs = zip(jax.tree.leaves(answers["mosaic"]), jax.tree.leaves(answers["reference"]), strict=True)
    found = [difference(a, b, tokens * a[0, 0, 0].nbytes, 1e-3) for a, b in pairs]
    said = "; ".join(f"{form} {1e6 * seconds:.1f} us in {count} kernels" for form, (seconds, count) in times.items())
    said += f"; {', '.join(text for text, _ in found)}"
    return {"said": said} if all(good for _, good in found) else {"said": said, "failed": "; bound 1e-3"}


def check_rope(tokens: int) -> dict:
    with compiling():
        q = numbers(jnp.int32(1), (tokens, 128, 192), jnp.bfloat16, 1.0)
        angles = numbers(jnp.int32(2), (tokens, 32), jnp.float32, 3.0)
        tables = jnp.cos(angles), jnp.sin(angles)
        programs = {
            form: jax.jit(functools.partial(rope, implementation=form), donate_argnums=0).lower(q, *tables).compile()
            for form in ("reference", "mosaic")
        }
    times, answers = {}, {}
    for form, program in programs.items():
        answers[form] = np.asarray(program(jnp.copy(q), *tables).astype(jnp.float32))
        state = [jnp.copy(q)]

        def call(_, state=state, program=program):
            state[0] = program(state[0], *tables)

        with timing():
            times[form] = measure(call, lambda _, state=state: jax.block_until_ready(state), 16).seconds
    differing = float(np.mean(answers["mosaic"] != answers["reference"]))
    largest = float(np.max(np.abs(answers["mosaic"] - answers["reference"])))
    said = "; ".join(f"{form} {1e6 * seconds:.1f} us" for form, seconds in times.items())
    said += (
        f"; {tokens * 128 * 64 * 4 / times['mosaic'] / 1e12:.2f} TB/s; {differing:.1e} differ, by {largest:.1e} at most"
    )
    return {"said": said} if differing < 1e-3 and largest < 0.05 else {"said": said, "failed": "; bounds 1e-3, 0.05"}


def compare_cost(keys: int, counts: tuple[int, ...]) -> dict:
    """Some queries at the end of a context, expanded and absorbed, each as a sequence of its own."""
    scale, said = 0.07, []
    with compiling():
        cache = numbers(jnp.int32(1), (1, keys // 64, 64, 576), jnp.bfloat16, 1.0)
        k_b, v_b = (numbers(jnp.int32(n), (128, 128, 512), jnp.bfloat16, 512**-0.5) for n in (2, 3))
        programs = {}
        for tokens in counts:
            q = jax.ShapeDtypeStruct((tokens, 128, 192), jnp.bfloat16)

            def expanded(q, cache, k_b, v_b, tokens=tokens):
                limit = jnp.arange(keys - tokens, keys, dtype=jnp.int32) + 1
                return mla_prefill(q, cache.reshape(keys, 576), k_b, v_b, limit, scale=scale)[0].astype(jnp.bfloat16)

            def absorbed(q, cache, k_b, v_b, tokens=tokens):
                inner = jnp.einsum("thn,hnc->thc", q[..., :128], k_b, preferred_element_type=jnp.bfloat16)
                inner = jnp.concatenate((inner, q[..., 128:]), axis=-1)[:, None]
                table = jnp.broadcast_to(jnp.arange(keys // 64, dtype=jnp.int32), (tokens, keys // 64))
                lengths = jnp.arange(keys - tokens, keys, dtype=jnp.int32) + 1
                out, _ = mla_decode(inner, cache, jnp.int32(0), table, lengths, kv_rank=512, scale=scale)
                return jnp.einsum(
                    "thc,hvc->thv", out[:, 0].astype(jnp.bfloat16), v_b, preferred_element_type=jnp.bfloat16
                )

            for name, form in (("expanded", expanded), ("absorbed", absorbed)):
                programs[tokens, name] = jax.jit(form).lower(q, cache, k_b, v_b).compile()
    for tokens in counts:
        q = numbers(jnp.int32(4), (tokens, 128, 192), jnp.bfloat16, 1.0)
        times, answers = {}, {}
        for name in ("expanded", "absorbed"):
            run = programs[tokens, name]
            answers[name] = np.asarray(run(q, cache, k_b, v_b).astype(jnp.float32))
            with timing():
                found = measure(lambda _, run=run, q=q: run(q, cache, k_b, v_b), jax.block_until_ready, 5)
            times[name] = found.seconds
        error = np.linalg.norm(answers["absorbed"] - answers["expanded"]) / np.linalg.norm(answers["expanded"])
        guess = "absorbed" if absorbed_is_cheaper(tokens, keys, **DIMS) else "expanded"
        said.append(
            f"{tokens}: {1e3 * times['expanded']:.2f} / {1e3 * times['absorbed']:.2f} ms "
            f"(by cost {guess}, error {error:.0e})"
        )
    return {"said": "; ".join(said)}


def cases() -> dict[str, Callable[[], dict]]:
    halves = {
        "prefill 8K of 8K": ("prefill", 8192, 8192),
        "prefill 8K of 64K": ("prefill", 8192, 65536),
        "decode 64 of 8K": ("decode", 64, 8192),
    }
    wide = {
        f"{name}, tiles of {tile}": (*halves[name], tile) for tile in (8192, 16384) for name in halves if "64K" in name
    }
    quantised = {f"{name}, {kv}": (*halves[name], 4096, kv) for name in ("decode 64 of 8K",) for kv in ("int8",)}
    return {
        **{f"time {name}": functools.partial(time_half, *case) for name, case in halves.items()},
        "check prefill": functools.partial(check_half, "prefill", 256, 1024),
        "check decode": functools.partial(check_half, "decode", 4, 1000),
        **{
            f"cache_write {kv}, {tokens} tokens": functools.partial(check_cache_write, kv, tokens)
            for kv in ("bf16", "int8", "fp8_e4m3")
            for tokens in (8192, 64)
        },
        "rope 8192 tokens": functools.partial(check_rope, 8192),
        **{f"time {name}": functools.partial(time_half, *case) for name, case in wide.items()},
        "cost, 64K keys": functools.partial(compare_cost, 65536, (16, 64, 128, 256)),
        "check prefill, int8": functools.partial(check_half, "prefill", 256, 1024, "int8"),
        "check decode, fp8_e4m3": functools.partial(check_half, "decode", 4, 1000, "fp8_e4m3"),
        **{f"time {name}": functools.partial(time_half, *case) for name, case in quantised.items()},
        "cache_write fp8_e5m2, 8192 tokens": functools.partial(check_cache_write, "fp8_e5m2", 8192),
    }


TUNED = "time prefill 8K of 8K", "time decode 64 of 8K"
"""Cases that run once more with the products that XLA chooses by timing, its own among them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the answers as JSON")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=120, help="cases without an answer by then are left out")
    parser.add_argument("--workers", type=int, default=24)
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    locks = Path(tempfile.mkdtemp())
    environment = os.environ | {
        LOCK: str(locks / "gpu"),
        COMPILING: str(locks / "compiling"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    names = [name for name in cases() if arguments.only in name]
    tuned = [name for name in TUNED if name in names]
    answers: dict[str, dict] = {}
    for suffix, chosen, flags, share in (("", names, LIBRARY, 0.7), (" (tuned)", tuned, FLAGS, 1.0)):
        left = share * arguments.seconds - (time.monotonic() - begin)
        if chosen and left > 0:
            environment["XLA_FLAGS"] = flags
            found = workers.run(MODULE, chosen, arguments.workers, CASE_SECONDS, left, environment)
            answers |= {name + suffix: answer for name, answer in found.items()}
        (arguments.out / "check_layer.json").write_text(json.dumps(answers, indent=1))
    print()
    wanted = [*names, *(f"{name} (tuned)" for name in tuned)]
    for name in (name for name in wanted if name in answers):
        answer = answers[name]
        print(f"{name}: {answer.get('said', '')} {answer.get('failed', '')}")
        if "kernels" in answer:
            print("   ", ", ".join(f"{kernel} {us}" for kernel, us in answer["kernels"].items()))
    failed = [name for name, answer in answers.items() if "failed" in answer]
    for name in failed:
        print(f"BROKEN {name}: {answers[name]['failed']}\n{answers[name].get('trace', '')[-900:]}")
    print(f"{len(answers)} of {len(wanted)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
