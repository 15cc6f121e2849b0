"""The engine with a quantised cache: the same as with a float32 cache of numbers that were rounded before, layer by
layer where they differ."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import cache_spec
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.kv_format import FORMATS, KVFormat, parse_formats
from jaxinfer.configs.presets import preset
from jaxinfer.engine.batching import Batcher
from jaxinfer.engine.memory import device_bytes
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.step import Capacity
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.kernels.rope import apply_rope
from jaxinfer.model import attention
from jaxinfer.model.batch import pack
from jaxinfer.model.precision import Precision
from jaxinfer.model.transformer import Transformer, parameter_specs
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.mesh import make, parse
from jaxinfer.sharding.rules import Rules
from tests.oracles import oracle

TOLERANCE = 5e-5
LAYERS, PAGES = 4, 128
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def rounded(x, name: str):
    """Rows rounded as the format holds a latent that 128 does not divide: one scale each."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-4) * jnp.float32(1 / LARGEST[name])
    parts = jnp.clip(x / scale, -LARGEST[name], LARGEST[name])
    return (jnp.round(parts) if name == "int8" else parts.astype(FORMATS[name].dtype).astype(jnp.float32)) * scale


def as_held(latent, key, kind: KVFormat):
    """Float32 rows of a latent and its rotated key, rounded as the format holds them."""
    if kind.name == "fp32":
        return jnp.concatenate((latent, key), axis=-1)
    latent = rounded(latent, kind.name) if kind.quantized else latent.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate((latent, key.astype(jnp.bfloat16).astype(jnp.float32)), axis=-1)


def round_what_is_written(monkeypatch: pytest.MonkeyPatch, kinds: Sequence[KVFormat]):
    """Fake quantisation, of each layer as its format has it: float32 arrays of rounded numbers; in layers of int8,
    queries of decode are rounded as well."""

    def write(cache, layer, page, offset, latents, norm, eps, cos, sin):
        rank = norm.shape[0]
        latent, key = rms_norm(latents[:, :rank], norm, eps), apply_rope(latents[:, rank:], cos, sin)
        rows = jnp.stack([as_held(latent, key, kind) for kind in kinds])[layer]
        return cache.at[layer, page, offset].set(rows, mode="drop")

    def decode(q, cache, layer, *arguments, kv_rank, **rest):
        int8 = jnp.asarray([kind.name == "int8" for kind in kinds])[layer]
        latent = jnp.where(int8, rounded(q[..., :kv_rank], "int8"), q[..., :kv_rank])
        q = jnp.concatenate((latent, q[..., kv_rank:]), axis=-1)
        return exact(q, cache, layer, *arguments, kv_rank=kv_rank, **rest)

    exact = attention.mla_decode
    monkeypatch.setattr(attention, "cache_write", write)
    monkeypatch.setattr(attention, "mla_decode", decode)


def answers(name: str, kv: str, mesh: str, prompt: list[int]) -> tuple[np.ndarray, list[int], list[float]]:
    """Logits of the prompt, and greedy tokens after it with their log-probabilities."""
    with LLM(
        model=str(oracle(name)),
        precision="fp32",
        kv=kv,
        mesh=mesh,
        chunk_size=16,
        page_size=16,
        max_num_seqs=2,
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        output = llm.generate([prompt], greedy)[0].outputs[0]
        chosen = [item.chosen.logprob for item in output.logprobs or []]
        assert llm.engine.runner.compilations.count == 0
        runner, config = llm.engine.runner, llm.engine.config
        tokens = runner.capacity.pages_per_rank * runner.capacity.layout.page_size
        size = sum(kind.token_bytes(config.kv_lora_rank, config.qk_rope_head_dim) for kind in of_layers(kv))
        assert device_bytes(runner.cache) == tokens * size
        return llm.logits(prompt), output.token_ids, chosen


def of_layers(kv: str, layers: int = LAYERS) -> tuple[KVFormat, ...]:
    return parse_formats(kv).of_layers(layers, FORMATS["fp32"])


@pytest.mark.parametrize(
    "kv, name, mesh",
    [
        pytest.param("int8", "deepseek_v3", "cp=1", marks=pytest.mark.slow),
        pytest.param("int8", "deepseek_v2_lite", "cp=4", marks=pytest.mark.slow),
        pytest.param("fp8_e4m3", "deepseek_v3", "cp=2", marks=pytest.mark.slow),
        pytest.param("fp8_e5m2", "deepseek_v3", "dp=2,cp=4", marks=pytest.mark.slow),
        pytest.param("int8", "deepseek_v3", "cp=4,ep=2", marks=pytest.mark.slow),
        ("int8,0-1=bf16,3=fp8_e4m3", "deepseek_v3", "cp=2"),
        # The dense layer of one format, the others of another: no layer's place is its number.
        pytest.param("int8,0=fp32", "deepseek_v3", "cp=1", marks=pytest.mark.slow),
        pytest.param("auto,2=int8", "deepseek_v2_lite", "cp=1", marks=pytest.mark.slow),
        pytest.param("fp8_e5m2,2-3=int8,1=bf16", "deepseek_v2_lite", "dp=2,cp=4", marks=pytest.mark.slow),
        pytest.param("bf16,1-2=int8", "deepseek_v3", "cp=2,ep=2,tp=2", marks=pytest.mark.slow),
    ],
)
def test_same_as_rounded_numbers_in_float32(kv: str, name: str, mesh: str, monkeypatch: pytest.MonkeyPatch):
    reference = np.load(oracle(name) / "reference.npz")
    prompt, exact = reference["input_ids"][0].tolist(), reference["logits"][0]
    logits, tokens, chosen = answers(name, kv, mesh, prompt)
    round_what_is_written(monkeypatch, of_layers(kv))
    wanted, wanted_tokens, wanted_chosen = answers(name, "fp32", mesh, prompt)
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)
    assert tokens == wanted_tokens
    np.testing.assert_allclose(chosen, wanted_chosen, atol=TOLERANCE, rtol=0)
    # The rounding is there at all.
    assert np.abs(logits - exact).max() > 100 * TOLERANCE


GRID = "hybrid:window=128,anchor_gap=64,sinks=64,block=64,hot_epoch=256,dense_below=256"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp=1", "dp=2,cp=2"])
def test_hybrid_attention(mesh: str, monkeypatch: pytest.MonkeyPatch):
    """Layers of two policies and two formats in all pairings; the index of all is float32, as some latents are."""
    policy = f"{GRID},candidates=6,voters=4,retrieve_blocks=2,hot_blocks=2,1=dense,4=dense"
    kv, layers = "fp8_e4m3,3-4=fp32", 5
    prompt = np.random.default_rng(0).integers(0, 256, 900).tolist()

    def run(kv: str) -> tuple[np.ndarray, list[int]]:
        options = {"max_context": 1024, "max_num_seqs": 2, "chunk_size": 128, "mesh": mesh, "attention": policy}
        with LLM(model="tiny-random", overrides={"num_layers": layers}, kv=kv, **options) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            return llm.logits(prompt), llm.generate([prompt], greedy)[0].token_ids

    logits, tokens = run(kv)
    round_what_is_written(monkeypatch, of_layers(kv, layers))
    wanted, wanted_tokens = run("fp32")
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)
    assert tokens == wanted_tokens


def lowered(kv: str) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """The programs of a step, prefill and decode, of a model with a dense layer and three of experts; nothing runs."""
    config = preset("tiny-random", {"num_layers": LAYERS})
    kinds = of_layers(kv)
    rules, layout = Rules(parse("cp=1")), Layout(1, 64, 64)
    mesh, precision = make(rules.mesh), Precision.named("fp32", config, jnp.dtype(jnp.float32))
    params = parameter_specs(config, rules, mesh, precision)
    cache = cache_spec(config, rules, mesh, PAGES, 64, kinds)
    capacity = Capacity(
        replicas=1,
        layout=layout,
        pages_per_rank=PAGES,
        chunk_size=64,
        max_segments=2,
        max_num_seqs=2,
        max_context=512,
        vocab_size=config.vocab_size,
    )
    programs = Programs(Transformer(config, precision, formats=kinds), params, rules, mesh, layout, cache)
    tables: Any = dict.fromkeys(("cos", "sin"), jax.ShapeDtypeStruct((512, config.qk_rope_head_dim // 2), jnp.float32))
    batcher = Batcher(capacity, 64)
    prefill = programs.prefill.lower(params, cache, tables, *pack(batcher.prefill([[]], 64).batch, 1, 1))
    decode = programs.decode.lower(params, cache, tables, *pack(batcher.decode([[]], 2), 1, 1))
    return prefill, decode


def test_only_a_scan_of_several_formats_branches():
    def branches(kv: str) -> list[int]:
        return [program.as_text().count("stablehlo.case") for program in lowered(kv)]

    # Kernels in prefill have branches of their own: as many where there is one format, and in each where there are two.
    prefill, decode = branches("bf16")
    assert decode == 0
    assert branches("int8") == branches("int8,0=bf16") == [prefill, decode]
    mixed = branches("int8,0-1=bf16")
    assert mixed[0] > prefill and mixed[1] == 1


@pytest.mark.slow
def test_no_program_copies_the_latents():
    for program in lowered("int8,0-1=bf16"):
        copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", program.compile().as_text() or "")
        assert copied
        assert all(math.prod(map(int, shape.split(","))) < PAGES * 64 * 16 for shape in copied)


def test_formats_in_one_line():
    names = [kind.name for kind in of_layers("int8, 0-1=bf16,4 = fp8_e4m3,3=auto", 6)]
    assert names == ["bf16", "bf16", "int8", "fp32", "fp8_e4m3", "int8"]
    assert of_layers("auto") == (FORMATS["fp32"],) * LAYERS
    assert of_layers("bf16,0-3=int8") == of_layers("int8")


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        ("int3", "expected kv to be one of auto, fp32, .*; got 'int3'"),
        ("", "expected kv to be one of"),
        ("0=int8", "expected kv to be one of .*; got '0=int8'"),
        ("int8,bf16", "expected layers=format in kv, .*; got 'bf16'"),
        ("int8,", "expected layers=format in kv, .*; got ''"),
        ("int8,0=int3", "with a format of auto, fp32, .*; got '0=int3'"),
        ("int8,1-0=bf16", "expected layers such as 3 or 0-3, got '1-0'"),
        ("int8,0-2=bf16,2=fp32", "expected each layer once in kv, got '2=fp32' beside"),
        ("int8,4-5=bf16,0-9=bf16", "expected each layer once in kv"),
    ],
)
def test_refused(kv: str, words: str):
    with pytest.raises(ValueError, match=words):
        EngineOptions(kv=kv)


def test_layers_that_the_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="expected layers of kv below 2, got 2"):
        LLM(model="tiny-random", kv="int8,0-2=bf16")
