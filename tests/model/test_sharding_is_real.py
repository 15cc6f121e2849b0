"""What "sharded" means: in bytes, in the compiled programs, and under the worst routing."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfer import LLM, SamplingParams
from jaxinfer.configs.presets import preset
from jaxinfer.engine.memory import device_bytes, moe_workspace
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.model.moe import MoE, exchange_tokens
from jaxinfer.model.params import shapes_of, specs, use
from jaxinfer.model.precision import Precision
from jaxinfer.sharding.mesh import make, parse
from jaxinfer.sharding.rules import Plan, Rules

DIVIDING = {
    "hidden_size": 256,
    "num_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 112,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_layers": 4,
}


def tiny(mesh: str, overrides: dict, **options) -> LLM:
    return LLM(model="tiny-random", overrides=overrides, mesh=mesh, max_context=4096, chunk_size=64, **options)


@pytest.fixture(scope="module")
def divided():
    with tiny("cp=8", DIVIDING, shard_dense_weights=True) as llm:
        yield llm


def test_a_device_holds_its_eighth(divided: LLM):
    runner = divided.engine.runner
    everything = sum(array.nbytes for array in jax.tree.leaves((runner.params, runner.cache)))
    assert device_bytes((runner.params, runner.cache)) <= 1.15 * everything / 8
    moe = runner.params["moe"]
    for array in (runner.cache.latents[0], moe["moe"]["gate_up"], moe["attention"]["q_b"]):
        assert device_bytes(array) == array.nbytes // 8


def gathered_elements(program: str) -> list[int]:
    """Elements of the result of every all-gather of a compiled program."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", program)
    return [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]


def test_prefill_passes_latents_on_and_nothing_gathers_the_cache(divided: LLM):
    runner = divided.engine.runner
    nobody = [[]]
    prefill_batch = runner._put(runner._batcher.prefill(nobody, 64).batch)
    decode_batch = runner._put(runner._batcher.decode(nobody, 4))
    programs, arguments = runner._programs, (runner.params, runner.cache, runner.tables)
    prefill = programs.prefill.lower(*arguments, *prefill_batch).compile().as_text()
    decode = programs.decode.lower(*arguments, *decode_batch).compile().as_text()
    assert "collective-permute" in prefill
    one_layer = math.prod(runner.cache.latents[0].shape[1:])
    for program in (prefill, decode):
        gathered = gathered_elements(program)
        assert gathered, "expected the exchange of tokens and of weights to show as all-gathers"
        assert max(gathered) < one_layer / 8


@pytest.mark.parametrize(
    "favourite, meshes",
    [
        ("one expert takes every token", ["cp=4,ep=2"]),
        pytest.param("one expert takes every token", ["cp=8", "tp=2,cp=4"], marks=pytest.mark.slow),
        pytest.param("one expert is never chosen", ["cp=8", "cp=4,ep=2", "tp=2,cp=4"], marks=pytest.mark.slow),
    ],
)
def test_unkind_routing(favourite: str, meshes: list[str]):
    """Dropless whatever the routing: the same logits as on one device."""
    overrides = {"experts_per_token": 1 if "every" in favourite else 2, "num_groups": 1, "groups_per_token": 1}
    ids = np.random.default_rng(0).integers(0, 256, 500).tolist()
    logits = {}
    for mesh in ("cp=1", *meshes):
        with tiny(mesh, overrides) as llm:
            moe = llm.engine.runner.params["moe"]["moe"]
            bias = np.zeros(moe["router_bias"].shape, np.float32)
            bias[:, 5] = 100.0 if "every" in favourite else -100.0
            moe["router_bias"] = jax.device_put(bias, moe["router_bias"].sharding)
            logits[mesh] = llm.logits(ids)
            answer = llm.generate([ids], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
            assert answer.token_ids[0] == int(logits[mesh][-1].argmax())
    for mesh, other in logits.items():
        np.testing.assert_allclose(other, logits["cp=1"], atol=5e-5, rtol=0, err_msg=mesh)


@pytest.mark.parametrize(
    "mesh_text, kind, block",
    [
        ("cp=8", "fp32", None),
        ("cp=4,ep=2", "fp32", None),
        ("tp=2,cp=4", "fp32", None),
        ("cp=4,ep=2", "fp8", (128, 128)),
        ("tp=2,cp=4", "int8", None),
    ],
)
def test_memory_of_the_experts_is_bounded_by_the_formula(mesh_text: str, kind: str, block: tuple[int, int] | None):
    """`moe_workspace` bounds what XLA reserves; the program is one for every routing, the worst included."""
    config = preset("tiny-random", {**DIVIDING, "experts_per_token": 8, "weight_block_size": block})
    rules = Rules(parse(mesh_text))
    mesh, plan = make(rules.mesh), Plan.prefill(rules)
    ranks = rules.mesh.cp * rules.mesh.ep
    tokens = 8 * exchange_tokens(2**20, ranks)
    precision = Precision.named(kind, config, jnp.dtype(jnp.bfloat16))
    layer = MoE(config, precision)
    weights = specs(layer, 1, rules, mesh)
    in_specs = jax.tree.map(lambda spec: spec.sharding.spec, weights)

    def step(weights, x, experts, scale):
        return use(layer, weights, plan)._routed(x, experts, scale, 0, plan)

    spread = PartitionSpec(("cp", "ep"))
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(in_specs, spread, spread, spread), out_specs=spread, check_vma=False
    )

    def placed(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spread))

    rows, d = ranks * tokens, config.hidden_size
    x = placed((rows, d), jnp.float32)
    if precision.quantized is not None:
        scale = (rows,) if block is None else (rows, d // 128)
        x = Quantized(placed((rows, d), precision.quantized), placed(scale, jnp.float32), precision.scheme)
    arguments = x, placed((rows, 8), jnp.int32), placed((rows, 8), jnp.float32)
    memory = jax.jit(sharded).lower(weights, *arguments).compile().memory_analysis()
    bound = moe_workspace(config, precision, tokens, rules)
    assert memory.temp_size_in_bytes <= bound
    # And the bound is no empty promise: buffers for the worst routing of every token would break it.
    assert bound < ranks * tokens * 8 * config.hidden_size * 4
    assert shapes_of(layer)["gate_up"].shape[0] == config.num_experts
