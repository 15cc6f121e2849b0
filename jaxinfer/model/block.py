"""One layer: attention and feed-forward, each behind a norm and around a residual."""

import jax
from flax import nnx

from jaxinfer.cache import Cache
from jaxinfer.configs.model import ModelConfig
from jaxinfer.model.attention import Attention, Rotations
from jaxinfer.model.batch import DecodeBatch, PrefillBatch
from jaxinfer.model.linear import normalised
from jaxinfer.model.moe import MLP, MoE
from jaxinfer.model.params import weight
from jaxinfer.model.policies import Policies
from jaxinfer.model.precision import Precision
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan


class Block(nnx.Module):
    """A dense layer (`kind="dense"`) or a mixture-of-experts layer (`kind="moe"`)."""

    def __init__(self, config: ModelConfig, kind: str, precision: Precision):
        d, dtype = config.hidden_size, precision.dtype
        self.eps = config.rms_norm_eps
        self.first_layer = 0 if kind == "dense" else config.num_dense_layers
        self.kind, self.dtype = kind, dtype
        self.attn_norm = weight((d,), (None,), dtype)
        self.attention = Attention(config, precision)
        self.mlp_norm = weight((d,), (None,), dtype)
        if kind == "dense":
            self.mlp = MLP(d, config.intermediate_size, precision)
        else:
            self.moe = MoE(config, precision)

    def __call__(
        self,
        x: jax.Array,
        cache: Cache,
        layer: jax.Array,
        batch: PrefillBatch | DecodeBatch,
        rope: Rotations,
        layout: Layout,
        plan: Plan,
        policies: Policies,
    ) -> tuple[jax.Array, Cache]:
        """The residual stream, float32 `x [T, d]`, after this layer, and the cache with its latents of the batch.

        The stream stays float32 in every precision: what is rounded is the input of each product, so that the same
        text divided otherwise over chunks and ranks takes other paths through the experts as rarely as can be.
        """
        with jax.named_scope("attention"):
            h = normalised(self.attention.reader, x, self.attn_norm, self.eps, self.dtype)
            if isinstance(batch, PrefillBatch):
                out, cache = self.attention.prefill(h, cache, layer, batch, rope, layout, plan, policies)
            else:
                out, cache = self.attention.decode(h, cache, layer, batch, rope, layout, plan, policies)
            x = x + out
        with jax.named_scope(self.kind):
            feed_forward = self.mlp if self.kind == "dense" else self.moe
            h = normalised(feed_forward.gate_up, x, self.mlp_norm, self.eps, self.dtype)
            if self.kind == "dense":
                out = self.mlp(h, plan)
            else:
                out = self.moe(x, self.mlp_norm, h, batch.positions >= 0, layer - self.first_layer, plan)
            return x + out, cache
