"""`LLM`: the engine in the calling process, for notebooks, scripts and tests."""

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxinfer.configs.attention import Dense, Hybrid
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, RequestOutput, SamplingParams
from jaxinfer.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | np.ndarray
type Message = Mapping[str, Any]


class LLM:
    """A loaded model. Not for use from several threads at once."""

    def __init__(
        self,
        model: str | None = None,
        *,
        mesh: str = "",
        precision: str = "auto",
        kv: str = "auto",
        attention_dtype: str = "auto",
        attention: str | Dense | Hybrid = "auto",
        max_context: int | None = None,
        chunk_size: int | None = None,
        page_size: int | None = None,
        max_num_seqs: int | None = None,
        memory_fraction: float = 0.9,
        seed: int = 0,
        weights: str = "auto",
        overrides: Mapping[str, Any] | None = None,
        shard_dense_weights: bool = False,
        unquantized_first_ffn: bool = False,
    ) -> None:
        """Loads and compiles a model; the arguments are the fields of `EngineOptions`.

        `model` is a Hugging Face folder, a converted folder, the name of a preset, or None for the bundled model.
        Raises ValueError for options that cannot work, naming what was expected.
        """
        from jaxinfer.build import build_engine  # loads JAX: not at import

        options = EngineOptions(
            model=model,
            mesh=mesh,
            precision=precision,
            kv=kv,
            attention_dtype=attention_dtype,
            attention=attention,
            max_context=max_context,
            chunk_size=chunk_size,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            memory_fraction=memory_fraction,
            seed=seed,
            weights=weights,
            overrides=overrides,
            shard_dense_weights=shard_dense_weights,
            unquantized_first_ffn=unquantized_first_ffn,
        )
        self._start(build_engine(options))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """An LLM over an engine that was built elsewhere."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._numbers = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def config(self) -> ModelConfig | None:
        """The model's configuration; None if the engine was made without."""
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its folder has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues prompts; the outputs are in their order.

        `prompts` is one prompt (a text or token ids) or several; `sampling_params` is one for all or one for each.
        Raises ValueError, before anything runs, for a prompt that is empty, too long or no text and no token ids, for
        text without a tokenizer, and for unequal numbers of prompts and parameters. A request that the engine failed
        on has `finish_reason` "error" and its message in `error`. An interrupt aborts the requests.
        """
        return self._generate([self._encode(prompt) for prompt in _as_list(prompts)], sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        progress: bool = False,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages with "role" and "content") or several.

        `template_arguments` go to the model's chat template. Raises ValueError as `generate`, and where the template
        refuses the messages.
        """
        if not messages:
            raise ValueError("messages: expected at least one message, got none")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("messages: this model has no tokenizer; expected token ids, through generate()")
        prompts: list[tuple[Sequence[int], str | None]] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in conversation],  # pyright: ignore[reportArgumentType, reportCallIssue]
                add_generation_prompt=add_generation_prompt,
                **template_arguments,
            )
            prompts.append((tokenizer.encode(text, add_special_tokens=False), text))
        return self._generate(prompts, sampling_params, progress)

    def logits(self, ids: Prompt, rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Teacher-forced logits, float32 [rows, vocab]: row i scores the token after `ids[: i + 1]`.

        `rows` picks positions (negative ones count from the end), in any order; None takes all, which for a vocabulary
        of 128K is half a megabyte per token. Raises ValueError for a row out of range.
        """
        prompt, text = self._encode(ids)
        length = len(prompt)
        wanted = [int(row) for row in (range(length) if rows is None else rows)]
        outside = [row for row in wanted if not -length <= row < length]
        if outside:
            raise ValueError(f"rows: expected rows from {-length} to {length - 1}, got {outside[0]}")
        if not wanted:
            return np.zeros((0, self.engine.capacity.vocab_size), np.float32)
        positions = np.asarray(wanted) % length
        unique, inverse = np.unique(positions, return_inverse=True)
        request = Request(
            id=self._new_id(),
            prompt_ids=list(prompt),
            prompt=text,
            params=SamplingParams(max_tokens=1),
            logit_rows=tuple(int(row) for row in unique),
        )
        (output,) = self.run([request])
        if output.logits is None:
            raise RuntimeError(f"the engine failed on this request: {output.error}")
        return output.logits[inverse]

    def close(self) -> None:
        """Lets go of the engine, its weights and its cache."""
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: object) -> tuple[Sequence[int], str | None]:
        """Token ids and, where there is one, the text of a prompt."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: expected token ids, got text")
            return self.tokenizer.encode(prompt), prompt
        ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if not isinstance(ids, Sequence) or not all(_is_id(i) for i in ids):
            raise ValueError(f"expected a prompt as text or as a sequence of token ids, got {_describe(prompt)}")
        return [int(i) for i in ids], None

    def _generate(
        self,
        prompts: Sequence[tuple[Sequence[int], str | None]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"expected one SamplingParams for each of {len(prompts)} prompts, got {len(params)}")
        requests = [
            Request(id=self._new_id(), prompt_ids=list(ids), params=p, prompt=text)
            for (ids, text), p in zip(prompts, params, strict=True)
        ]
        return self.run(requests, progress=progress)

    def _new_id(self) -> str:
        return f"llm-{next(self._numbers)}"

    def run(self, requests: Sequence[Request], *, progress: bool = False) -> list[RequestOutput]:
        """Runs requests as they are, together; the outputs are in their order.  Raises as `generate`."""
        engine = self.engine
        for request in requests:
            engine.check(request)  # before the first of them starts
        running: dict[str, Accumulator] = {}
        try:
            for request in requests:
                engine.admit(request)
                running[request.id] = Accumulator(request)
            accumulators = list(running.values())
            with tqdm(total=len(requests), desc="requests", disable=not progress, dynamic_ncols=True) as bar:
                while running:
                    for update in engine.step():
                        accumulator = running.get(update.request_id)
                        if accumulator is None:
                            continue  # of a call that was interrupted
                        accumulator.add(update)
                        if update.prefill is not None:
                            done, total = update.prefill
                            bar.set_postfix_str(f"prefill {done}/{total}")
                        if update.request_finished:
                            del running[update.request_id]
                            bar.update()
        finally:
            for request_id in running:
                engine.abort(request_id)
        return [accumulator.output for accumulator in accumulators]


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _as_list(prompts: Any) -> list[Any]:
    """One prompt as a list of one. A sequence of integers is one prompt, and so is a vector; of a matrix every row."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise ValueError(f"expected a prompt (text or token ids) or a sequence of prompts, got {_describe(prompts)}")
    return [prompts] if prompts and _is_id(prompts[0]) else list(prompts)
