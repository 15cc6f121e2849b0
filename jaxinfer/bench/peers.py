"""torch's kernels for the same work, on random operands of their own; needs torch with CUDA."""

import itertools
from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

from jaxinfer.bench.operation import Peer, Work


def available() -> bool:
    return torch.cuda.is_available()


def wait(_: object) -> None:
    torch.cuda.synchronize()


def release() -> None:
    """Gives the memory of operands that are no longer used back to the device."""
    torch.cuda.empty_cache()


def _numbers(form: str, *shape: int) -> torch.Tensor:
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if form == "bf16":
        return values
    return (values * 30).clamp(-127, 127).to(torch.int8) if form == "int8" else values.to(torch.float8_e4m3fn)


def _rotating(name: str, function: Callable, sets: list[tuple], work: Work | None = None) -> Peer:
    return Peer(name=name, run=lambda i: function(*sets[i % len(sets)]), work=work)


def gemm(form: str, m: int, n: int, k: int, sets: int) -> Peer:
    """`_scaled_mm` with scales of rows and channels and one accumulator, `_int_mm` without scales, or bfloat16."""
    operands = [(_numbers(form, m, k), _numbers(form, n, k)) for _ in range(sets)]
    if form == "bf16":
        return _rotating("torch.matmul", lambda x, w: x @ w.T, operands)
    if form == "int8":
        return _rotating("torch._int_mm", lambda x, w: torch._int_mm(x, w.T), operands)
    scales = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")

    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    return _rotating("torch._scaled_mm, rows", scaled, operands)


def grouped_gemm(form: str, group_sizes: np.ndarray, n: int, k: int, sets: int) -> Peer | None:
    """`_scaled_grouped_mm` with scales of rows and channels and one accumulator, or bfloat16; none for int8."""
    if form == "int8":
        return None
    m, groups = int(group_sizes.sum()), len(group_sizes)
    w = torch.stack([_numbers(form, n, k) for _ in range(groups)]).transpose(-2, -1)
    operands = [(_numbers(form, m, k),) for _ in range(sets)]
    ends = torch.tensor(list(itertools.accumulate(group_sizes.tolist())), device="cuda", dtype=torch.int32)
    if form == "bf16":
        return _rotating("torch._grouped_mm", lambda x: torch._grouped_mm(x, w, offs=ends), operands)
    scales = torch.rand(m, device="cuda"), torch.rand(groups, n, device="cuda")

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch._scaled_grouped_mm(x, w, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)

    return _rotating("torch._scaled_grouped_mm, rows", scaled, operands)


def attention(tokens: int, keys: int, heads: int, qk: int, v: int, scale: float, sets: int) -> Peer:
    """cuDNN's attention over expanded keys: causal where both lengths are equal, else without a mask."""
    causal = tokens == keys
    sizes = (tokens, qk), (keys, qk), (keys, v)
    operands = [tuple(_numbers("bf16", 1, heads, *size) for size in sizes) for _ in range(sets)]
    pairs = tokens * (tokens + 1) / 2 if causal else float(tokens) * keys

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    work = Work(flops=2 * heads * (qk + v) * pairs, bytes=0)
    return _rotating(f"torch cuDNN{'' if causal else ', no mask'}", attend, operands, work)


def copy_pages(form: str, order: np.ndarray, page: tuple[int, ...], sets: int) -> Peer | None:
    """`index_select` of whole pages; none for 8 bits."""
    if form != "bf16":
        return None
    operands = [(_numbers(form, len(order), *page),) for _ in range(sets)]
    places = torch.tensor(order, device="cuda")
    return _rotating("torch.index_select", lambda x: torch.index_select(x, 0, places), operands)
