"""The gate's reader on what compilers really said, and its judge on what must not pass."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_gate import mosaic, reading, report
from scripts.gpu_gate.__main__ import run_group
from scripts.gpu_gate.cases import TENSOR_CORES, Case
from scripts.gpu_gate.compiling import Compiled, Kernel
from scripts.gpu_gate.judging import violations
from scripts.gpu_gate.target import TARGETS, environment, missing, target_config

ROOT = Path(__file__).parent.parent.parent
LAYER_BYTES = 64 * 16 * 8 * 128 * 2


def sample(name):
    return (Path(__file__).parent / "samples" / name).read_text()


def make_case(**changes):
    kernels = {"paged_decode": (("wgmma",),)}
    return Case("paged_attention", "some", "a shape", build=lambda mesh: None, **{"kernels": kernels, **changes})


def make_kernel(**changes):
    fields = {"name": "paged_decode", "registers": 138, "num_threads": 128, "spill_bytes": 0, "stack_bytes": 0}
    return Kernel(**{**fields, "shared_bytes": 49152, "instructions": {"wgmma": 2}, **changes})


def make_compiled(kernel=None, hlo="in_place.hlo.txt", **changes):
    compiled = Compiled(
        kernels=(kernel or make_kernel(),),
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=4 * LAYER_BYTES,
        temp_bytes=0,
        thunks={},
        new_arrays=tuple(reading.new_arrays(sample(hlo))),
        cache_bytes=4 * LAYER_BYTES,
        leaf_bytes=(4 * LAYER_BYTES,),
        layer_bytes=LAYER_BYTES,
        lower_s=0.0,
        compile_s=0.0,
    )
    return compiled._replace(**changes)


def test_spills_are_read_from_what_ptxas_says():
    (usage,) = reading.ptxas_usage(sample("ptxas_spills.txt"))
    assert usage == ("paged_decode", 255, 5132 + 4376, 2648, 0)


def test_a_kernel_without_spills_reads_so():
    (usage,) = reading.ptxas_usage(sample("ptxas_clean.txt"))
    assert usage == ("body_mosaic_gpu_kernel", 232, 0, 0, 1)


def test_ptx_tells_threads_and_instructions():
    bodies = reading.kernel_bodies(sample("kernel.ptx"))
    assert list(bodies) == ["paged_decode"]
    assert reading.num_threads(bodies["paged_decode"]) == 128
    assert reading.instructions(bodies["paged_decode"]) == {"wgmma": 2, "cp.async": 1}


def test_thunks_in_loops_count_and_launches_tell_their_shared_memory():
    assert reading.thunk_kinds(sample("thunks.txt")) == {"Copy": 2, "CustomKernel": 3, "While": 1}
    assert reading.dynamic_shared_bytes(sample("thunks.txt"))["paged_decode"] == 49152


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_decode_3", "paged_decode_mosaic_gpu_kernel"])
def test_a_kernel_is_known_by_its_name_in_the_source(kernel):
    assert reading.is_called(kernel, "paged_decode")
    assert not reading.is_called(kernel, "paged")


def test_an_update_in_place_writes_no_new_array():
    assert max(array.num_bytes for array in reading.new_arrays(sample("in_place.hlo.txt"))) < 100


def test_a_copy_of_the_cache_is_found_first():
    assert reading.new_arrays(sample("copied.hlo.txt"))[0] == ("copy.2", 4 * LAYER_BYTES)


def test_a_fusion_that_turns_the_cache_around_is_found_like_a_copy():
    turned = sample("in_place.hlo.txt").replace("scatter(%param_0, ", "transpose(%param_0, ")
    assert reading.new_arrays(turned)[0] == ("input_scatter_fusion", 4 * LAYER_BYTES)


def test_a_good_kernel_passes():
    assert violations(make_case(cache=0, num_layers=4), make_compiled()) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spill_bytes": 4}, "spills 4 bytes"),
        ({"stack_bytes": 8}, "8 bytes on the stack"),
        ({"shared_bytes": 232_449}, "a block has 232,448"),
        ({"instructions": {"mma": 64}}, "has no wgmma"),
        ({"name": "another"}, "there is no kernel paged_decode"),
    ],
)
def test_a_bad_kernel_is_named_with_its_fault(changes, complaint):
    (found,) = violations(make_case(), make_compiled(make_kernel(**changes)))
    assert complaint in found


def test_either_tensor_core_instruction_will_do_where_the_case_says_so():
    case = make_case(kernels={"paged_decode": (TENSOR_CORES,)})
    assert violations(case, make_compiled(make_kernel(instructions={"mma": 1}))) == []
    assert "wgmma or mma" in violations(case, make_compiled(make_kernel(instructions={})))[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hlo": "copied.hlo.txt"}, "copy.2 writes"),
        ({"alias_bytes": LAYER_BYTES}, "are aliased"),
        ({"temp_bytes": 4 * LAYER_BYTES}, "temporaries"),
        ({"new_arrays": (reading.NewArray("copy.1", 512),), "leaf_bytes": (512, LAYER_BYTES)}, "just what a leaf"),
    ],
)
def test_a_program_that_copies_its_cache_fails(changes, complaint):
    (found,) = violations(make_case(cache=0, num_layers=4), make_compiled(**changes))
    assert complaint in found


def test_a_program_without_a_thunk_that_it_needs_fails():
    (found,) = violations(make_case(thunks=("AllReduce",)), make_compiled(thunks={"Copy": 1}))
    assert found == "there is no thunk AllReduce"


@pytest.mark.parametrize("name", TARGETS)
def test_targets_and_environment_go_together(name, tmp_path):
    config, variables = target_config(TARGETS[name]), environment(tmp_path / "cuda", tmp_path / "dump")
    assert f"shared_memory_per_block_optin: {TARGETS[name].shared_bytes_per_block}" in config
    assert config.count("{") == config.count("}")
    assert f"--xla_dump_to={tmp_path / 'dump'}" in variables["XLA_FLAGS"]


def test_the_page_keeps_what_stands_around_the_generated_section(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    identity = {"op": "o", "backend": "b", "target": "h200", "shape": "s"}
    report.write_page(page, [identity | {"status": "refused", "reasons": ["it is | too wide"]}])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| h200 | o | b | s | refused | it is / too wide |" in text


def test_a_page_without_the_marks_is_refused(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="no section"):
        report.write_page(page, [])


def test_shapes_that_share_a_reason_share_a_row():
    identity = {"op": "o", "backend": "b", "target": "h200", "status": "refused", "reasons": ["too wide"]}
    text = report.tables([identity | {"shape": shape} for shape in ("s1", "s2")])
    assert "| h200 | o | b | s1; s2 | refused | too wide |" in text


def play(runs, has_time=lambda: True):
    """Results where each process writes the next lines of `runs`; and what the processes were told to skip."""
    skipped = []

    def run(num_tried):
        skipped.append(num_tried)
        return runs[len(skipped) - 1], "killed"

    return list(run_group(run, {"op": "group", "target": "h200"}, has_time)), skipped


A, B, C, DONE = {"shape": "a"}, {"shape": "b"}, {"shape": "c"}, {"done": True}
OK = {"status": "ok", "reasons": []}


def test_a_case_that_kills_its_process_is_blamed_and_the_rest_is_tried():
    results, skipped = play([[A, A | OK, B], [C, C | OK, DONE]])
    assert [(result["shape"], result["status"]) for result in results] == [("a", "ok"), ("b", "crashed"), ("c", "ok")]
    assert skipped == [0, 2]


def test_a_process_that_dies_before_its_first_case_is_not_started_again():
    results, skipped = play([[]])
    assert results == [
        {"op": "group", "target": "h200", "backend": "-", "shape": "-", "status": "crashed", "reasons": ["killed"]}
    ]
    assert skipped == [0]


def test_when_the_time_is_up_the_case_is_unfinished_not_wrong():
    results, skipped = play([[A]], has_time=lambda: False)
    assert [result["status"] for result in results] == ["unfinished"]
    assert skipped == [0]


@pytest.mark.skipif(missing() is None, reason="the wheels are here")
def test_without_the_wheels_it_says_so_in_a_line_and_its_exit_code():
    done = subprocess.run([sys.executable, "-m", "scripts.gpu_gate"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout == f"gpu gate: it cannot run: {missing()}\n"


def test_jax_tritons_shared_memory_is_read_from_its_note():
    assert reading.jax_triton_shared_bytes("quant_matmul: shared_mem_bytes: 16512\n") == 16512


def printed(*names):
    """What Mosaic prints as it compiles kernels of these names, one after the other."""
    clean = sample("ptxas_clean.txt")
    told = [(name, clean.replace("body_mosaic_gpu_kernel", name)) for name in names]
    return "".join(
        f"//\n// Generated by LLVM NVPTX Back-End\n//\n.visible .entry {name}()\n{words}" for name, words in told
    )


def test_what_mosaic_prints_is_given_to_its_kernel_by_name_in_whatever_order():
    found = mosaic.paired({b"1": "decode_kernel", b"2": "prefill_kernel"}, printed("prefill_kernel", "decode_kernel"))
    assert {key: usage.kernel for key, (usage, _) in found.items()} == {b"1": "decode_kernel", b"2": "prefill_kernel"}
    assert all(f".entry {usage.kernel}" in ptx for usage, ptx in found.values())


@pytest.mark.parametrize(("new", "said"), [("a", "b"), ("ab", "a"), ("a", "ab"), ("aa", "aa")])
def test_kernels_that_cannot_be_told_apart_by_name_are_refused(new, said):
    with pytest.raises(RuntimeError, match="Mosaic printed"):
        mosaic.paired(dict(enumerate(new)), printed(*said))


def test_kernels_that_are_alike_are_told_once_with_their_number():
    kernel = make_kernel()._asdict() | {"count": 32}
    told = {"op": "step", "backend": "b", "target": "h200", "shape": "s", "status": "ok", "reasons": []}
    assert "paged_attention" not in report.line(told)
    assert "paged_decode (32 alike) 138 registers" in report.line(told | {"kernels": [kernel]})


def test_a_later_run_replaces_the_cases_that_it_has_and_keeps_the_others():
    a, b = ({"op": "o", "backend": "b", "target": "h200", "shape": shape} for shape in "ab")
    first = {"runs": ["one"], "results": [a | {"status": "violation"}, b | {"status": "ok"}]}
    second = [a | {"status": "ok"}, b | {"status": "unfinished"}]
    record = report.joined([first, {"runs": ["two"], "results": second}])
    assert record == {"runs": ["one", "two"], "results": [a | {"status": "ok"}, b | {"status": "ok"}]}


def test_a_record_says_how_it_was_made_and_not_where_it_lies(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--json", "/somewhere/r.json", "--only", "8b", "--page", "p.md"])
    (run,) = report.new_record([], ROOT)["runs"]
    assert run["command"] == "python -m scripts.gpu_gate --quick --only 8b"
    assert {"python", "jax"} <= run["versions"].keys()


def test_joining_needs_no_wheels_and_fails_on_what_is_wrong(tmp_path):
    case = {"op": "o", "backend": "b", "target": "h200", "shape": "s", "reasons": ["it spills"], "status": "violation"}
    (tmp_path / "a.json").write_text(json.dumps({"runs": [], "results": [case]}))
    command = [sys.executable, "-m", "scripts.gpu_gate", "--join", str(tmp_path / "a.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 violation" in done.stdout
