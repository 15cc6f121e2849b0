"""The model in fp8 and int8: what the casts cost is computed, and the engine must cost no more."""

from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import allocate, cache_spec
from jaxinfer.checkpoint import open_checkpoint, random_parameters
from jaxinfer.configs.kv_format import FLOAT_FORMATS
from jaxinfer.configs.presets import preset
from jaxinfer.engine.batching import Batcher
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.step import Capacity
from jaxinfer.kernels import dispatch, quantized
from jaxinfer.model.batch import pack
from jaxinfer.model.precision import Precision
from jaxinfer.model.transformer import Transformer, parameter_specs
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.mesh import make, parse
from jaxinfer.sharding.rules import Rules
from tests.checkpoints import specs_on
from tests.model.fake_quantized import Casts, logits, multiplied_out
from tests.oracles import oracle

EXACT = 5e-5
PROMPT = 10
FIXTURES = ["deepseek_v3", "deepseek_v3_fp8", "deepseek_v2_lite"]

# Every matrix has a multiple of 128 inputs, which in the fixtures q_b and o have not, and two have widths that are
# filled up.
ALIGNED = {
    "hidden_size": 256,
    "num_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 112,
    "v_head_dim": 32,
    "intermediate_size": 320,
    "moe_intermediate_size": 96,
    "num_layers": 3,
}
IN_BLOCKS = {"weight_block_size": (128, 128)}


@pytest.mark.parametrize("name", FIXTURES)
def test_the_model_without_casts_is_the_reference(name: str):
    """Only then does it say anything about the casts."""
    config = open_checkpoint(oracle(name)).config
    params = multiplied_out(open_checkpoint(oracle(name)).load(specs_on("cp=1", config), progress=False))
    reference = np.load(oracle(name) / "reference.npz")
    for ids, expected in zip(reference["input_ids"], reference["logits"], strict=True):
        np.testing.assert_allclose(logits(params, config, Casts(), ids.tolist()), expected, atol=EXACT, rtol=0)


def deviation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)))


def check_the_casts(llm: LLM, plain: dict, multiplied: dict, casts: Casts, prompts: list[list[int]]) -> None:
    """The engine's logits are those of the model whose products are exact and whose casts are the same.

    An activation that lies on the border of two 8-bit numbers goes the other way in float32 than in float64 once in a
    hundred thousand casts or so, and takes its prompt with it: most short prompts have none such and agree to rounding
    (with a cast in another place none would), and the deviation of all from the model without casts is the same.
    """
    assert llm.config is not None
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0))
    expected, served = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        rows = logits(multiplied, llm.config, casts, ids + answer.token_ids)
        decoded = [item.chosen.logprob for item in answer.outputs[0].logprobs or []]
        normalised = log_softmax(rows, axis=-1)[len(ids) - 1 : -1]
        expected.append(np.append(rows[: len(ids)], normalised[np.arange(4), answer.token_ids]))
        served.append(np.append(llm.logits(ids), decoded))
    agree = [np.abs(a - b).max() < EXACT for a, b in zip(served, expected, strict=True)]
    assert np.mean(agree) > 0.5, agree
    uncast = np.stack([logits(plain, llm.config, Casts(), ids).reshape(-1) for ids in prompts])
    size = uncast.shape[1]
    cost = deviation(np.stack(expected)[:, :size], uncast)
    assert deviation(np.stack(served)[:, :size], uncast) == pytest.approx(cost, rel=0.03)
    # And 8 bits cost something: the casts are there.
    assert cost > 0.01 * np.std(uncast)


SPREAD = [
    ("cp=1", "deepseek_v3_fp8", "fp8"),
    ("cp=4,ep=2", "deepseek_v3", "int8"),
]
GRID = [(m, f, p) for m in ("cp=1", "cp=2", "cp=8", "cp=4,ep=2", "ep=8") for f in FIXTURES for p in ("fp8", "int8")]


@pytest.mark.parametrize(
    "mesh, name, kind", SPREAD + [pytest.param(*c, marks=pytest.mark.slow) for c in GRID if c not in SPREAD]
)
def test_fixtures(mesh: str, name: str, kind: str):
    checkpoint = open_checkpoint(oracle(name))
    config = checkpoint.config
    plain, multiplied = (
        multiplied_out(checkpoint.load(specs_on("cp=1", config, precision=precision), progress=False))
        for precision in (None, kind)
    )
    ids = np.load(oracle(name) / "reference.npz")["input_ids"].reshape(-1)
    casts = Casts(kind, blocks=kind == "fp8" and config.weight_block_size is not None)
    with LLM(
        model=str(oracle(name)), precision=kind, mesh=mesh, chunk_size=8, page_size=8, max_context=64, max_num_seqs=1
    ) as llm:
        check_the_casts(llm, plain, multiplied, casts, ids[: len(ids) // PROMPT * PROMPT].reshape(-1, PROMPT).tolist())


@pytest.mark.parametrize(
    "mesh, kind, changes, first_ffn",
    [
        pytest.param("cp=1", "fp8", {}, False, marks=pytest.mark.slow),
        ("cp=2", "fp8", IN_BLOCKS, True),
        pytest.param("cp=1", "int8", {}, True, marks=pytest.mark.slow),
        pytest.param("cp=4", "fp8", {}, True, marks=pytest.mark.slow),
        # Each rank has whole blocks of heads and of widths, so the scales are those of one device.
        pytest.param("tp=2,cp=2", "fp8", IN_BLOCKS | {"intermediate_size": 512}, True, marks=pytest.mark.slow),
    ],
)
def test_a_model_whose_every_matrix_is_quantized(mesh: str, kind: str, changes: dict, first_ffn: bool):
    overrides = ALIGNED | changes
    config = preset("tiny-random", overrides)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (12, PROMPT)).tolist()
    with LLM(
        model="tiny-random",
        overrides=overrides,
        precision=kind,
        mesh=mesh,
        chunk_size=8,
        page_size=8,
        max_context=64,
        max_num_seqs=1,
        shard_dense_weights=mesh == "cp=2",
        unquantized_first_ffn=not first_ffn,
    ) as llm:
        params = llm.engine.runner.params
        held = [leaf for leaf in jax.tree.leaves(params) if leaf.dtype.itemsize == 1]
        assert len(held) == (14 if first_ffn else 11)
        plain = multiplied_out(random_parameters(specs_on("cp=1", config), config))
        casts = Casts(kind, blocks="weight_block_size" in changes, first_ffn=first_ffn)
        check_the_casts(llm, plain, multiplied_out(params), casts, prompts)


def test_blocks_are_not_cut():
    config = preset("tiny-random", ALIGNED | IN_BLOCKS | {"v_head_dim": 16})
    with pytest.raises(ValueError, match=r"expected a mesh that leaves the 128x128 blocks of .*'o'.* whole, got tp=2"):
        specs_on("tp=2", config, precision="fp8")
    # With a scale for each output channel there is nothing to cut.
    specs_on("tp=2", config, precision="int8")


def lowered_prefill(config, precision: Precision, monkeypatch: pytest.MonkeyPatch):
    """The jaxpr of a prefill of 64 tokens as it is on a GPU: with the Mosaic products wherever they take the shapes."""

    def choose(op: str, implementation: str | None, reason_against: str | None) -> str:
        return "mosaic" if "gemm" in op and reason_against is None else "reference"

    monkeypatch.setattr(dispatch, "choose", choose)
    rules, layout = Rules(parse("cp=1")), Layout(1, 16, 16)
    mesh = make(rules.mesh)
    params = parameter_specs(config, rules, mesh, precision)
    formats = [FLOAT_FORMATS[precision.dtype.name]] * config.num_layers
    cache = allocate(cache_spec(config, rules, mesh, 8, 16, formats))
    capacity = Capacity(
        replicas=1,
        layout=layout,
        pages_per_rank=8,
        chunk_size=64,
        max_segments=2,
        max_num_seqs=2,
        max_context=128,
        vocab_size=config.vocab_size,
    )
    programs = Programs(Transformer(config, precision), params, rules, mesh, layout, cache)
    table = jax.ShapeDtypeStruct((128, config.qk_rope_head_dim // 2), jnp.float32)
    batch = Batcher(capacity, 64).prefill([[]], 64).batch
    traced = programs.prefill.trace(params, cache, {"cos": table, "sin": table}, *pack(batch, 1, 1))
    traced.lower(lowering_platforms=("cuda",))
    return traced.jaxpr.jaxpr


def inside(jaxpr) -> Iterator:
    """The equations of a jaxpr and of those in it, kernels excepted: `(equation, whether in a loop or branch)`."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("mpmd_map", "custom_vmap_call"):
            for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)


PASSED_ON = (
    *("reshape", "gather", "pad", "jit", "custom_vmap_call", "scan", "while", "cond"),
    "optimization_barrier",  # between products that XLA would merge; it does nothing
)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_one_unbroken_path_of_8_bits(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Of a layer as it is lowered for a GPU: each activation is cast once, for all products that read it, nothing is
    cast back, and weights go to the kernels as they lie."""
    alone = Counter()
    quantize = quantized.quantize
    monkeypatch.setattr(quantized, "quantize", lambda *a, **k: alone.update(["quantize"]) or quantize(*a, **k))
    config = preset("tiny-random", ALIGNED)
    precision = Precision.named(kind, config, jnp.dtype(jnp.bfloat16))
    layers = [e for e in inside(lowered_prefill(config, precision, monkeypatch)) if e.primitive.name == "scan"]
    of_layers = [scan for scan in layers if scan.params["length"] in (1, 2) and len(scan.invars) > 30]
    assert [scan.params["length"] for scan in of_layers] == [1, 2]
    # One per layer, the attention's output: the only product whose input no fused form makes.
    assert alone["quantize"] == 2

    def small(variable) -> bool:
        return getattr(variable.aval, "dtype", None) == precision.quantized and variable.aval.ndim > 0

    # Inputs of attention, of q_b, of o, of the feed-forward, of down (in a MoE layer the shared and the routed).
    # Products: q_a, q_b, kv_a, o, gate and up, down (twice in a MoE layer).
    for scan, casts, products in zip(of_layers, (5, 6), (6, 8), strict=True):
        body = scan.params["jaxpr"].jaxpr
        stacked = [v for v, of_all in zip(body.invars, scan.invars, strict=True) if v.aval.shape == of_all.aval.shape]
        found = Counter()
        for equation in inside(body):
            name = equation.primitive.name
            if name in ("convert_element_type", "round") and any(map(small, equation.outvars)):
                found["cast"] += 1
            if any(map(small, equation.invars)):
                assert name in PASSED_ON, name
                found[name] += 1
        assert found["cast"] == casts
        assert found["custom_vmap_call"] == products
        # What an inner loop reads would be copied out of the stack if it were a slice: the experts are whole.
        loops = [e for e in body.eqns if e.primitive.name in ("scan", "while", "cond")]
        taken = [v for loop in loops for v in loop.invars if small(v) and v.aval.ndim > 3]
        assert len(taken) == (2 if products == 8 else 0)
        assert all(any(v is whole for whole in stacked) for v in taken)
