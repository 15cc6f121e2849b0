"""`python -m jaxinfer.bench kernels`: cases, work and floors by hand, errors, faults of workers, the command itself."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.bench import kernels, quantization, workers
from jaxinfer.bench.clocks import Clocks
from jaxinfer.bench.hardware import PEAKS, floor_seconds
from jaxinfer.bench.kernels import Measurement, Options, chosen_cases
from jaxinfer.bench.measure import OPERATIONS, measure_case
from jaxinfer.bench.operation import Case, Published, Work, sets_of, spread
from jaxinfer.bench.records import Records
from jaxinfer.bench.report import largest_kernel, markdown, share_of_floor
from jaxinfer.bench.timing import alone, measure
from jaxinfer.kernels import dispatch
from tests.frontends.test_commands import ROOT, run

TINY = {
    "gemm": (16, 128, 256),
    "grouped_gemm": (5, 24, 64, 128),
    "quantize": (8, 256),
    "mla_prefill": (6, 9, 2),
    "mla_decode": (3, 4, 100),
    "mla_sparse": (64, 1024, 8, 3),
    "selection": (64, 16384, 4),
    "router": (8, 24, 128),
    "copy_pages": (5, 8, 64),
}
CASES = [
    case
    for name, shape in TINY.items()
    for case in OPERATIONS[name].cases(shape)
    if OPERATIONS[name].left_out(case, "reference") is None
]


def test_the_default_table_has_every_row_of_every_operation() -> None:
    cases = chosen_cases(list(OPERATIONS), [])
    assert (
        len(cases) == len(set(cases)) == 7 * 4 + 4 * 4 + 3 * 3 + 2 * 3 * 3 + 4 + 2 * 3 + 3 + 2 + 2 + 3 + 2 + 5 * 2 + 5
    )
    assert Case("gemm", "block", (4096, 7168, 18432)) in cases
    assert Case("mla_decode", "bf16, one long", (64, 128, 524288)) in cases
    for case in cases:
        assert case in OPERATIONS[case.op].cases(case.shape)


def test_shapes_take_the_place_of_the_table() -> None:
    assert chosen_cases(["gemm", "mla_prefill"], ["mla_prefill:8x16x2"]) == [
        Case("mla_prefill", form, (8, 16, 2)) for form in ("bf16", "e4m3")
    ]


@pytest.mark.parametrize(
    ("ops", "shapes", "words"),
    [
        (["gem"], [], "mla_decode, mla_sparse, selection, router, copy_pages, got gem"),
        ([], [], "expected some of"),
        (["gemm"], ["quantize:8x256"], "expected op:sizes with an op of --ops, gemm"),
        (["gemm"], ["gemm:8xNx128"], "expected gemm:MxNxK in numbers"),
        (["gemm"], ["gemm:128x128"], "expected a shape gemm:MxNxK, got 128x128"),
        (["gemm"], ["gemm:8x64x100"], "expected K a multiple of 128"),
        (["gemm"], ["gemm:0x64x128"], "expected a shape gemm:MxNxK, got 0x64x128"),
        (["quantize"], ["quantize:8x128"], "expected K a multiple of 256"),
        (["mla_prefill"], ["mla_prefill:16x8x2"], "expected no more queries than keys"),
        (["selection"], ["selection:64x8192x4"], "expected T a multiple of 32"),
    ],
)
def test_what_is_no_case_is_refused_with_the_reason(ops: list[str], shapes: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen_cases(ops, shapes)


@pytest.mark.parametrize(
    ("case", "flops", "moved"),
    [
        # x and w in e4m3, a bfloat16 result, a scale for each row and channel.
        (Case("gemm", "row", (8, 64, 128)), 2 * 8 * 64 * 128, 8 * 128 + 64 * 128 + 2 * 8 * 64 + 4 * (8 + 64)),
        # One block of K, one of N.
        (Case("gemm", "block", (8, 64, 128)), 2 * 8 * 64 * 128, 8 * 128 + 64 * 128 + 2 * 8 * 64 + 4 * (8 + 1)),
        (Case("gemm", "bf16", (8, 64, 128)), 2 * 8 * 64 * 128, 2 * (8 * 128 + 64 * 128 + 8 * 64)),
        # All rows in the one group.
        (Case("grouped_gemm", "int8", (1, 8, 64, 128)), 2 * 8 * 64 * 128, 8 * 128 + 64 * 128 + 2 * 512 + 4 * 72),
        (Case("quantize", "plain row", (8, 256)), 0, 8 * (2 * 256 + 256 + 4)),
        (Case("quantize", "swiglu block", (8, 512)), 0, 8 * (2 * 512 + 256 + 4 * 2)),
        (Case("quantize", "swiglu block mosaic", (8, 512)), 0, 8 * (2 * 512 + 256 + 4 * 2)),
        # Queries 2 and 3 of three keys see two and three of them.
        (
            Case("mla_prefill", "bf16", (2, 3, 1)),
            2 * 5 * (192 + 128),
            2 * (2 * 192 + 3 * 576 + 256 * 512) + 4 * 2 * 129,
        ),
        (
            Case("mla_decode", "bf16", (2, 4, 100)),
            2 * 2 * 100 * 4 * (576 + 512),
            2 * 200 * 576 + 8 * (2 * 576 + 4 * 513),
        ),
        # 512 numbers of 8 bits, a scale, 64 numbers of 16 bits.
        (
            Case("mla_decode", "int8", (2, 4, 100)),
            2 * 200 * 4 * (576 + 512),
            200 * (512 + 4 + 2 * 64) + 8 * (2 * 576 + 4 * 513),
        ),
        # Lists that have all the blocks.
        (
            Case("mla_sparse", "bf16", (32, 1024, 8, 8)),
            2 * 32 * 8 * 1024 * (576 + 512),
            2 * (1024 * 576 + 32 * 8 * (576 + 512)) + 4 * 32 * 8,
        ),
        (
            Case("selection", "bf16", (64, 16384, 4)),
            # 32 probes of 4 heads; 128 numbers for each group before the windows; 64 candidates of 128 keys.
            2 * 128 * (128 * (95 + 95) * 32 + 576 * 2 * 64 * 128),
            2 * 576 * (16384 + 2 * 128) + 128 * 4096 + 8 * 2 * 4 * 64,
        ),
        (
            Case("router", "split", (8, 24, 128)),
            2 * 8 * 24 * 128,
            4 * (8 * 128 + 24 * 128 + 8 * 24) + 2 * 128,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_work_is_what_is_counted_by_hand(case: Case, flops: float, moved: float) -> None:
    work = OPERATIONS[case.op].work(case)
    assert work.flops == flops
    assert work.bytes == moved


def test_a_case_with_one_long_sequence_counts_the_keys_there_are() -> None:
    work = OPERATIONS["mla_decode"].work(Case("mla_decode", "bf16, one long", (3, 1, 8192)))
    lengths = [8192, *np.random.default_rng(1).integers(1, 4097, 2)]
    assert work.flops == 2 * sum(lengths) * (576 + 512)


def test_the_floor_is_the_larger_of_arithmetic_and_bytes() -> None:
    peaks = PEAKS["NVIDIA H200"]
    assert floor_seconds(Work(flops=1979e12, bytes=4.8e12 / 2, flops_8_bit=1979e12), peaks) == pytest.approx(1.0)
    assert floor_seconds(Work(flops=989.5e12, bytes=0, more_flops=989.5e12), peaks) == pytest.approx(2.0)
    assert floor_seconds(Work(flops=2 * 989.5e12, bytes=0, flops_8_bit=989.5e12), peaks) == pytest.approx(1.5)
    assert floor_seconds(Work(flops=1e12, bytes=4.8e12 * 3), peaks) == pytest.approx(3.0)
    # 2 * 8192 * 7168 * 2048 operations at 1,979e12 a second.
    case = Case("gemm", "row", (8192, 7168, 2048))
    assert floor_seconds(OPERATIONS["gemm"].work(case), peaks) == pytest.approx(121.5e-6, rel=1e-3)


def test_operands_rotate_until_they_cannot_stay_in_the_l2() -> None:
    assert sets_of(1e3) == 16
    assert sets_of(100e6) == 3
    assert sets_of(10e9) == 1


@pytest.mark.parametrize(("size", "count", "wanted"), [(1, 4, [0]), (3, 8, [0, 1, 2]), (9, 3, [0, 4, 8])])
def test_spread_has_both_ends(size: int, count: int, wanted: list[int]) -> None:
    assert spread(size, count).tolist() == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_exact_answer_is_that_of_the_operation(case: Case) -> None:
    """And a wrong result is told from a right one."""
    operation = OPERATIONS[case.op]
    # Rounding to 8 bits itself; keys and values of bfloat16; bfloat16 results; none of these.
    bound = {"quantize": 4e-2, "mla_prefill": 4e-3, "mla_decode": 1e-5}.get(case.op, 3e-3)
    if case.form.startswith("int8") and case.op == "mla_decode":
        bound = 2e-2  # queries in 8 bits
    if case.form == "e4m3" and case.op in ("mla_prefill", "mla_sparse"):
        bound = 1e-1  # queries, keys and values in 8 bits
    for positive in (False, True):
        operands = operation.operands(case, jnp.int32(3), jnp.bool_(positive))
        result = operation.run(case, "reference", *operands)
        got, exact = operation.compare(case, jax.device_get(operation.sample(case, operands, result)))
        assert got.shape == exact.shape
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert error == 0 if case.op == "copy_pages" else 0 < error < bound
    others = operation.operands(case, jnp.int32(4), jnp.bool_(False))
    result = operation.run(case, "reference", *operation.operands(case, jnp.int32(5), jnp.bool_(False)))
    got, exact = operation.compare(case, jax.device_get(operation.sample(case, others, result)))
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) > 0.5


@pytest.mark.parametrize("op", OPERATIONS)
def test_mosaic_takes_the_default_cases(op: str) -> None:
    operation = OPERATIONS[op]
    seed = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    for case in {case.form: case for case in operation.table()}.values():
        if operation.left_out(case, "mosaic") is not None:
            continue
        operands = jax.eval_shape(partial(operation.operands, case), *seed)
        result = jax.eval_shape(partial(operation.run, case, "mosaic"), *operands)
        jax.eval_shape(partial(operation.sample, case), operands, result)


def test_groups_are_uneven_and_have_all_rows() -> None:
    operation = OPERATIONS["grouped_gemm"]
    for case in operation.table():
        sizes = operation.group_sizes(case)
        assert sizes.sum() == case.shape[1] and sizes.shape == case.shape[:1] and len(set(sizes)) > 1


def test_pages_of_decode_are_all_different() -> None:
    operation = OPERATIONS["mla_decode"]
    case = Case("mla_decode", "bf16, one long", (5, 1, 5000))
    table = operation._table(case)
    counts = -(-operation._lengths(case) // 64)
    used = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
    assert sorted(used) == list(range(counts.sum()))


def measured(case: Case, tmp_path: Path, **changes) -> dict:
    settings = {"implementation": "reference", "repeats": 2, "check": True, "peers": False, **changes}
    return measure_case(
        case.op, case.form, list(case.shape), **settings, lock=str(tmp_path / "lock"), held_seconds=60.0
    )


def test_a_case_is_measured(tmp_path: Path) -> None:
    record = measured(CASES[0], tmp_path)
    assert record["seconds"] > 0 and record["clock"] == "host" and record["kernels"] == []
    assert 0 < record["error"] < 3e-3 and abs(record["signed_error"]) < 1e-3
    assert record["tiles"]["m"] in (64, 128) and record["compile_seconds"] > 0
    json.dumps(record, allow_nan=False)
    assert "error" not in measured(CASES[0], tmp_path, check=False)


def test_a_result_that_is_not_finite_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(OPERATIONS["gemm"]), "run", lambda self, case, implementation, x, w, *_: (x @ w.T) * jnp.nan
    )
    with pytest.raises(FloatingPointError, match="finite"):
        measured(Case("gemm", "bf16", (8, 64, 128)), tmp_path)


def test_the_time_is_the_median_of_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, *(10 * i + offset for i in range(5) for offset in (0.0, [9, 1, 2, 3, 8][i]))])
    monkeypatch.setattr("jaxinfer.bench.timing.time.perf_counter", lambda: next(clock))
    calls = []
    timing = measure(calls.append, lambda _: None, 5)
    assert timing.seconds == 3 and timing.clock == "host"
    assert calls == [0, 0, 1, 2, 3, 4]


class FakeCupti:
    """Two kernels in every call, the second taking 2, 4, 6 ... milliseconds."""

    def __init__(self, lost: int = 0):
        self.started, self.lost = 0, lost

    def _cupti_init(self) -> None:
        self.started = 0

    def _cupti_get_timings(self, finalize: bool) -> list[tuple[str, float]]:
        calls = [(name, t) for i in range(self.started) for name, t in (("first", 1.0), ("second", 2.0 * (i + 1)))]
        return calls[: len(calls) - self.lost]


def with_cupti(monkeypatch: pytest.MonkeyPatch, cupti: FakeCupti, repeats: int):
    def run(_: int) -> None:
        cupti.started += 1

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", types.SimpleNamespace(_mosaic_gpu_ext=cupti))
    return measure(run, lambda _: None, repeats)


def test_kernels_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = with_cupti(monkeypatch, FakeCupti(), 5)
    assert timing.clock == "cupti"
    assert timing.kernels == [("first", 1e-3), ("second", 6e-3)]
    assert timing.seconds == pytest.approx(7e-3)


def test_where_kernels_are_missing_the_host_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = with_cupti(monkeypatch, FakeCupti(lost=1), 5)
    assert timing.clock == "host" and timing.kernels == []


def test_clocks_are_read_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 1 2 3; do echo 1980, 70$i.5; done\necho '[N/A], 9'\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    began = time.time()
    with Clocks() as clocks:
        while len(clocks._readings) < 3:
            time.sleep(0.01)
        assert clocks.between(began, time.time()) == {"sm_mhz": 1980, "watts": 702.5}
        assert clocks.between(began - 1, began) == {"sm_mhz": None, "watts": None}


def test_who_holds_the_device_too_long_is_ended(tmp_path: Path) -> None:
    code = "import sys, time; from jaxinfer.bench.timing import alone\nwith alone(sys.argv[1], 0.2): time.sleep(60)"
    lock = str(tmp_path / "lock")
    assert subprocess.run([sys.executable, "-c", code, lock], cwd=ROOT, timeout=50).returncode == -signal.SIGALRM
    with alone(lock, 0.1):
        pass
    time.sleep(0.2)


def test_a_fault_costs_one_request() -> None:
    requests = [{"what": "answer", "value": 1}, {"what": "exit"}, {"what": "answer", "value": 2}, {"what": "raise"}]
    requests += [{"what": "hang"}, {"what": "answer", "value": 3}]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answers = dict(workers.serve("tests.frontends.bench_worker", requests, 1, 8, environment))
    assert [answers[i]["value"] for i in (0, 2, 5)] == [1, 2, 3]
    assert answers[1]["failed"] == "the process ended with 7"
    assert answers[3]["failed"] == "ValueError: as asked" and "Traceback" in answers[3]["trace"]
    assert answers[4]["failed"] == "no answer after 8 s"
    assert len({answers[i]["pid"] for i in (0, 2, 5)}) == 3


def test_workers_end_with_the_one_that_asks() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    requests = [{"what": "answer"}, {"what": "hang"}]
    served = workers.serve("tests.frontends.bench_worker", requests, 1, 600, environment)
    _, answer = next(served)
    served.close()
    with pytest.raises(ProcessLookupError):
        os.kill(answer["pid"], 0)


def record_of(**changes) -> dict:
    case = Case("gemm", "row", (8192, 7168, 2048))
    names = {"case": case.name, "op": case.op, "form": case.form, "shape": list(case.shape)}
    common = {"implementation": "auto", "device": "NVIDIA H200", "jax": "0.11.2", "sources": "a", "settings": {}}
    work = {
        "flops": 2.0 * 8192 * 7168 * 2048,
        "bytes": 150e6,
        "flops_8_bit": 2.0 * 8192 * 7168 * 2048,
        "more_flops": 0.0,
    }
    figures = {"seconds": 200e-6, "kernels": [["other", 10e-6], ["gemm", 190e-6]], "clock": "cupti", "error": 1.7e-3}
    return names | common | work | figures | {"signed_error": 1e-5, "sm_mhz": 1755.0, "watts": 690.0} | changes


def test_a_row_of_the_table() -> None:
    peer = {"name": "torch._scaled_mm", "flops": 2.0 * 8192 * 7168 * 2048, "seconds": 160e-6, "clock": "cupti"}
    record = record_of(peer=peer)
    assert largest_kernel(record) == 190e-6
    assert share_of_floor(record) == pytest.approx(121.5 / 200, rel=1e-3)
    *_, row = markdown([record], [Published(name="DeepGEMM", tflops=1329)], [False]).splitlines()
    assert row == (
        "| gemm | row | 8192x7168x2048 | 200.0 | 190.0 | 1203 | 0.75 | 61% | 1.7e-03 | +1e-05 "
        "| 1503 (torch._scaled_mm) | 0.80 | 1329 (DeepGEMM) | 0.90 | 1755 | 690 |"
    )
    *_, row = markdown([record], [Published(name="DeepGEMM", terabytes=1.5)], [True]).splitlines()
    assert "| 1266 | 0.75 |" in row and "| 1.5 TB/s (DeepGEMM) | 0.50 |" in row
    *_, row = markdown([record_of(peer=peer | {"flops": 0.0}, flops=0.0)], [None], [False]).splitlines()
    assert "| 0.94 TB/s (torch._scaled_mm) | 0.80 |" in row


def test_figures_of_one_kind_of_gpu_are_not_held_against_another() -> None:
    *_, row = markdown(
        [record_of(device="NVIDIA H20")], [Published(name="DeepGEMM", tflops=1329)], [False]
    ).splitlines()
    assert "DeepGEMM" not in row
    assert share_of_floor(record_of(device="another")) is None


def test_failures_are_rows_and_notes() -> None:
    failed = {**record_of(), "failed": "the process ended with -6"}
    peerless = record_of(peer={"failed": "RuntimeError: no"})
    text = markdown([failed, peerless], [None, None], [False, False])
    assert "| gemm | row | 8192x7168x2048 | failed |" in text
    assert "- `gemm row 8192x7168x2048`: the process ended with -6" in text
    assert "- `gemm row 8192x7168x2048`, torch: RuntimeError: no" in text


def test_records_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    records = Records(path)
    records.add(record_of(seconds=1.0))
    records.add(record_of(seconds=2.0))
    records.add(record_of(sources="b"))
    with path.open("a") as file:
        file.write('{"case": "torn')
    found = Records(path)
    assert len(found.all) == 3
    assert found.find(record_of())["seconds"] == 2.0
    assert found.find(record_of(settings={"repeats": 3})) is None
    path.write_text('{"another": "file"}\n')
    with pytest.raises(ValueError, match="line 1: expected a record of a kernel"):
        Records(path)


def options(tmp_path: Path, **changes) -> Options:
    given = {"ops": ["mla_prefill"], "shapes": ["mla_prefill:8x16x2"], "out": str(tmp_path), "peers": True}
    fixed = {"check": True, "repeats": 2, "implementation": "reference", "workers": None, "case_seconds": 60.0}
    return Options(**given | fixed | changes)


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fingerprint", lambda: "as it is")
    measurement = Measurement(options(tmp_path))
    assert measurement.failed()  # as long as nothing was measured
    measurement.run()
    assert not measurement.failed()
    first, _ = (tmp_path / "kernels.jsonl").read_text().splitlines()  # one in bfloat16, one in e4m3
    assert not {"failed", "trace", "began", "samples"} & set(json.loads(first))
    text = measurement.report()
    assert "| mla_prefill | bf16 | 8x16x2 |" in text and (tmp_path / "kernels.md").read_text() == text + "\n"

    asked = []
    monkeypatch.setattr(
        workers, "serve", lambda module, requests, *_: asked.extend(requests) or iter_of({"failed": "no"})
    )
    again = Measurement(options(tmp_path, shapes=["mla_prefill:8x16x2", "mla_prefill:4x16x2"]))
    again.run()
    assert [request["shape"] for request in asked] == [[4, 16, 2]] * 2
    assert again.failed() and "| mla_prefill | bf16 | 4x16x2 | failed |" in again.report()
    monkeypatch.setattr(kernels, "fingerprint", lambda: "changed")
    Measurement(options(tmp_path)).run()
    assert [request["shape"] for request in asked] == [[4, 16, 2]] * 2 + [[8, 16, 2]] * 2


@pytest.mark.parametrize("installed", [False, True])
def test_a_kernel_beside_that_of_users_is_measured_where_it_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability="9.0", device_kind="a GPU")])
    given = {"ops": ["quantize"], "shapes": ["quantize:8x512"]}
    measurement = Measurement(options(tmp_path, **given, implementation="auto"))
    forms = [case.form for case in measurement.cases]
    assert "plain row" in forms and ("plain row triton" in forms) == installed
    said = (
        "Left out (jax_triton and triton, not installed (pip install 'jaxinfer[triton]')): quantize plain row triton 8x"
    )
    assert (said in measurement.report()) != installed
    measurement = Measurement(options(tmp_path, **given, implementation="mosaic"))
    assert len(measurement.cases) == 9 and "Left out (only mosaic was asked for): " in measurement.report()


def test_a_form_that_names_a_kernel_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(quantization, "quantize", lambda x, **options: asked.append(options["implementation"]))
    for form in ("plain row", "plain row triton"):
        OPERATIONS["quantize"].run(Case("quantize", form, (8, 512)), None, jnp.zeros((8, 512)))
    assert asked == [None, "triton"]


def iter_of(*answers: dict) -> Iterator[tuple[int, dict]]:
    yield from enumerate(answers)


def test_the_fingerprint_is_of_the_kernels_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels" / "mosaic").mkdir(parents=True)
    file = tmp_path / "kernels" / "mosaic" / "a.py"
    file.write_text("a = 1")
    monkeypatch.setattr(kernels, "_ROOT", tmp_path)
    before = kernels.fingerprint()
    (tmp_path / "kernels" / "note.txt").write_text("not code")
    assert kernels.fingerprint() == before
    file.write_text("a = 2")
    assert kernels.fingerprint() != before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: python -m jaxinfer.bench COMMAND"),
        (["kernel"], "expected a command of kernels, got 'kernel'"),
        (["kernels", "--ops=gem"], "expected some of gemm"),
        (["kernels", "stray"], "expected flags only, got ['stray']"),
        (["kernels", "--repeats=0"], "repeats"),
    ],
)
def test_wrong_commands_are_refused_with_the_reason(arguments: list[str], words: str) -> None:
    code, text = run("bench", *arguments)
    assert code == 1
    assert words in text


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a machine without a GPU needs")
def test_without_a_gpu_the_command_says_what_it_needs(tmp_path: Path) -> None:
    code, text = run("bench", "kernels", f"--out={tmp_path / 'none'}")
    assert code == 1
    assert "expected a Hopper GPU and JAX with CUDA" in text and "--implementation reference" in text
    assert not (tmp_path / "none").exists()


def test_help_shows_the_flags() -> None:
    _, text = run("bench", "kernels", "--help")
    assert "  --shapes: shapes in place of the default ones: gemm:MxNxK," in text and "  --out: folder" in text
    code, text = run("bench", "--help")
    assert code == 0 and "kernels: times and errors" in text
