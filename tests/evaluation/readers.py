"""Models that read text with regular expressions: what an evaluation must find when recall is perfect, or short."""

import re

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Sequence
from jaxinfer.llm import LLM
from jaxinfer.tokenizer import byte_tokenizer
from tests.engine.fake_runner import FakeRunner, capacity

VOCAB = 512
_FACT = r"(?:magic \w+ for {key} is:|The pass key is) ([\w-]+)\."


def reader(reach: int | None = None, max_context: int = 8192) -> LLM:
    """An LLM of bytes that answers `passkey` and needle questions from the last `reach` bytes of the prompt."""

    def next_token(tokens: np.ndarray, sequence: Sequence, vocab: int) -> int:
        prompt = bytes(token for token in tokens[: sequence.num_prompt].tolist() if token < 256).decode()
        seen = prompt if reach is None else prompt[-reach:]
        asked = re.findall(r"for ([^?]+?) mentioned in the provided text\?", prompt.split("\n")[-1])
        names = re.split(r", and |, ", asked[-1]) if asked else [""]
        found = [v for name in names for v in re.findall(_FACT.format(key=re.escape(name)), seen)]
        text = (" " + ", ".join(found) + "\n").encode()
        return text[sequence.num_output] if sequence.num_output < len(text) else ord("x")

    runner = FakeRunner(capacity(context=max_context, pages=8192, chunk=1024, vocab=VOCAB), next_token=next_token)
    return LLM.from_engine(Engine(runner, byte_tokenizer(), model_name="reader"))
