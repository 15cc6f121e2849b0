"""Which tensor of a Hugging Face checkpoint becomes which part of which parameter: data, not code.

Parameters keep Hugging Face's orientation `[out, in]`; layers of one kind are stacked on a leading axis.
"""

import math
from dataclasses import dataclass

from jaxinfer.configs.model import ModelConfig

TreePath = tuple[str, ...]
"""Keys from the root of the parameter tree to a leaf, such as `("moe", "attention", "q_a")`."""


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint and its place in a parameter.

    The tensor `[prod(rows), prod(columns)]` (`[prod(rows)]` when `columns` is empty) is viewed as `rows + columns`;
    `part`, where given, takes a range of the last of the rows.  The result lies at `index` of the parameter's leading
    dimensions.
    """

    name: str
    index: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()
    part: slice | None = None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return (math.prod(self.rows), math.prod(self.columns)) if self.columns else (math.prod(self.rows),)

    @property
    def kept_rows(self) -> tuple[int, ...]:
        """`rows` of which `part` has been taken."""
        if self.part is None:
            return self.rows
        return (*self.rows[:-1], len(range(*self.part.indices(self.rows[-1]))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the parameter, behind `index`."""
        return self.kept_rows + self.columns


def sources(config: ModelConfig) -> dict[TreePath, list[Source]]:
    """For each parameter of the model, the tensors it is made of; they cover it exactly."""
    vocabulary, d = (config.vocab_size,), (config.hidden_size,)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    found: dict[TreePath, list[Source]] = {
        ("embed",): [Source("model.embed_tokens.weight", (), vocabulary, d)],
        ("head",): [Source(head, (), vocabulary, d)],
        ("final_norm",): [Source("model.norm.weight", (), d)],
    }
    for layer in range(config.num_layers):
        dense = layer < config.num_dense_layers
        index = (layer if dense else layer - config.num_dense_layers,)
        parts = _attention(config, f"model.layers.{layer}.", index)
        parts |= (_dense_mlp if dense else _moe)(config, f"model.layers.{layer}.mlp.", index)
        for path, made_of in parts.items():
            found.setdefault(("dense" if dense else "moe", *path), []).extend(made_of)
    return found


def shapes_of(wanted: dict[TreePath, list[Source]]) -> dict[TreePath, tuple[int, ...]]:
    """The shape of each parameter made of these tensors."""
    shapes = {}
    for path, made_of in wanted.items():
        lead = zip(*(source.index for source in made_of), strict=True)
        shapes[path] = tuple(max(places) + 1 for places in lead) + made_of[0].shape
    return shapes


def _attention(config: ModelConfig, prefix: str, index: tuple[int, ...]) -> dict[TreePath, list[Source]]:
    d, heads, latent = (config.hidden_size,), config.num_heads, (config.kv_lora_rank,)
    nope = config.qk_nope_head_dim
    at = prefix + "self_attn."
    query_in, query_name = d, "q_proj"
    found: dict[TreePath, list[Source]] = {
        ("attn_norm",): [Source(prefix + "input_layernorm.weight", index, d)],
        ("mlp_norm",): [Source(prefix + "post_attention_layernorm.weight", index, d)],
    }
    if config.q_lora_rank is not None:
        query_in, query_name = (config.q_lora_rank,), "q_b_proj"
        found["attention", "q_a"] = [Source(at + "q_a_proj.weight", index, query_in, d)]
        found["attention", "q_a_norm"] = [Source(at + "q_a_layernorm.weight", index, query_in)]
    query = Source(f"{at}{query_name}.weight", index, (heads, config.qk_head_dim), query_in)
    found["attention", "q" if config.q_lora_rank is None else "q_b"] = [query]
    found["attention", "kv_a"] = [Source(at + "kv_a_proj_with_mqa.weight", index, (config.latent_dim,), d)]
    found["attention", "kv_a_norm"] = [Source(at + "kv_a_layernorm.weight", index, latent)]
    # Of each head's rows the first give its keys, the others its values.
    expand = at + "kv_b_proj.weight"
    head_rows = (heads, nope + config.v_head_dim)
    found["attention", "k_b"] = [Source(expand, index, head_rows, latent, slice(0, nope))]
    found["attention", "v_b"] = [Source(expand, index, head_rows, latent, slice(nope, head_rows[1]))]
    found["attention", "o"] = [Source(at + "o_proj.weight", index, d, (heads, config.v_head_dim))]
    return found


def _dense_mlp(config: ModelConfig, prefix: str, index: tuple[int, ...]) -> dict[TreePath, list[Source]]:
    return _gated(config, ("mlp",), prefix, index, config.intermediate_size)


def _moe(config: ModelConfig, prefix: str, index: tuple[int, ...]) -> dict[TreePath, list[Source]]:
    experts = (config.num_experts,)
    found: dict[TreePath, list[Source]] = {}
    found["moe", "router"] = [Source(prefix + "gate.weight", index, experts, (config.hidden_size,))]
    if config.router == "sigmoid_noaux_tc":
        found["moe", "router_bias"] = [Source(prefix + "gate.e_score_correction_bias", index, experts)]
    for expert in range(config.num_experts):
        at = f"{prefix}experts.{expert}."
        for path, made_of in _gated(config, ("moe",), at, (*index, expert), config.moe_intermediate_size).items():
            found.setdefault(path, []).extend(made_of)
    if config.num_shared_experts:
        width = config.num_shared_experts * config.moe_intermediate_size
        found |= _gated(config, ("moe", "shared"), prefix + "shared_experts.", index, width)
    return found


def _gated(
    config: ModelConfig, path: TreePath, prefix: str, index: tuple[int, ...], width: int
) -> dict[TreePath, list[Source]]:
    d, inner = (config.hidden_size,), (width,)
    return {
        (*path, "gate_up"): [
            Source(prefix + "gate_proj.weight", (*index, 0), inner, d),
            Source(prefix + "up_proj.weight", (*index, 1), inner, d),
        ],
        (*path, "down"): [Source(prefix + "down_proj.weight", index, d, inner)],
    }
