"""The command-line flags that every program with an engine has."""

import dataclasses
import json
from collections.abc import Collection
from typing import Any

from absl import app, flags

from jaxinfer.bundled import BUNDLED_NAMES
from jaxinfer.configs.attention import AUTO_DENSE_BELOW, POLICY_FORMS
from jaxinfer.configs.engine import ATTENTION_DTYPES, DEFAULT_MODEL, PRECISIONS, WEIGHTS, EngineOptions
from jaxinfer.configs.kv_format import KV_FORMS
from jaxinfer.configs.presets import PRESET_NAMES


def parse_flags(arguments: list[str]) -> list[str]:
    """Parses a command line as absl does, but takes `--max-context` for `--max_context`. For `app.run`."""
    return app.parse_flags_with_usage([arguments[0], *map(_with_underscores, arguments[1:])])


def _with_underscores(argument: str) -> str:
    name, equals, value = argument.partition("=")
    known = name.replace("-", "_").lstrip("_")
    if name.startswith("-") and (known in flags.FLAGS or known.removeprefix("no") in flags.FLAGS):
        return f"--{known}{equals}{value}"
    return argument


# The flags belong to the command that asks for them: its --help shows them as its own.
flags.disclaim_key_flags()


def define_engine_flags(lists: Collection[str] = ()) -> None:
    """Defines a flag for each field of `EngineOptions`; those of kv and attention named in `lists` take several values.

    `EngineOptions` checks the values of these.
    """

    def define_text(name: str, help_text: str) -> None:
        if name in lists:
            flags.DEFINE_list(name, "auto", f'{help_text}. Several are separated by commas; quote one with commas (")')
        else:
            flags.DEFINE_string(name, "auto", help_text)

    flags.DEFINE_string(
        "model",
        DEFAULT_MODEL,
        "a Hugging Face folder (config.json and safetensors), a folder written by jaxinfer.convert, a bundled model "
        f"({', '.join(BUNDLED_NAMES)}) or a preset ({', '.join(PRESET_NAMES)})",
    )
    flags.DEFINE_string(
        "mesh",
        "",
        "devices to use, as comma-separated axis=size: cp divides the tokens and the cache of each request, ep and dp "
        "divide the requests, tp divides the heads; experts are spread over cp and ep. Example: cp=8. Default: one "
        "device. Without a GPU, virtual CPU devices are made",
    )
    flags.DEFINE_enum(
        "precision",
        "auto",
        PRECISIONS,
        "type of weights and arithmetic: auto is fp32 on CPU, bf16 on a GPU (fp8 for a released FP8 checkpoint), or "
        "what a converted folder was quantised to. fp8 and int8 hold the matrices of attention and feed-forward in 8 "
        "bits with scales (the 128x128 blocks of an FP8 checkpoint as they are, else one scale per output channel) and "
        "quantise their inputs token by token; "
        "router, embedding, norms, attention itself and logits stay as with auto",
    )
    flags.DEFINE_bool(
        "unquantized_first_ffn",
        False,
        "with fp8 and int8: leave the first projection of each feed-forward (gate and up) unquantised",
    )
    define_text(
        "kv",
        "format of the latent cache: auto is fp32 where --precision is, else bf16; int8 has a scale for each token and "
        f"layer, fp8_e4m3 and fp8_e5m2 one for 128 numbers of it; rotated keys stay bfloat16. One of {KV_FORMS}",
    )
    flags.DEFINE_enum(
        "attention_dtype",
        "auto",
        ATTENTION_DTYPES,
        "type of the products of attention in prefill: auto is bf16 (fp32 where --precision is); fp8 rounds queries, "
        "keys, values and weights to e4m3, except in the windows and anchors of hybrid attention",
    )
    define_text(
        "attention",
        "which positions a query reads: auto, which is balanced beyond position "
        f"{AUTO_DENSE_BELOW:,} on one GPU, else dense, or {POLICY_FORMS}",
    )
    flags.DEFINE_integer(
        "max_context", None, "most tokens of a request, prompt and answer together. Default: the model's positions"
    )
    flags.DEFINE_integer("chunk_size", None, "prefill tokens per rank and step. Default: 8192 on a GPU, 256 on CPU")
    flags.DEFINE_integer("page_size", None, "tokens per page of the cache. Default: 64")
    flags.DEFINE_integer(
        "max_num_seqs", None, "most sequences that decode together in a replica. Default: 64 on a GPU, 16 on CPU"
    )
    flags.DEFINE_float("memory_fraction", 0.9, "share of the device's memory for weights, cache and workspace")
    flags.DEFINE_integer("seed", 0, "of random weights, and of requests that bring no seed")
    flags.DEFINE_enum("weights", "auto", WEIGHTS, "auto loads the weights; random makes them up")
    flags.DEFINE_string("overrides", "{}", 'changes to a preset as JSON, for example {"num_hidden_layers": 4}')
    flags.DEFINE_bool(
        "shard_dense_weights",
        False,
        "divide attention and dense feed-forward weights over cp where they lie (gathered layer by layer in prefill); "
        "for cards whose memory does not hold them whole",
    )


def engine_options_from_flags(values: flags.FlagValues = flags.FLAGS, **fixed: Any) -> EngineOptions:
    """The options that the parsed flags give; fields in `fixed` have these values whatever the flags say.

    Raises ValueError for values that are not possible.
    """
    try:
        overrides = json.loads(values.overrides)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected --overrides to be a JSON object, got {values.overrides!r}: {error}") from error
    if not isinstance(overrides, dict):
        raise ValueError(f"expected --overrides to be a JSON object, got {values.overrides!r}")
    given: dict[str, Any] = {field.name: values[field.name].value for field in dataclasses.fields(EngineOptions)}
    given["overrides"] = overrides
    given.update(fixed)
    return EngineOptions(**given)
