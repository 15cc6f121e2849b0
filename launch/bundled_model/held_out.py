"""Bits per byte on held-out text: `python -m launch.bundled_model.held_out --out docs/benchmarks/raw/NAME.jsonl`.

The bundled model (through the engine, in windows), `xz -9e`, and a 5-gram model of the training tokens, on the same
text: of each held-out part of `.corpus/` the documents in a random order, up to `--bytes` bytes.  All three have to say
where documents end.  Beside it, how evenly the model's routers spread the same windows over the experts.  A line per
part is appended to `--out`; parts that it holds are not measured again.
"""

import argparse
import json
import lzma
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bundled import bundled_folder
from jaxinfer.configs.engine import DEFAULT_MODEL
from jaxinfer.engine.request import SamplingParams
from jaxinfer.llm import LLM
from launch.bundled_model import export, model
from launch.bundled_model.data import PARTS
from launch.bundled_model.ngram import NgramModel
from launch.bundled_model.vocabulary import BOS, EOS, Vocabulary, tokenise

ROOT = Path(__file__).resolve().parents[2]
ORDER = 5


def choose(text: str, limit: int, seed: int) -> list[str]:
    """The documents (separated by NUL) in a random order, as many as have `limit` bytes, the last one cut there."""
    texts = text.split("\0")
    order = np.random.default_rng(seed).permutation(len(texts))
    cut = "\0".join(texts[i] for i in order).encode()[:limit].decode(errors="ignore")
    return cut.split("\0")


def xz_bits(documents: list[str]) -> int:
    """Size in bits of the documents, joined by NUL, after `xz -9e`."""
    return 8 * len(lzma.compress("\0".join(documents).encode(), preset=9 | lzma.PRESET_EXTREME))


def model_bits(llm: LLM, stream: np.ndarray, window: int) -> float:
    """Bits that the model gives to the tokens of a stream, those of documents' beginnings excepted.

    Windows of `window` tokens stand alone: their first tokens are scored with hardly anything before them.
    """
    bits = 0.0
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    pieces = [stream[start : start + window - 1] for start in range(0, len(stream), window - 1)]
    prompts = [[BOS, *piece.tolist()] for piece in pieces]
    for out in llm.generate(prompts, params, progress=True):
        assert out.prompt_logprobs is not None
        scored = [entry.chosen for entry in out.prompt_logprobs[1:] if entry is not None]
        bits -= sum(chosen.logprob for chosen in scored if chosen.token_id != BOS) / np.log(2)
    return bits


def expert_load(folder: Path, stream: np.ndarray, window: int) -> float:
    """Tokens of the busiest expert over the mean of its layer's experts, in the layer where that is largest.

    The layers of the model itself, not of its multi-token prediction; the stream's last, partial window is left out.
    """
    config = export.bundled_config()
    params = jax.tree.map(jnp.asarray, export.parameters(config, folder))
    positions = jnp.arange(window)[None]

    @jax.jit
    def load(tokens):
        return model.hidden_states(config, params, tokens[None], positions, "blocked")[1].load

    pieces = stream[: len(stream) // (window - 1) * (window - 1)].reshape(-1, window - 1)
    total = np.asarray(sum(load(jnp.asarray([BOS, *piece], jnp.int32)) for piece in pieces))
    return float(np.max(total.max(axis=1) / total.mean(axis=1)))


def ngram_model(corpus: Path, vocabulary: Vocabulary, seed: int) -> NgramModel:
    """The n-gram model of all training tokens."""
    streams = []
    for part in PARTS:
        texts = lzma.decompress((corpus / f"train-{part}.xz").read_bytes()).decode().split("\0")
        streams.append(tokenise(texts, vocabulary.backend, seed))
    return NgramModel(np.concatenate(streams), ORDER, vocabulary.size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=ROOT / ".corpus", help="what prepare_corpus.py wrote")
    parser.add_argument("--model", default=str(bundled_folder(DEFAULT_MODEL)))
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of each part, at most")
    parser.add_argument("--window", type=int, default=2048, help="tokens that the model sees at once")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["part"] for line in args.out.read_text().splitlines()} if args.out.is_file() else set()
    parts = [part for part in (*PARTS, "kjv") if part not in done]
    if not parts:
        return
    vocabulary = Vocabulary(args.corpus, True)
    ngram = ngram_model(args.corpus, vocabulary, args.seed)
    with LLM(model=args.model, max_context=args.window + 1, max_num_seqs=4) as llm:
        for part in parts:
            whole = lzma.decompress((args.corpus / f"held-{part}.xz").read_bytes()).decode()
            texts = choose(whole, args.bytes, args.seed)
            size = sum(len(text.encode()) + 1 for text in texts) - 1
            stream = np.concatenate([[BOS, *ids, EOS] for ids in _encode(vocabulary, texts)])
            begun = time.monotonic()
            bits = {"model": model_bits(llm, stream[1:], args.window)}
            seconds = time.monotonic() - begun
            scored = stream != BOS
            bits["ngram"] = -float(ngram.log2_probabilities(stream)[scored].sum())
            bits["xz"] = xz_bits(texts)
            line = {
                "part": part,
                "bytes": size,
                "of_bytes": len(whole.encode()),
                "documents": len(texts),
                "tokens": int(scored.sum()),
                "window": args.window,
                "order": ORDER,
                "bits_per_byte": {name: round(value / size, 4) for name, value in bits.items()},
                "below_xz": round(1 - bits["model"] / bits["xz"], 4),
                "below_ngram": round(1 - bits["model"] / bits["ngram"], 4),
                "expert_load": round(expert_load(Path(args.model), stream[1:], args.window), 3),
                "seconds": round(seconds, 1),
            }
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def _encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    return [item.ids for item in vocabulary.backend.encode_batch(texts, add_special_tokens=False)]


if __name__ == "__main__":
    main()
