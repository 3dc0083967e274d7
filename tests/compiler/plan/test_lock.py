"""The lock: measured kernels are built, and entries that do not fit are errors or reported as unused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tune_samples import MACHINE

from specc.cli.app import run
from specc.compiler.build import compile_spec
from specc.compiler.errors import SpeccError, SpecError
from specc.compiler.kernels.gemm.evt import GEMM_EVT, GemmTile
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.tile import Tile
from specc.compiler.plan.lock import (
    NO_LOCK,
    Entry,
    GroupEntry,
    Lock,
    group_digest,
    group_key,
    lock_path,
    locked_kernel,
    read_lock,
    tile_data,
)
from specc.compiler.plan.plan import Choice
from specc.compiler.report.lock_use import LockUse

ROOT = Path(__file__).parents[3]
GPU = MACHINE.model_dump_json()
MEASURED = GemmTile(64, 256, 64, (2, 1), "Pingpong", (64, 64), 2, 2)
GIVEN = tile_data(replace(GEMM_EVT, tile=MEASURED)) or {}
TRITON = tile_data(replace(LINEAR_TRITON, tile=Tile(128, 128, 64, 8, 3))) or {}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec in a folder of its own, without a lock."""
    return Path(shutil.copy(ROOT / "specs/gpt_mini.yaml", tmp_path))


def choice_of(spec: Path, word: str) -> Choice:
    plan = compile_spec(spec, (), ("sm90",)).plans["sm90"]
    return next(c for c in plan.choices if c.rendered.function and word in c.rendered.module)


def entry_of(choice: Choice, **changed: object) -> Entry:
    known = {
        "node": choice.site.label,
        "key": choice.site.key,
        "kernel": "gemm_evt",
        "tile": tile_data(replace(GEMM_EVT, tile=MEASURED)),
        "rows": 8192,
        "ms": 0.25,
        "floor_ms": 0.2,
    }
    return Entry.model_validate({**known, **changed})


def write(spec: Path, choice: Choice, **changed: object) -> Lock:
    lock = NO_LOCK.with_measured("sm90", MACHINE, {choice.rendered.module: entry_of(choice, **changed)})
    lock_path(spec, "gpt_mini").write_text(lock.text())
    return lock


def test_a_lock_reads_back_as_it_was_written(spec: Path) -> None:
    path = lock_path(spec, "gpt_mini")
    assert read_lock(path) is NO_LOCK
    lock = write(spec, choice_of(spec, "linear_leaky"))
    assert read_lock(path) == lock and read_lock(path).text() == path.read_text()


def test_what_compiled_its_kernels_is_part_of_the_machine(spec: Path) -> None:
    forward = choice_of(spec, "linear_leaky")
    noted = MACHINE.model_copy(update={"nvcc": "13.0.88", "cutlass": "4.2.1"})
    lock = NO_LOCK.with_measured("sm90", noted, {forward.rendered.module: entry_of(forward)})
    path = lock_path(spec, "gpt_mini")
    before = write(spec, forward)  # as locks were before it was noted
    assert read_lock(path) == before and "nvcc" not in before.text() and "null" not in before.text()
    path.write_text(lock.text())
    assert read_lock(path) == lock and lock.targets["sm90"].machine == noted
    assert '"cutlass": "4.2.1",' in lock.text() and '"nvcc": "13.0.88",' in lock.text()
    page = compile_spec(spec).files["PLAN.md"]
    words = "torch 2.11.0, triton 3.6.0, CUDA 13.0, driver 580, nvcc 13.0.88, CUTLASS 4.2.1"
    assert page.count(f"Measured on NVIDIA H200: {words}.") == page.count("Measured on") == 1


def test_a_measured_tile_is_built_and_told(spec: Path) -> None:
    before = compile_spec(spec)
    choice = choice_of(spec, "linear_leaky")
    write(spec, choice)
    after = compile_spec(spec)
    source = after.files[f"sm90/{choice.rendered.module}.cu"]
    assert "cute::Shape<cute::Int<64>, cute::Int<256>, cute::Int<64>>" in source
    assert "SWIZZLE, RASTER = 2, 2" in after.files[f"sm90/{choice.rendered.module}.py"]
    assert f", {MEASURED} | 0.25 x " in after.files["PLAN.md"] and "; by rule |" in after.files["PLAN.md"]
    assert "Measured on NVIDIA H200: torch 2.11.0, triton 3.6.0, CUDA 13.0, driver 580.\n" in after.files["PLAN.md"]
    assert "Measured on" not in before.files["PLAN.md"]
    changed = {name for name in after.files if after.files[name] != before.files[name]}
    assert changed == {f"sm90/{choice.rendered.module}.{end}" for end in ("cu", "py")} | {"PLAN.md", "manifest.json"}
    digests = [json.loads(built.files["manifest.json"])["lock"] for built in (before, after)]
    assert digests[0] is None and len(digests[1]) == 64


def test_a_lock_may_choose_another_kernel(spec: Path) -> None:
    choice = choice_of(spec, "dgrad_mul")
    assert choice.kernel is GEMM_EVT
    tile = Tile(128, 128, 64, 4, 3, 2)
    write(spec, choice, kernel="linear_triton", tile=tile_data(replace(LINEAR_TRITON, tile=tile)))
    chosen = choice_of(spec, "dgrad_mul")
    assert chosen.kernel == replace(LINEAR_TRITON, tile=tile)
    assert ("gemm_evt", "was measured slower, or not measured") in chosen.rejected
    assert f"{choice.rendered.module}.cu" not in " ".join(compile_spec(spec).files)


def test_what_was_measured_for_another_node_is_not_taken(spec: Path) -> None:
    write(spec, choice_of(spec, "linear_leaky"), key="linear(bf16[B,T,8], bf16[8,8]) : bf16[B,T,8]")
    assert choice_of(spec, "linear_leaky").measured is None
    other = compile_spec(spec, ("model.blocks.layers.1.ratio=4",), ("sm90",)).plans["sm90"]
    assert all(choice.measured is None for choice in other.choices)


# the nodes of specs/gpt_mlp35.yaml on sm90, as locks named them before they had keys
DIGESTS = {
    "dgrad_mul__n1792_k512": "49a07ef8b5ed",
    "linear_leaky_relu2__n1792_k512": "8b0e62fe9d68",
    "norm_rotary__h4_c64_r8": "3d840eb46039",
    "norm_rotary_gain__h8_c64_r8": "3a1bcf8fd52d",
    "norm_rotary_gain_grad__h8_c64_r8": "ed6941d166a0",
    "norm_rotary_grad__h4_c64_r8": "6ddfddf73a48",
    "softmax_loss_tanh__v1024": "c0f62fa25ceb",
    "softmax_nats_tanh__v1024": "45e4cb572b8d",
}


def test_a_lock_with_digests_of_earlier_versions_is_read(tmp_path: Path) -> None:
    spec = Path(shutil.copy(ROOT / "specs/gpt_mlp35.yaml", tmp_path))
    data = json.loads((ROOT / "specs/gpt_mlp35.lock.json").read_text())
    entries = {name: entry for name, entry in data["targets"]["sm90"]["kernels"].items() if name in DIGESTS}
    assert len(entries) > 4
    data["targets"]["sm90"]["kernels"] = entries
    del data["targets"]["sm90"]["step"]  # whose kernels have other tiles
    lock_path(spec, "gpt_mlp35").write_text(json.dumps(data))
    now = compile_spec(spec)
    for name, entry in entries.items():
        entry["site"] = DIGESTS[name]
        del entry["key"]
    lock_path(spec, "gpt_mlp35").write_text(json.dumps(data))
    before = compile_spec(spec)
    assert before.lock_use == now.lock_use and not now.lock_use.idle
    assert {n: t for n, t in before.files.items() if n != "manifest.json"}.items() <= now.files.items()


def test_the_digest_of_a_group_of_earlier_versions_is_read(spec: Path) -> None:
    choices = compile_spec(spec, (), ("sm90",)).plans["sm90"].save_choices[0]
    ms = {way.group.keep: 0.5 for way in choices.options}
    for words in ({"group": group_digest(choices.sites)}, {"key": group_key(choices.sites)}):
        group = GroupEntry(keep=choices.options[-1].group.keep, ms=ms, **words)
        lock = NO_LOCK.with_measured("sm90", MACHINE, groups={choices.name: group})
        lock_path(spec, "gpt_mini").write_text(lock.text())
        assert compile_spec(spec, (), ("sm90",)).plans["sm90"].save_choices[0].measured == group


def test_a_key_states_the_node_and_no_class() -> None:
    lock = read_lock(ROOT / "specs/gpt_mlp35.lock.json").targets["sm90"].kernels
    dgrad = "dgrad(bf16[B,T,512], bf16[512,1792], bf16[B,T,1792]) |> (d, slope) -> d * slope : bf16[B,T,1792]"
    assert lock["dgrad_mul__n1792_k512"].key == dgrad
    assert len({entry.key for entry in lock.values()}) == len(lock)
    assert not re.search("Linear|Dgrad|Pointwise|Softmax|Norm", "".join(entry.key or "" for entry in lock.values()))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kernel": "gone"}, "blocks.*.mlp.up + act: gone is not a kernel of this compiler"),
        ({"kernel": "torch", "tile": {"m": 1}}, "the entry has a tile; torch takes none"),
        ({"kernel": "torch", "tile": None}, "chose torch for blocks.*.mlp.up + act, but this kernel has an epilogue"),
        ({"tile": None}, "blocks.*.mlp.up + act: the entry has no tile; gemm_evt needs one"),
        (
            {"tile": {**GIVEN, "m": 256, "n": 256, "k": 256, "schedule": "Cooperative"}},
            "bytes of shared memory for two stages of 256x256x256, cooperative",
        ),
        ({"tile": {"m": 64, "warmth": 3}}, "warmth is not a valid key of a tile of gemm_evt"),
        ({"tile": {"m": 64}}, "the tile is not valid for gemm_evt"),
        ({"tile": {**GIVEN, "schedule": "Solo"}}, "schedule"),
        ({"tile": {**GIVEN, "raster": 7}}, "raster is 7, but must be from 0 to 2"),
        ({"tile": {**GIVEN, "m": -3}}, "m is -3, but must"),
        (
            {"tile": {**GIVEN, "m": 192}},
            "is not valid for gemm_evt: m is 192, but must be a power of two from 64 to 256",
        ),
        ({"tile": {**GIVEN, "n": 100}}, "n is 100, but must be a multiple of 16"),
        ({"tile": {**GIVEN, "k": 100_000_000}}, "k is 100000000"),
        ({"tile": {**GIVEN, "schedule": "Cooperative"}}, "m is 64, but must be a power of two from 128 to 256"),
        ({"tile": {**GIVEN, "cluster": [4, 4]}}, "cluster is 16"),
        ({"tile": {**GIVEN, "part": [48, 64]}}, "part is 48, but must divide 64"),
        ({"tile": {**GIVEN, "swizzle": 3}}, "swizzle is 3"),
        (
            {"kernel": "linear_triton", "tile": {**TRITON, "m": 7}},
            "is not valid for linear_triton: m is 7, but must be a power",
        ),
        ({"kernel": "linear_triton", "tile": {**TRITON, "n": 100_000_000}}, "n is 100000000"),
        ({"kernel": "linear_triton", "tile": {**TRITON, "warps": 5}}, "warps is 5"),
        ({"kernel": "linear_triton", "tile": {**TRITON, "stages": 0}}, "stages is 0, but must be from 1 to 16"),
        (
            {"kernel": "linear_triton", "tile": {**TRITON, "m": 256, "stages": 9}},
            "needs 442,368 bytes of shared memory for the loads of 256x128x64, 8 warps, 9 stages; sm90 has 232,448",
        ),
    ],
)
def test_a_lock_that_cannot_be_followed_is_an_error(spec: Path, changed: dict[str, object], words: str) -> None:
    write(spec, choice_of(spec, "linear_leaky"), **changed)
    with pytest.raises(SpeccError) as error:
        compile_spec(spec)
    assert words in error.value.message and "specc tune" in error.value.hint
    assert error.value.message.startswith(f"{spec.stem}.lock.json, sm90: ")


@pytest.mark.parametrize(
    ("module", "kernel", "tile", "words"),
    [
        ("norm_rotary__", "norm_rope_triton", {"rows": 7, "sequences": 1, "warps": 4}, "rows is 7"),
        ("norm_rotary__", "norm_rope_triton", {"rows": 8, "sequences": 0, "warps": 4}, "sequences is 0"),
        ("norm_rotary__", "norm_rope_triton", {"rows": 8, "sequences": 1, "warps": 64}, "warps is 64"),
        ("norm_rotary__", "norm_rope_triton", {"rows": 65536, "sequences": 1, "warps": 4}, "at most 131,072 elements"),
        ("softmax_loss", "softmax_loss_triton", {"rows": 3, "columns": 512, "warps": 4}, "rows is 3"),
        ("softmax_loss", "softmax_loss_triton", {"rows": 4, "columns": 100, "warps": 4}, "columns is 100"),
        ("softmax_loss", "softmax_loss_triton", {"rows": 1, "columns": 512, "warps": 5}, "warps is 5"),
        ("softmax_loss", "softmax_loss_triton", {"rows": 4096, "columns": 512, "warps": 4}, "x columns is 2097152"),
        (
            "softmax_loss",
            "softmax_loss_triton",
            {"rows": 2, "columns": 128, "warps": 4},
            "4 warps does not hold 320 columns",
        ),
    ],
)
def test_a_tile_that_no_search_could_have_found_is_an_error(
    spec: Path, module: str, kernel: str, tile: dict[str, int], words: str
) -> None:
    write(spec, choice_of(spec, module), kernel=kernel, tile=tile)
    with pytest.raises(SpeccError) as error:
        compile_spec(spec)
    assert words in error.value.message and "specc tune" in error.value.hint


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt_mlp35", "gpt_mini", "gpt_mlp35_base"])
def test_every_tile_that_a_search_tries_may_stand_in_a_lock(name: str) -> None:
    for plan in compile_spec(ROOT / f"specs/{name}.yaml", (), ("sm90",)).plans.values():
        for choice in plan.choices:
            for variant in choice.kernel.variants(choice.site):
                entry = entry_of(choice, kernel=variant.name, tile=tile_data(variant))
                assert locked_kernel(entry) == variant and variant.rejects(choice.site) is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"lock_version": 2}', 1, "lock_version"),
        ('{\n "targets": {\n  "sm90": {"kernels": {}}\n }\n}', 3, "machine"),
        ('{\n "lock_version": 1,\n "tarets": {}\n}', 3, "tarets"),
        ('{\n "lock_version": 1,\n', 2, ""),
        (f'{{"targets": {{"sm90": {{\n "machine": {GPU},\n "kernel": {{}}, "kernels": {{}}\n}}}}}}', 3, "kernel"),
        ('{\n "targets": {},\n "targets": {}\n}', 3, "used twice"),  # of two branches
        ("[" * 9_000, 1, "nested"),
        ("", 1, "empty"),
        ("hello", 1, "a mapping"),
    ],
)
def test_a_damaged_lock_is_told_with_its_line(spec: Path, text: str, line: int, words: str) -> None:
    path = lock_path(spec, "gpt_mini")
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        compile_spec(spec)
    first = error.value.diagnostics[0]
    assert first.file.endswith("gpt_mini.lock.json") and first.mark.line == line and words in first.message
    assert {problem.hint for problem in error.value.diagnostics} == {
        "specc tune writes this file: restore it, or delete it and measure again"
    }


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_what_is_no_file_is_no_lock(spec: Path, kind: str) -> None:
    path = lock_path(spec, "gpt_mini")
    path.mkdir() if kind == "directory" else path.symlink_to("nowhere")
    with pytest.raises(SpecError) as error:
        compile_spec(spec)
    assert "specc tune writes this file" in error.value.hint


def test_entries_that_apply_to_no_node_are_told(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward, backward = choice_of(spec, "linear_leaky"), choice_of(spec, "dgrad_mul")
    lock = NO_LOCK.with_measured("sm90", MACHINE, {forward.rendered.module: entry_of(forward)})
    path = lock_path(spec, "gpt_mini")
    path.write_text(lock.text())
    assert compile_spec(spec).lock_use == LockUse(1, ())
    assert run(["plan", str(spec)]) == 0 and capsys.readouterr().err == ""
    foreign = entry_of(backward, key="linear(bf16[B,T,8], bf16[8,8]) : bf16[B,T,8]")
    for target, name, entry in (
        ("sm90", backward.rendered.module, foreign),
        ("sm42", forward.rendered.module, entry_of(forward)),
        ("sm80", forward.rendered.module, entry_of(forward)),
    ):
        lock = lock.with_measured(target, MACHINE, {name: entry})
    group = GroupEntry(group="0" * 12, keep="input", ms={"input": 1.0})
    path.write_text(lock.with_measured("sm90", MACHINE, groups={"mlp": group}).text())
    idle = (f"sm42 {forward.rendered.module}", f"sm80 {forward.rendered.module}", f"sm90 {backward.rendered.module}")
    idle = (*idle, "sm90 group mlp")
    assert compile_spec(spec).lock_use == LockUse(5, idle)
    assert compile_spec(spec, (), ("cpu",)).lock_use.entries == 2  # of targets that the spec does not have
    note = f"note: 4 of 5 lock entries apply to no node: {', '.join(idle)}; to measure again: specc tune {spec}\n"
    assert run(["plan", str(spec)]) == 0 and capsys.readouterr().err == note
    assert run(["build", str(spec), "--into", str(spec.parent / "made")]) == 0 and capsys.readouterr().err == note
    assert run(["plan", str(spec), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle_lock_entries"] == list(idle)
    changed = compile_spec(spec, ("model.blocks.layers.1.act=gelu(x)",), ("sm90",))
    assert f"sm90 {forward.rendered.module}" in changed.lock_use.idle


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt_mlp35_base"])
def test_every_entry_of_a_committed_lock_applies(name: str) -> None:
    result = compile_spec(ROOT / f"specs/{name}.yaml").lock_use
    assert result.entries > 5 and not result.idle


@pytest.mark.parametrize("field", ["gpu", "nvcc", "cutlass"])
def test_another_machine_begins_a_new_lock(field: str) -> None:
    entry = Entry(node="n", key="linear()", kernel="gemm_evt", rows=1, ms=1.0, floor_ms=0.5)
    lock = NO_LOCK.with_measured("sm90", MACHINE, {"first": entry})
    assert set(lock.with_measured("sm90", MACHINE, {"second": entry}).targets["sm90"].kernels) == {"first", "second"}
    other = MACHINE.model_copy(update={field: "another"})
    assert set(lock.with_measured("sm90", other, {"second": entry}).targets["sm90"].kernels) == {"second"}
