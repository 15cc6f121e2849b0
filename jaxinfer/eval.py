"""`python -m jaxinfer.eval --model M --tasks T,... --lengths 4k,8k,...`: quality by length, and checks of exactness.

Writes `results.jsonl` (a record a sample), `report.md` and `report.png` to the folder `--out`.  What has a record there
is not run again, so the same command goes on where a run was stopped, and other settings add to the report.
"""

import dataclasses
import importlib.util
import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from absl import app, flags

from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.probe import PROBE, split_dials
from jaxinfer.evaluation.comparison import INVARIANCES, compare, compare_batches, invariance_sample, without_record
from jaxinfer.evaluation.evaluate import Cell, Setting, cells, evaluate, setting_of
from jaxinfer.evaluation.haystack import from_file, king_james
from jaxinfer.evaluation.records import Records
from jaxinfer.evaluation.report import markdown
from jaxinfer.evaluation.tasks import TASKS, Settings, make_sample, ordinary_tokens
from jaxinfer.flags import define_engine_flags, engine_options_from_flags, parse_flags
from jaxinfer.llm import LLM

FLAGS = flags.FLAGS

_LISTS = ("attention", "kv")
_SAMPLE_FLAGS = {
    "chat": False,
    "answer_tokens": None,
    "between_anchors": False,
    "text": None,
    "kv_lookups": 12,
    "kv_key_tokens": None,
    "kv_distractors": 1 / 32,
}
"""Flags that the samples depend on, with their defaults."""


def parse_length(text: str) -> int:
    """`"8k"` is 8,192, `"1m"` 1,048,576.  Raises ValueError for anything that is no positive length."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"expected a length such as 512, 8k or 1m, got {text!r}")
    return int(digits) * factor


def parse_changes(text: str) -> dict[str, Any]:
    """Changes to the engine's options, `"kv=bf16 mesh=dp=2,cp=4"`.  Raises ValueError for what is no option."""
    names = [field.name for field in dataclasses.fields(EngineOptions)]
    changes: dict[str, Any] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in names:
            raise ValueError(f"expected name=value with a name of {', '.join(names)}, got {part!r}")
        if name == "overrides":
            changes[name] = json.loads(value)
        else:
            changes[name] = value if name in _LISTS else FLAGS[name].parser.parse(value)
    return changes


def _define_flags() -> None:
    define_engine_flags(lists=_LISTS)
    every = [*TASKS, *INVARIANCES]
    flags.DEFINE_list(
        "tasks",
        "niah_single,niah_multikey,niah_multivalue,niah_multiquery,vt,cwe,fwe,passkey,ppl",
        f"what to run, of: {', '.join(every)}",
    )
    flags.DEFINE_list("lengths", "4k,8k", "tokens of prompt and answer together; 8k is 8192")
    flags.DEFINE_integer("depths", 10, "places of what is hidden, from the beginning to the end", lower_bound=1)
    flags.DEFINE_integer("samples", 1, "samples for each length and depth", lower_bound=1)
    flags.DEFINE_string("out", "evaluation", "folder for records and report; an earlier run in it is continued")
    flags.DEFINE_bool("chat", False, "ask in a chat turn; the answer begins with the task's prefix all the same")
    flags.DEFINE_integer("answer_tokens", None, "most tokens of an answer. Default: each task's own", lower_bound=1)
    flags.DEFINE_bool(
        "between_anchors",
        False,
        "hide what is asked for out of reach of the window and the anchors of hybrid attention, so that only retrieval "
        "finds it; for tasks that hide one thing",
    )
    flags.DEFINE_string("text", None, "a text file as haystack and for ppl. Default: the King James Version")
    flags.DEFINE_integer(
        "kv_lookups", 12, "look-ups in each sample of kv; all but one are teacher-forced", lower_bound=1
    )
    flags.DEFINE_integer(
        "kv_key_tokens", None, "tokens of a key in kv. Default: 3, or what retrieval-probe looks up by"
    )
    flags.DEFINE_float("kv_distractors", 1 / 32, "near misses of keys in kv, per token of text", lower_bound=0)
    flags.DEFINE_string(
        "compare", "attention=dense kv=bf16 precision=bf16", "the baseline of --against, as changes to the other flags"
    )
    flags.DEFINE_multi_string(
        "against",
        [],
        'a setting to compare with the baseline of --compare, as changes to it: "kv=fp32", "mesh=dp=2,cp=4 kv=bf16". '
        "May be given several times. With it, samples are compared and not otherwise scored",
    )
    flags.DEFINE_integer("compare_rows", 32, "places in each prompt at which logits are compared", lower_bound=1)
    flags.DEFINE_multi_integer(
        "invariance_chunk", [], "chunk sizes for invariance_chunk. Default: a half and a quarter of the engine's"
    )
    flags.DEFINE_multi_string("invariance_mesh", ["cp=1"], "meshes for invariance_mesh, compared with --mesh")
    flags.DEFINE_bool("picture", True, "draw report.png; needs matplotlib, which the extra jaxinfer[eval] installs")


class Evaluation:
    """One run of the command."""

    def __init__(self, options: EngineOptions):
        """`options` are the engine's, as the flags give them but for the lists."""
        self.out = Path(FLAGS.out)
        self.lengths = [parse_length(text) for text in FLAGS.lengths]
        known = [*TASKS, *INVARIANCES]
        unknown = [task for task in FLAGS.tasks if task not in known]
        if unknown or not FLAGS.tasks or not self.lengths:
            raise ValueError(f"expected lengths and tasks of {', '.join(known)}; got {FLAGS.lengths}, {FLAGS.tasks}")
        context = options.max_context or max(self.lengths)
        if context < max(self.lengths):
            raise ValueError(f"expected max_context of at least {max(self.lengths)}, got {context}")
        self.options = dataclasses.replace(options, max_context=context)
        self.haystack = from_file(Path(FLAGS.text)) if FLAGS.text else king_james()
        self.records = Records(self.out / "results.jsonl")
        self._sample_setting = {k: FLAGS[k].value for k, v in _SAMPLE_FLAGS.items() if FLAGS[k].value != v}
        self._settings: Settings | None = None

    def run(self, attention: Sequence[str], kv: Sequence[str]) -> None:
        """Runs all tasks, for every pair of an attention policy and a cache format."""
        grid = [dataclasses.replace(self.options, attention=a, kv=k) for a in attention for k in kv]
        changes = [parse_changes(text) for text in FLAGS.against]
        if changes and len(grid) > 1:
            raise ValueError("expected one --attention and one --kv with --against, which names the settings itself")
        baseline = dataclasses.replace(grid[0], **parse_changes(FLAGS.compare))
        others = [dataclasses.replace(baseline, **change) for change in changes]
        meshes = [dataclasses.replace(options, mesh=mesh) for options in grid for mesh in self._other_meshes()]
        self._start_platform([*grid, *others, *meshes])

        scored = self._cells([task for task in FLAGS.tasks if task in TASKS])
        if others and scored:
            self._compare(baseline, others, scored)
        for options in grid:
            if not others:
                self._evaluate(options, scored)
            for task in FLAGS.tasks:
                if task in INVARIANCES:
                    self._check(task, options)

    def report(self) -> str:
        """Writes `report.md`, and `report.png` if wanted, on everything that the folder has records of."""
        text = markdown(self.records.all)
        (self.out / "report.md").write_text(text)
        if FLAGS.picture:
            from jaxinfer.evaluation.picture import draw  # loads matplotlib

            draw(self.records.all, self.out / "report.png")
        return text

    def setting(self, options: EngineOptions) -> Setting:
        return setting_of(options, self._sample_setting)

    def _other_meshes(self) -> list[str]:
        if "invariance_mesh" not in FLAGS.tasks:
            return []
        found = [mesh for mesh in FLAGS.invariance_mesh if mesh != (self.options.mesh or "cp=1")]
        if not found:
            raise ValueError("invariance_mesh: expected a --mesh or --invariance_mesh of several devices")
        return found

    def _start_platform(self, every: Sequence[EngineOptions]) -> None:
        """The largest mesh decides how many virtual devices a machine without GPUs has."""
        from jaxinfer.sharding.mesh import parse, start_platform  # loads JAX: not for --help

        start_platform(max((parse(options.mesh) for options in every), key=lambda shape: shape.num_devices))

    def _open(self, options: EngineOptions) -> LLM:
        from jaxinfer.build import build_engine

        return LLM.from_engine(build_engine(options))

    def _cells(self, tasks: Sequence[str]) -> list[Cell]:
        return cells(tasks, self.lengths, FLAGS.depths, FLAGS.samples)

    def settings(self, llm: LLM) -> Settings:
        """What the samples depend on; the model's tokenizer is the same in all settings."""
        if self._settings is None:
            keys = FLAGS.kv_key_tokens
            if keys is None:
                probe = self.options.model == PROBE
                keys = split_dials(self.options.overrides or {})[0].key_tokens if probe else 3
            self._settings = Settings(
                tokenizer=llm.tokenizer,
                ordinary=ordinary_tokens(llm.tokenizer, llm.engine.capacity.vocab_size),
                haystack=self.haystack,
                seed=self.options.seed,
                chat=FLAGS.chat,
                answer_tokens=FLAGS.answer_tokens,
                between_anchors=FLAGS.between_anchors,
                kv_lookups=FLAGS.kv_lookups,
                kv_key_tokens=keys,
                kv_distractors=FLAGS.kv_distractors,
            )
        return self._settings

    def _evaluate(self, options: EngineOptions, todo: Sequence[Cell]) -> None:
        setting = self.setting(options)
        if any(cell.key(setting) not in self.records for cell in todo):
            with self._open(options) as llm:
                evaluate(llm, setting, todo, self.settings(llm), self.records)

    def _compare(self, baseline: EngineOptions, others: Sequence[EngineOptions], todo: Sequence[Cell]) -> None:
        def sample_of(cell: Cell, llm: LLM):
            if cell.task in INVARIANCES:
                return invariance_sample(cell, self.settings(llm))
            return make_sample(cell.task, cell.length, cell.depth, cell.sample, self.settings(llm))

        def opened(options: EngineOptions):
            return self.setting(options), partial(self._open, options)

        folder = self.out / "baseline"
        compare(opened(baseline), [*map(opened, others)], todo, sample_of, FLAGS.compare_rows, folder, self.records)

    def _check(self, task: str, options: EngineOptions) -> None:
        """One of the invariance checks."""
        todo = cells([task], self.lengths, 1, FLAGS.samples)
        setting = self.setting(options)
        if task == "invariance_mesh":
            self._compare(options, [dataclasses.replace(options, mesh=m) for m in self._other_meshes()], todo)
        elif task == "invariance_chunk":
            sizes = FLAGS.invariance_chunk
            if not sizes:
                with self._open(options) as llm:
                    whole = llm.engine.capacity.chunk_size
                sizes = [whole // 2, whole // 4]
            self._compare(options, [dataclasses.replace(options, chunk_size=size) for size in sizes], todo)
        elif missing := without_record(todo, setting, self.records):
            with self._open(options) as llm:
                compare_batches(
                    llm,
                    setting,
                    missing,
                    partial(invariance_sample, settings=self.settings(llm)),
                    FLAGS.compare_rows,
                    self.records,
                )


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0 when everything has been run, 130 after an interrupt."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected flags only, got {arguments[1:]}")
    if FLAGS.picture and importlib.util.find_spec("matplotlib") is None:
        raise app.UsageError('the picture needs matplotlib: pip install "jaxinfer[eval]", or --nopicture')
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        evaluation = Evaluation(engine_options_from_flags(attention="auto", kv="auto"))
        evaluation.run(FLAGS.attention, FLAGS.kv)
    except KeyboardInterrupt:
        print("jaxinfer.eval: interrupted; the same command goes on where this one stopped")
        return 130
    except (ValueError, OSError, RuntimeError) as error:  # the last from the engine, on a sample
        print(f"jaxinfer.eval: {error}")
        return 1
    print(evaluation.report())
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=parse_flags)
