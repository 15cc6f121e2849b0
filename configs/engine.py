"""What an engine can be told, by `LLM`, `serve`, `batch` and every other front end alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.configs.attention import Dense, Hybrid, parse_policy
from jaxinfer.configs.kv_format import LayerFormats, parse_formats

ATTENTION_DTYPES = ("auto", "bf16", "fp8")
PRECISIONS = ("auto", "fp32", "bf16", "fp8", "int8")
WEIGHTS = ("auto", "random")
DEFAULT_MODEL = "jaxinfer-12m"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine; None means a default that depends on the model and the device.

    Raises ValueError for values that are not possible, naming what was expected and what came.
    """

    model: str | None = None
    """A Hugging Face folder, a converted folder, or the name of a bundled model or preset; None: the bundled model."""
    mesh: str = ""
    """Comma-separated axis=size with the axes dp, cp, ep, tp; empty: one device."""
    precision: str = "auto"
    """Type of weights and arithmetic: auto is fp32 on CPU and bf16 on a GPU, or what a folder is quantised to.

    fp8 and int8 hold the matrices of attention and feed-forward quantised, and quantise what they are multiplied with;
    everything else stays in the type of auto.
    """
    unquantized_first_ffn: bool = False
    """With fp8 and int8: leave the first projection of each feed-forward (gate and up) unquantised."""
    kv: str = "auto"
    """Format of the latent cache, and of layers that have another (`configs.kv_format.parse_formats`).

    auto is fp32 where precision is, else bf16.  int8 holds a latent in 8 bits with one scale, fp8_e4m3 and fp8_e5m2
    with a scale for 128 numbers; the rotated key stays bfloat16.  Decode with int8 rounds its queries to 8 bits, too.
    """
    attention_dtype: str = "auto"
    """Type of the products of attention in prefill: auto is bf16, which stands for the type of precision.

    fp8 rounds queries, keys, values and the weights of the softmax to e4m3: of dense attention (`kernels.mla_prefill`),
    and of the blocks that hybrid attention retrieves (`kernels.mla_sparse`), not of its windows and anchors.
    """
    attention: str | Dense | Hybrid = "auto"
    """Which positions a query reads: a policy, what `configs.attention.parse_policy` reads, or auto.

    auto is dense on CPU and on several devices; on one GPU it is `configs.attention.automatic_policy`, if the pages
    allow for its grid.
    """
    max_context: int | None = None
    """Most tokens of a request, prompt and answer together; default: what the model has positions for."""
    chunk_size: int | None = None
    """Prefill tokens per rank and step; default: 8192 on a GPU, 256 on CPU."""
    page_size: int | None = None
    """Tokens per page of the cache; default: 64."""
    max_num_seqs: int | None = None
    """Most sequences that decode together in each replica; default: 64 on a GPU, 16 on CPU."""
    memory_fraction: float = 0.9
    """Share of the device's memory for weights, cache and workspace."""
    seed: int = 0
    """Of random weights, and of the requests that bring no seed of their own."""
    weights: str = "auto"
    """auto loads them; random makes them up, for any preset or folder with a config.json."""
    overrides: Mapping[str, Any] | None = None
    """Changes to a preset's sizes, by ModelConfig or Hugging Face names."""
    shard_dense_weights: bool = False
    """Divide attention and dense feed-forward weights over cp where they lie, gathered layer by layer in prefill."""

    def __post_init__(self):
        for name, choices in (
            ("precision", PRECISIONS),
            ("attention_dtype", ATTENTION_DTYPES),
            ("weights", WEIGHTS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        _ = self.policy, self.formats  # raise if there is no such policy or format
        for name in ("max_context", "chunk_size", "page_size", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} to be positive, got {value}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"expected memory_fraction in (0, 1], got {self.memory_fraction}")

    @property
    def policy(self) -> Dense | Hybrid | None:
        """What `attention` says, None for auto.  Raises ValueError for what is no policy."""
        if not isinstance(self.attention, str):
            return self.attention
        return None if self.attention == "auto" else parse_policy(self.attention)

    @property
    def formats(self) -> LayerFormats:
        """What `kv` says.  Raises ValueError for what are no formats."""
        return parse_formats(self.kv)
