"""Where a model comes from: a folder, a bundled model, or a preset whose weights are made up."""

from dataclasses import replace
from pathlib import Path

from jaxinfer.bundled import BUNDLED_NAMES, bundled_folder
from jaxinfer.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.constructed import probe_parameters
from jaxinfer.checkpoint.random import random_parameters
from jaxinfer.configs.engine import DEFAULT_MODEL, EngineOptions
from jaxinfer.configs.presets import PRESET_NAMES, override, preset
from jaxinfer.configs.probe import PROBE, split_dials
from jaxinfer.configs.profile import PROFILE_FILE, HeadProfile
from jaxinfer.kernels.quantize import BLOCK
from jaxinfer.model.params import Tree
from jaxinfer.tokenizer import Tokenizer, byte_tokenizer


class ModelSource:
    """The model that the options name: `name`, `config`, `tokenizer`, and `load` for its weights.

    A folder of the name of a bundled model or preset goes before it.  Raises FileNotFoundError if there is no such
    model, and ValueError for weights that do not exist, overrides that do not fit, and a tokenizer with more tokens
    than the model.
    """

    def __init__(self, options: EngineOptions):
        self.name = options.model or DEFAULT_MODEL
        self._options = options
        self._checkpoint: Checkpoint | None = None
        self._dials = None
        overrides = dict(options.overrides or {})
        folder = Path(self.name) if Path(self.name).is_dir() else bundled_folder(self.name)
        if folder is not None:
            self._open_folder(folder, overrides)
        elif self.name in PRESET_NAMES:
            self._take_preset(overrides)
        else:
            raise FileNotFoundError(
                f"expected a model folder, a bundled model ({', '.join(BUNDLED_NAMES)}) or one of the presets "
                f"{', '.join(PRESET_NAMES)}, got {self.name!r}"
            )
        ends: tuple[int, ...] = ()
        if self.tokenizer is not None:
            ends = tuple(self.tokenizer.eos_ids)
            if self.tokenizer.vocab_size > self.config.vocab_size:
                raise ValueError(
                    f"the tokenizer of {self.name} has {self.tokenizer.vocab_size} tokens, the model only "
                    f"{self.config.vocab_size}"
                )
        self.config = replace(self.config, eos_token_ids=tuple(sorted({*self.config.eos_token_ids, *ends})))

    def _open_folder(self, folder: Path, overrides: dict) -> None:
        self.name = folder.resolve().name
        self._checkpoint = open_checkpoint(folder)
        self.config = override(self._checkpoint.config, overrides)
        if self.config != self._checkpoint.config and self._options.weights != "random":
            raise ValueError(f"overrides {overrides} would not fit the weights of {folder}: use weights='random'")
        self.tokenizer = Tokenizer.load(folder)

    def _take_preset(self, overrides: dict) -> None:
        if self._options.weights != "random" and self.name not in ("tiny-random", PROBE):
            raise ValueError(
                f"the preset {self.name!r} comes without weights: give a folder that has them, or weights='random'"
            )
        if self.name == PROBE:
            self._dials, overrides = split_dials(overrides)
        self.config = preset(self.name, overrides)
        self.tokenizer = byte_tokenizer() if self.name == "tiny-random" else None

    @property
    def folder(self) -> Path | None:
        """Where the weights lie; None for those that are made up."""
        return None if self._checkpoint is None or self._options.weights == "random" else self._checkpoint.folder

    @property
    def profile(self) -> HeadProfile | None:
        """The head profile beside the weights; None where there is none.  Raises ValueError for one that is not the
        model's."""
        path = None if self.folder is None else self.folder / PROFILE_FILE
        if path is None or not path.is_file():
            return None
        return HeadProfile.load(path, self.config.num_layers, self.config.num_heads)

    @property
    def quantized(self) -> str | None:
        """The precision that a converted folder is quantised to, `fp8` or `int8`; None for every other model."""
        return None if self._checkpoint is None else self._checkpoint.quantized

    @property
    def fp8_blocks(self) -> bool:
        """Whether the model is a folder whose weights are released in FP8 with 128x128 scales."""
        return self._checkpoint is not None and self.config.weight_block_size == (BLOCK, BLOCK)

    def load(self, specs: Tree, progress: bool) -> Tree:
        """The weights in the shapes, types and shardings of `specs`; `progress` shows a bar on stderr."""
        if self._dials is not None and self._options.weights != "random":
            return probe_parameters(specs, self.config, self._dials, self._options.seed)
        if self._checkpoint is None or self._options.weights == "random":
            return random_parameters(specs, self.config, self._options.seed)
        return self._checkpoint.load(specs, progress=progress)
