"""Checks and times the MLA prefill kernel on one Hopper GPU: `python -m tests.gpu.check_mla_prefill --out DIR`.

Cases run in a process of their own until one fails or hangs; the next process takes up after it.  Prints tables last
and writes all figures to `DIR/check_mla_prefill.json`.  Exits with 1 if a bound is broken.
"""

import argparse
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG_SECONDS = 40.0
NORM_BOUND, BIAS_BOUND, LSE_BOUND = 4e-3, 1e-3, 2e-3
SCALE = 192**-0.5
# FlashAttention-3 on an H200, TFLOP/s of the visible keys: docs of the project's design, measured 2026-11-29.
PEER = {"8K on 8K": 768, "8K on 64K": 674}
LENGTHS = {"8K on 8K": 8192, "8K on 64K": 65536}
FULL = "8K on 8K without a mask"


@dataclasses.dataclass(frozen=True)
class Check:
    """Shapes of one comparison with float32; `limits` names how many keys each query sees."""

    tokens: int
    keys: int
    heads: int
    limits: str
    nope: int = 128
    rope: int = 64
    v: int = 128
    blocks: tuple = ()
    e4m3: bool = False


CHECKS = {
    "one tile": Check(128, 128, 1, "all"),
    "several tiles, no mask": Check(256, 1024, 4, "all"),
    "causal": Check(1024, 1024, 5, "causal"),
    "odd lengths": Check(1003, 2999, 5, "causal"),
    "random limits": Check(777, 1111, 3, "random"),
    "segments": Check(2048, 1024, 16, "segments"),
    "bundled": Check(500, 3000, 4, "causal", nope=64),
    "GLM-5": Check(500, 1500, 3, "causal", nope=192, v=256),
    "positive values, 64K": Check(256, 65536, 2, "positive"),
    "e4m3, all": Check(256, 1024, 4, "all", e4m3=True),
    "e4m3, causal": Check(1003, 2992, 5, "causal", e4m3=True),
    "e4m3, random limits": Check(777, 1104, 3, "random", e4m3=True),
    "e4m3, positive values, 64K": Check(256, 65536, 2, "positive", e4m3=True),
    "e4m3, near-uniform positive, 64K": Check(256, 65536, 2, "uniform", e4m3=True),
    "near-uniform positive, 64K": Check(256, 65536, 2, "uniform"),
    "more than 2^31 elements of output": Check(139264, 256, 128, "causal"),
    "more than 2^31 elements of keys": Check(200, 139264, 128, "causal"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qk,pv late": {},
    "pv,qk late": {"values_first": True},
    "qk,pv late named": {"named": True},
    "pv,qk late named": {"values_first": True, "named": True},
    "qk,pv early named": {"named": True, "handover": "early"},
    "pv,qk early named": {"values_first": True, "named": True, "handover": "early"},
    "qk,pv early": {"handover": "early"},
    "pv,qk early": {"values_first": True, "handover": "early"},
    "qk,pv none": {"handover": "none"},
    "pv,qk none": {"values_first": True, "handover": "none"},
    "qk,pv late named, ahead": {"named": True, "ahead": True},
    "qk,pv early named, ahead": {"named": True, "handover": "early", "ahead": True},
    "qk,pv late named, no barriers": {"named": True, "auto_barriers": False},
    "pv,qk late named, no barriers": {"values_first": True, "named": True, "auto_barriers": False},
    "3 wg, 64 keys, pv,qk named": {"warpgroups": 3, "keys": 64, "stages": 3, "values_first": True, "named": True},
    "3 wg, 64 keys, qk,pv named": {"warpgroups": 3, "keys": 64, "stages": 3, "named": True},
    "3 wg, 64 keys, pv,qk none": {"warpgroups": 3, "keys": 64, "stages": 3, "values_first": True, "handover": "none"},
    "64 keys, 4 stages, pv,qk named": {"keys": 64, "stages": 4, "values_first": True, "named": True},
    "pv,qk late named, cluster": {"values_first": True, "named": True, "cluster": 2},
    "qk,pv late named, cluster": {"named": True, "cluster": 2},
    "pv,qk late named, L2 16 MiB": {"values_first": True, "named": True, "l2_bytes": 16 * 2**20},
    "pv,qk late named, L2 64 MiB": {"values_first": True, "named": True, "l2_bytes": 64 * 2**20},
}

VARIANTS_E4M3: dict[str, dict[str, Any]] = {
    "e4m3": {"named": True},
    "e4m3, 3 stages": {"named": True, "stages": 3},
    "e4m3, 4 stages": {"named": True, "stages": 4},
    "e4m3, no turns": {"handover": "none", "stages": 3},
    "e4m3, 3 stages, no barriers": {"named": True, "stages": 3, "auto_barriers": False},
    "e4m3, 64 keys, 6 stages": {"named": True, "keys": 64, "stages": 6},
    "e4m3, 3 stages, cluster": {"named": True, "stages": 3, "cluster": 2},
}


def limits_of(check: Check) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    tokens, keys = check.tokens, check.keys
    if check.limits == "causal":
        return (
            np.maximum(np.arange(tokens) + 1 + keys - tokens, 0)
            if keys >= tokens
            else np.arange(tokens) * keys // tokens
        )
    if check.limits == "random":
        return rng.integers(0, keys + 1, tokens) * (rng.random(tokens) < 0.8)
    if check.limits == "segments":
        return np.where(np.arange(tokens) // 300 % 2 == 1, np.minimum(np.arange(tokens) % 300 + 500, keys), 0)
    return np.full(tokens, keys)


def inputs(check: Check) -> tuple:
    """Operands of the kernel as torch made them, and the same for torch."""
    import jax
    import torch  # pyright: ignore[reportMissingImports]

    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    arrays = [
        normal(check.tokens, check.heads, check.nope + check.rope),
        normal(check.keys, check.heads, check.nope),
        normal(check.keys, check.rope),
        normal(check.keys, check.heads, check.v),
    ]
    if check.limits in ("positive", "uniform"):
        arrays[3] = arrays[3].abs()
    if check.limits == "uniform":
        arrays[0] *= 0.05
    arrays = [torch.nn.functional.pad(a, (0, 0) * (a.ndim - 1) + (0, -a.shape[0] % 8)) for a in arrays]
    if not check.e4m3:
        torch.cuda.synchronize()
        return [jax.dlpack.from_dlpack(a) for a in arrays], arrays
    rounded = [a.to(torch.float8_e4m3fn) for a in arrays]
    heads, v = check.heads, check.v
    keys = torch.arange(len(arrays[3]), device="cuda").reshape(-1, 2, 4, 2).transpose(1, 2).reshape(-1)
    values = rounded[3].view(torch.int8)[keys].permute(1, 2, 0).contiguous().reshape(heads, v, -1)
    torch.cuda.synchronize()
    ours = [jax.dlpack.from_dlpack(a.view(torch.int8)) for a in rounded[:3]] + [jax.dlpack.from_dlpack(values)]
    ours = [jax.lax.bitcast_convert_type(a, jax.numpy.float8_e4m3fn) for a in ours]
    return ours, [a.to(torch.bfloat16) for a in rounded]


def kernel(e4m3: bool) -> Callable:
    from jaxinfer.kernels.mosaic import attention, attention_e4m3

    return attention_e4m3.attend if e4m3 else attention.attend


def run_check(check: Check) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from jaxinfer.kernels.mosaic import mla_prefill
    from jaxinfer.kernels.mosaic.attention import Blocks

    attend = kernel(check.e4m3)
    limit = limits_of(check).astype(np.int32)
    ours, (q, k, k_rope, v) = inputs(check)
    padded = np.pad(limit, (0, -len(limit) % 8))
    blocks = Blocks(**dict(check.blocks)) if check.blocks else mla_prefill._fitting(check.nope, check.rope, check.v)[0]
    if check.e4m3:
        blocks = Blocks(named=True, stages=3)
    out, lse = jax.jit(lambda *a: attend(*a, scale=SCALE, blocks=blocks, multiprocessors=132))(
        *ours, jnp.asarray(padded)
    )
    out, lse = torch.from_dlpack(out), torch.from_dlpack(lse)
    rows = np.unique(
        np.concatenate((np.arange(min(512, check.tokens)), np.arange(max(check.tokens - 512, 0), check.tokens)))
    )
    limits = torch.tensor(limit[rows], device="cuda")
    squares = norms = signed = absolute = lse_error = 0.0
    finite = empty_good = True
    for head in range(0, check.heads, max(check.heads // 8, 1)):
        keys = torch.cat((k[: check.keys, head], k_rope[: check.keys]), 1).float()
        scores = (q[rows, head].float() @ keys.T) * SCALE
        scores.masked_fill_(torch.arange(check.keys, device="cuda")[None] >= limits[:, None], -torch.inf)
        expected_lse = scores.logsumexp(1)
        expected = scores.softmax(1).nan_to_num() @ v[: check.keys, head].float()
        got, got_lse = out[rows, head], lse[head, rows]
        finite &= bool(got.isfinite().all())
        none = limits == 0
        empty_good &= bool((got[none] == 0).all() and (got_lse[none] == -torch.inf).all())
        squares += float((got - expected).double().square().sum())
        norms += float(expected.double().square().sum())
        signed += float((got - expected).double().sum())
        absolute += float(expected.double().abs().sum())
        if bool((~none).any()):
            lse_error = max(lse_error, float((got_lse - expected_lse)[~none].abs().max()))
    error, bias = (squares / norms) ** 0.5, signed / absolute
    factor = 10 if check.e4m3 else 1
    good = finite and empty_good and lse_error <= factor * LSE_BOUND
    good &= error <= factor * NORM_BOUND and abs(bias) <= factor * BIAS_BOUND
    return {"good": good, "error": error, "bias": bias, "lse": lse_error, "finite": finite, "empty": empty_good}


def run_public(_: Any) -> dict:
    """The public operation against its own reference, both on the GPU, with NaN where nothing was written."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxinfer.kernels.mla_prefill import mla_prefill

    rng = np.random.default_rng(0)

    def normal(*shape: int, factor: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape, scale=factor), jnp.bfloat16)

    q, latents = normal(700, 16, 192), normal(1500, 576).at[1300:].set(jnp.nan)
    k_b, v_b = normal(16, 128, 512, factor=512**-0.5), normal(16, 128, 512, factor=512**-0.5)
    limit = jnp.asarray(rng.integers(0, 1301, 700), jnp.int32)
    results = []
    for implementation in ("mosaic", "reference"):
        program = jax.jit(lambda *a, i=implementation: mla_prefill(*a, scale=SCALE, implementation=i))
        results.append([np.asarray(a, np.float64) for a in program(q, latents, k_b, v_b, limit)])
    (out, lse), (wanted, wanted_lse) = results
    error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    bias = float((out - wanted).mean() / np.abs(wanted).mean())
    seen = np.asarray(limit) > 0
    lse_error = float(np.abs(lse - wanted_lse)[seen].max())
    good = error <= 2 * NORM_BOUND and abs(bias) <= BIAS_BOUND and lse_error <= 5 * LSE_BOUND
    return {"good": good, "error": error, "bias": bias, "lse": lse_error}


def visible(name: str) -> int:
    if name == FULL:
        return 8192 * 8192
    tokens, keys = 8192, LENGTHS[name]
    return tokens * (keys - tokens) + tokens * (tokens + 1) // 2


def median_seconds(call: Callable[[], Any], wait: Callable[[Any], Any], samples: int, calls: int) -> float:
    wait(call())
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        found.append((time.perf_counter() - begin) / calls)
    return sorted(found)[len(found) // 2]


_cached: dict = {}


def timing_inputs(name: str, e4m3: bool = False) -> tuple:
    if (name, e4m3) not in _cached:
        _cached.clear()
        _cached[name, e4m3] = inputs(Check(8192, LENGTHS.get(name, 8192), 128, "causal", e4m3=e4m3))
    return _cached[name, e4m3]


def run_timing(case: tuple[str, str]) -> dict:
    import jax
    import jax.numpy as jnp

    from jaxinfer.kernels.mosaic.attention import Blocks

    name, variant = case
    e4m3 = variant in VARIANTS_E4M3
    attend = kernel(e4m3)
    ours, _ = timing_inputs(name, e4m3)
    keys = LENGTHS.get(name, 8192)
    limit = jnp.full(8192, 8192, jnp.int32) if name == FULL else jnp.arange(8192, dtype=jnp.int32) + 1 + keys - 8192
    blocks = Blocks(**(VARIANTS | VARIANTS_E4M3)[variant])
    program = jax.jit(lambda *a: attend(*a, scale=SCALE, blocks=blocks, multiprocessors=132))
    samples, calls = (9, 5) if keys == 8192 else (7, 1)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    jax.block_until_ready(program(*ours, limit))
    state = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    seconds = median_seconds(lambda: program(*ours, limit), jax.block_until_ready, samples, calls)
    tflops = 2 * 320 * 128 * visible(name) / seconds / 1e12
    return {"seconds": seconds, "tflops": tflops, "state": state.communicate()[0].strip()}


def run_torch(name: str) -> dict:
    """cuDNN's attention: causal where both lengths are equal, else without a mask."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    _, (q, k, k_rope, v) = timing_inputs(name)
    keys = torch.cat((k, k_rope[:, None].expand(-1, 128, -1)), 2)
    q, keys, v = (a.transpose(0, 1)[None] for a in (q, keys, v))
    causal = q.shape[2] == keys.shape[2]

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, keys, v, is_causal=causal, scale=SCALE)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        seconds = median_seconds(call, lambda _: torch.cuda.synchronize(), 7, 5 if causal else 1)
    pairs = visible(name) if causal else 8192 * LENGTHS[name]
    return {"seconds": seconds, "tflops": 2 * 320 * 128 * pairs / seconds / 1e12}


def run_layer(_: Any) -> dict:
    """The public operation, 8K on 8K: what the expansion of keys and values takes beside the kernel."""
    import jax
    import jax.numpy as jnp
    import torch  # pyright: ignore[reportMissingImports]

    from jaxinfer.kernels.mosaic import mla_prefill

    _cached.clear()

    def normal(*shape: int) -> jax.Array:
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        return jax.dlpack.from_dlpack(values)

    q, latents, k_b, v_b = normal(8192, 128, 192), normal(8192, 576), normal(128, 128, 512), normal(128, 128, 512)
    limit = jnp.arange(8192, dtype=jnp.int32) + 1
    whole = jax.jit(lambda *a: mla_prefill.mla_prefill(*a, scale=SCALE))
    expansion = jax.jit(lambda *a: mla_prefill._expand(*a, 8192))
    return {
        "seconds": median_seconds(lambda: whole(q, latents, k_b, v_b, limit), jax.block_until_ready, 9, 5),
        "expansion": median_seconds(lambda: expansion(latents, k_b, v_b), jax.block_until_ready, 9, 5),
    }


def cases() -> list[tuple[str, Callable[[Any], dict], Any]]:
    found: list[tuple[str, Callable[[Any], dict], Any]] = [
        (f"check {name}", run_check, check) for name, check in CHECKS.items() if "2^31" not in name
    ]
    found.append(("check the public operation", run_public, None))
    lengths = list(LENGTHS)
    for name in lengths:
        found.append((f"time {name} torch cuDNN", run_torch, name))
        wanted = VARIANTS | VARIANTS_E4M3
        if name != lengths[0]:
            wanted = [v for v, fields in wanted.items() if fields.get("named") and fields.get("auto_barriers", True)]
        found.extend((f"time {name} {variant}", run_timing, (name, variant)) for variant in wanted)
        if name == lengths[0]:
            for variant, fields in VARIANTS.items():
                check = Check(700, 1100, 9, "random", blocks=tuple(fields.items()))
                found.append((f"check variant {variant}", run_check, check))
        if name == lengths[0]:
            found.extend((f"time {FULL} {variant}", run_timing, (FULL, variant)) for variant in list(VARIANTS)[:6])
            found.append(("time the public operation, 8K on 8K", run_layer, None))
    found.extend((f"check {name}", run_check, check) for name, check in CHECKS.items() if "2^31" in name)
    return found


def worker(first: int, only: str) -> None:
    """Runs cases from `first` on and says what comes of each in a line of JSON."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for index, (name, function, argument) in list(enumerate(cases()))[first:]:
        if only not in name:
            continue
        print(json.dumps({"begin": index}), flush=True)
        try:
            result = function(argument)
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc()[-2500:]}
        print(json.dumps({"end": index, "name": name, "result": result}), flush=True)
        if "failed" in result and "CUDA" in result["failed"]:
            sys.exit(3)


def supervise(only: str, seconds: float) -> dict[str, dict]:
    """Results by name; a worker that says nothing for a while is ended, and another takes up after its case."""
    started, results, first, names = time.monotonic(), {}, 0, [name for name, _, _ in cases()]
    while first < len(names) and time.monotonic() - started < seconds:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.check_mla_prefill", "--worker", str(first), "--only", only],
            stdout=subprocess.PIPE,
            text=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()

        def read(stream=process.stdout, lines=lines) -> None:
            for line in stream or ():
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        current = None
        while True:
            try:
                line = lines.get(timeout=min(HANG_SECONDS, max(started + seconds - time.monotonic(), 0.1)))
            except queue.Empty:
                process.kill()
                break
            if line is None:
                break
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "begin" in message:
                current = message["begin"]
                continue
            current, first = None, message["end"] + 1
            results[message["name"]] = message["result"]
            brief = {key: value for key, value in message["result"].items() if key != "trace"}
            print(f"[{time.monotonic() - started:5.1f}] {message['name']}: {brief}", flush=True)
        process.kill()
        if current is None:
            if process.wait() != 3:
                break
        else:
            results[names[current]] = {"failed": "ended or hung"}
            print(f"[{time.monotonic() - started:5.1f}] {names[current]}: ended or hung", flush=True)
            first = current + 1
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the full figures")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=230.0, help="no case begins later than this")
    parser.add_argument("--worker", type=int)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.only)
        return 0
    results = supervise(arguments.only, arguments.seconds)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "check_mla_prefill.json").write_text(json.dumps(results, indent=1))
    broken = [name for name, result in results.items() if not result.get("good", "seconds" in result)]
    for name in broken:
        print(f"BROKEN {name}: {results[name]}")
    print("\n== correctness")
    for name, result in results.items():
        if "error" in result:
            print(
                f"{'ok ' if result['good'] else 'BAD'} {name}: " + ", ".join(f"{k} {v:.2e}" for k, v in result.items())
            )
    for length in (*LENGTHS, FULL):
        peer = PEER.get(length, float("nan"))
        print(f"\n== TFLOP/s, 128 heads 192/128, {length}; FlashAttention-3 {peer}")
        for name, result in results.items():
            mine = name.startswith(f"time {length}") and (FULL in name) == (length == FULL)
            if mine and "tflops" in result:
                ratio = result["tflops"] / peer
                print(f"{result['tflops']:6.0f} = {ratio:.3f}  {name.removeprefix(f'time {length} ')}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
