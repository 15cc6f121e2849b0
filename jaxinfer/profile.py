"""`python -m jaxinfer.profile --model M`: measures which heads look for things far away, for hybrid attention.

Prompts with a needle are run with dense attention, and each head's share of the softmax on the needle while the answer
is written is its score.  The profile is written beside the model's weights, where the engine finds it: those heads then
speak for their groups in retrieval, and `--attention hybrid:local_below=0.02` keeps groups of heads that never score as
much from reading blocks far away.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.profile import PROFILE_FILE, HeadProfile
from jaxinfer.eval import parse_length
from jaxinfer.flags import parse_flags

FLAGS = flags.FLAGS


def _define_flags() -> None:
    """Not at import: other commands have flags of the same names."""
    flags.DEFINE_string("model", None, "Folder of the model; the bundled one if it is not given.")
    flags.DEFINE_enum("task", "niah_single", ["niah_single", "niah_single_uuid", "passkey"], "What is hidden.")
    flags.DEFINE_string("length", "8k", "Tokens of a prompt, as in 4k.")
    flags.DEFINE_integer("samples", 16, "Prompts, at depths evenly spread.", lower_bound=1)
    flags.DEFINE_string("out", None, f"File to write; {PROFILE_FILE} in the model's folder if it is not given.")
    flags.DEFINE_integer("seed", 0, "Draws the prompts.")


def profile(model: str | None, task: str, length: int, samples: int, seed: int, out: Path | None) -> Path:
    """Measures and writes the profile; returns where.  Raises ValueError for what is not possible."""
    from tqdm import tqdm

    from jaxinfer.build import build_engine  # loads JAX: not for --help
    from jaxinfer.evaluation.haystack import king_james
    from jaxinfer.evaluation.head_profile import head_scores
    from jaxinfer.evaluation.tasks import Settings, make_sample, ordinary_tokens
    from jaxinfer.llm import LLM
    from jaxinfer.source import ModelSource

    options = EngineOptions(model=model, max_context=length, max_num_seqs=1, attention="dense", seed=seed)
    folder = ModelSource(options).folder
    if out is None:
        if folder is None:
            raise ValueError("expected --out for a model that is no folder")
        out = folder / PROFILE_FILE
    with LLM.from_engine(build_engine(options)) as llm, tqdm(total=samples, desc="prompts") as bar:
        settings = Settings(
            tokenizer=llm.tokenizer,
            ordinary=ordinary_tokens(llm.tokenizer, llm.engine.capacity.vocab_size),
            haystack=king_james(),
            seed=seed,
        )
        depths = [number / max(samples - 1, 1) for number in range(samples)]
        prompts = (make_sample(task, length, depth, number, settings) for number, depth in enumerate(depths))
        scores = head_scores(llm, prompts, bar.update)
    HeadProfile(scores=scores, task=task, length=length, samples=samples).save(out)
    for layer, row in enumerate(scores):
        best = sorted(range(len(row)), key=lambda head: -row[head])[:8]
        print(f"layer {layer}: " + ", ".join(f"head {head} {row[head]:.2f}" for head in best))
    return out


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected flags only, got {' '.join(arguments[1:])}")
    try:
        out = Path(FLAGS.out) if FLAGS.out else None
        path = profile(FLAGS.model, FLAGS.task, parse_length(FLAGS.length), FLAGS.samples, FLAGS.seed, out)
    except (OSError, ValueError) as error:
        sys.exit(f"profile: {error}")
    print(path)


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=parse_flags)
