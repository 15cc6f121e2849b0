"""The routers of the bundled model spread held-out text over the experts."""

import numpy as np
import tokenizers

from jaxinfer.bundled import bundled_folder
from jaxinfer.configs.engine import DEFAULT_MODEL
from jaxinfer.evaluation.haystack import king_james
from launch.bundled_model.held_out import expert_load

WINDOW = 512
FOLDER = bundled_folder(DEFAULT_MODEL)


def test_no_expert_has_more_than_half_as_many_tokens_again_as_the_mean():
    text = "".join(king_james().words[50_000:60_000])
    ids = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert 1 < expert_load(FOLDER, np.array(ids), WINDOW) < 1.5


def test_a_text_of_one_token_goes_to_few_experts():
    assert expert_load(FOLDER, np.full(2 * (WINDOW - 1), 4242), WINDOW) > 2
