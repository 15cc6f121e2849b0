"""From options to a running engine: platform, weights, cache, compiled programs."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache import cache_spec
from jaxinfer.configs.attention import DENSE, Dense, Hybrid, automatic_policy
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.kv_format import FLOAT_FORMATS, KVFormat
from jaxinfer.configs.model import ModelConfig
from jaxinfer.configs.profile import HeadProfile
from jaxinfer.engine.anchors import Anchors, boundary_codes
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.memory import pages_that_fit
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.step import Capacity
from jaxinfer.model.index import index_projections
from jaxinfer.model.params import Tree
from jaxinfer.model.policies import Policies
from jaxinfer.model.precision import Precision
from jaxinfer.model.rope import rope_table
from jaxinfer.model.transformer import parameter_specs
from jaxinfer.model.voters import voters
from jaxinfer.sharding import mesh as meshes
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan, Rules
from jaxinfer.source import ModelSource

log = logging.getLogger(__name__)

MAX_SEGMENTS = 32
"""Sequences that share a prefill step of one replica, and rows whose logits are computed at a time."""

_PROGRAM_CACHE_BYTES = 8 * 2**30
"""With a limit, JAX locks the folder: two engines that start together do not read each other's half-written files."""

_TYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def build_engine(
    options: EngineOptions, phase: Callable[[str], None] = lambda text: None, *, progress: bool = True
) -> Engine:
    """An engine that is ready: weights loaded, cache allocated, every program compiled.

    `phase` is told what goes on ("loading", "compiling ..."); `progress` shows a bar while weights load.
    Raises ValueError or FileNotFoundError for options that are not possible, naming what was expected and what came.
    """
    shape = meshes.parse(options.mesh)
    meshes.start_platform(shape)
    _keep_compiled_programs()
    source = ModelSource(options)
    config = source.config
    mesh = meshes.make(shape)
    on_gpu = mesh.devices.flat[0].platform != "cpu"
    rules = Rules(shape, shard_dense=options.shard_dense_weights)
    _log_replicated(config, rules)

    precision = _precision(options, source, on_gpu)
    formats = options.formats.of_layers(config.num_layers, FLOAT_FORMATS[precision.dtype.name])
    layout = _layout(options, rules, on_gpu)
    policy = _policy(options, config, rules, layout, on_gpu)
    phase("loading")
    params = source.load(parameter_specs(config, rules, mesh, precision), progress)
    capacity = _capacity(options, policy, config, precision, params, rules, mesh, layout, formats, on_gpu)

    runner = Runner(
        config,
        precision,
        params,
        _tables(config, precision, params, policy, source.profile, capacity.max_context, mesh),
        policy,
        formats,
        _anchors(policy, source),
        cache_spec(config, rules, mesh, capacity.pages_per_rank, capacity.layout.page_size, formats, policy),
        capacity,
        rules,
        mesh,
        tile_tokens=_tile_tokens(on_gpu),
    )
    runner.compile(lambda text: phase(f"compiling {text}"))
    return Engine(
        runner,
        source.tokenizer,
        config=config,
        model_name=source.name,
        eos_token_ids=config.eos_token_ids,
        seed=options.seed,
    )


def _precision(options: EngineOptions, source: ModelSource, on_gpu: bool) -> Precision:
    """What the options ask for; `auto` takes a folder that is quantised as it is.

    On CPU a released checkpoint of FP8 blocks is multiplied out all the same: there it is slower in 8 bits.
    """
    plain = "bf16" if on_gpu else "fp32"
    of_folder = source.quantized or ("fp8" if on_gpu and source.fp8_blocks else plain)
    name = of_folder if options.precision == "auto" else options.precision
    return replace(
        Precision.named(name, source.config, jnp.dtype(_TYPES[plain]), first_ffn=not options.unquantized_first_ffn),
        e4m3_attention=options.attention_dtype == "fp8",
    )


def _anchors(policy: Dense | Hybrid, source: ModelSource) -> Anchors | None:
    if isinstance(policy, Dense):
        return None
    codes = boundary_codes(source.tokenizer, source.config.vocab_size)
    return Anchors(codes, policy.anchor_gap, policy.anchor_boundaries)


def _policy(options: EngineOptions, config: ModelConfig, rules: Rules, layout: Layout, on_gpu: bool) -> Dense | Hybrid:
    """What the options ask for.  Raises ValueError for a policy of layers that the model does not have, or whose grid
    the pages or the mesh would cut; `auto` is dense then."""
    automatic = options.policy is None
    policy = options.policy
    if policy is None:
        policy = automatic_policy(options.max_context or config.max_positions) if on_gpu else DENSE
        if rules.mesh.num_devices > 1 and policy != DENSE:
            # From where on it is faster has been measured on one device, and so has what it finds.
            log.info("attention is dense: expected one device for auto to read sparsely; ask for it by name")
            return DENSE
    if isinstance(policy, Dense):
        return policy
    policy = policy.for_model(config.num_heads, config.latent_dim)
    reason = _reason_against(policy, config, rules, layout)
    if reason is None:
        return policy
    if automatic:
        log.warning("attention is dense: %s", reason)
        return DENSE
    raise ValueError(reason)


def _reason_against(policy: Hybrid, config: ModelConfig, rules: Rules, layout: Layout) -> str | None:
    beyond = [end - 1 for _, end, _ in policy.layers if end > config.num_layers]
    if beyond:
        return f"expected layers of the attention policy below {config.num_layers}, got {beyond[0]}"
    for name in ("group", "query_block"):
        if layout.stripe % getattr(policy, name):
            return (
                f"expected {name} of the attention policy to divide {layout.stripe}, the tokens that chunk_size and "
                f"page_size keep together, got {getattr(policy, name)}"
            )
    ranks = rules.size(Plan.prefill(rules).axes("heads", config.num_heads))
    for of in (policy, *(entry[2] for entry in policy.layers)):
        if isinstance(of, Hybrid) and of.head_groups % ranks:
            return (
                f"expected head_groups of the attention policy to be a multiple of the {ranks} ranks that divide the "
                f"heads, got {of.head_groups}"
            )
    return None


def _layout(options: EngineOptions, rules: Rules, on_gpu: bool) -> Layout:
    page_size = options.page_size or 64
    return Layout(rules.mesh.cp, math.gcd(_chunk_size(options, on_gpu), page_size), page_size)


def _chunk_size(options: EngineOptions, on_gpu: bool) -> int:
    return options.chunk_size or (8192 if on_gpu else 256)


def _capacity(
    options: EngineOptions,
    policy: Dense | Hybrid,
    config: ModelConfig,
    precision: Precision,
    params: Tree,
    rules: Rules,
    mesh: Mesh,
    layout: Layout,
    formats: Sequence[KVFormat],
    on_gpu: bool,
) -> Capacity:
    """What the engine can hold: sizes from the options, and as many pages as fit beside the weights."""
    wanted = options.max_context or config.max_positions
    if wanted > config.max_positions:
        raise ValueError(f"max_context={wanted}, but the model has {config.max_positions} positions")
    sequences = options.max_num_seqs or (64 if on_gpu else 16)
    page_size = layout.page_size
    capacity = Capacity(
        replicas=rules.mesh.replicas,
        layout=layout,
        pages_per_rank=1,
        chunk_size=_chunk_size(options, on_gpu),
        max_segments=MAX_SEGMENTS,
        max_num_seqs=sequences,
        max_context=wanted,
        vocab_size=config.vocab_size,
    )
    page = jax.tree.leaves(cache_spec(config, rules, mesh, 1, page_size, formats, policy))
    page_bytes = sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in page)
    fit = pages_that_fit(
        config,
        precision,
        policy,
        capacity,
        rules,
        mesh,
        params,
        page_bytes,
        options.memory_fraction,
        _tile_tokens(on_gpu),
    )
    # Pages for one request of the full context, and beyond that what the memory of a GPU holds; on CPU, a few more.
    one = layout.pages_needed(wanted, 0, 0)
    pages = fit if on_gpu else min(fit, one + sequences * -(-4096 // (page_size * layout.cp)))
    capacity = replace(capacity, pages_per_rank=max(pages, 1))
    if pages < one:
        room = capacity.pool_tokens
        if options.max_context is not None or pages < 1:
            raise ValueError(
                f"max_context={wanted} needs {one} pages of {page_bytes:,} bytes on each device, but {max(pages, 0)} "
                f"fit beside the weights: room for {room if pages > 0 else 0} tokens"
            )
        log.warning("memory holds %d tokens: max_context is lowered from %d", room, wanted)
        capacity = replace(capacity, max_context=room)
    return capacity


def _tile_tokens(on_gpu: bool) -> int:
    """Tokens of context per rank that prefill attention reads, and sends around the ring, at a time.

    Each tile's result is merged with that of those before: 8,192 queries on 64K tokens took an H200 77.1 ms a layer in
    tiles of 4,096, 71.5 in tiles of 8,192 and 69.4 in tiles of 16,384, which a short prompt pays for: it expands one.
    """
    return 8192 if on_gpu else 512


def _tables(
    config: ModelConfig,
    precision: Precision,
    params: Tree,
    policy: Dense | Hybrid,
    profile: HeadProfile | None,
    positions: int,
    mesh: Mesh,
) -> Tree:
    everywhere = NamedSharding(mesh, PartitionSpec())
    cos, sin = rope_table(config.rope, config.qk_rope_head_dim, positions)
    tables: Tree = {"cos": jax.device_put(cos, everywhere), "sin": jax.device_put(sin, everywhere)}
    if isinstance(policy, Hybrid):
        tables["index"] = index_projections(params, config, policy.index_dim, precision.dtype, mesh)
        distinct = Policies.of(policy, config.num_layers).distinct
        tables["voters"] = jax.device_put(
            tuple(voters(of, config, profile) if isinstance(of, Hybrid) else None for of in distinct), everywhere
        )
    return tables


def _log_replicated(config: ModelConfig, rules: Rules) -> None:
    """Says which dimensions are divided less than the mesh allows."""
    sizes = {
        "heads": config.num_heads,
        "vocab": config.vocab_size,
        "embedding": config.hidden_size,
        "experts": config.num_experts,
        "expert_mlp": config.moe_intermediate_size,
    }
    for name, size in sizes.items():
        reason = rules.replicated_because(name, size)
        if reason is not None:
            log.info("%s", reason)


def _keep_compiled_programs() -> None:
    """Compiled programs persist between starts in the user's cache folder, unless JAX was told of another."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jaxinfer" / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_compilation_cache_max_size", _PROGRAM_CACHE_BYTES)
