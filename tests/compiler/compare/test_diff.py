"""`specc diff`: first what matters, old -> new, then the specs, model.py and the kernels paired by node."""

import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from specc.cli.app import run
from specc.compiler.compare.diff import Comparison
from specc.compiler.errors import SpecError

SPEC = Path(__file__).parents[3] / "specs/gpt_mlp35.yaml"
TEXT = SPEC.read_text()
ALLOCATED = next(line for line in TEXT.splitlines(keepends=True) if line.startswith("  allocate:"))
FUSED = next(line for line in TEXT.splitlines(keepends=True) if line.startswith("  - blocks.*.mlp:"))
CHANGES = {
    "act": ("act: leaky_relu(x, 0.5) ** 2", "act: relu(x) ** 2"),
    "ratio": ("ratio: 3.5", "ratio: 3.0"),
    "heads": ("heads: 8", "heads: 4"),
    "bits": ("default: {scheme: gptq, bits: 7,", "default: {scheme: gptq, bits: 6,"),
    "fuse": (FUSED, ""),
    "allocate": (ALLOCATED, ""),
    "rate": ("lr: 0.035", "lr: 0.034"),
    "merge": ("merge: auto", "merge: []"),
    "gate": ("act: leaky_relu(x, 0.5) ** 2", "act: silu(gate) * x"),
}
LONGEST = {"act": 260, "ratio": 120, "heads": 400, "bits": 30, "fuse": 160, "rate": 30}  # lines of the whole output


@cache
def compared(change: str) -> Comparison:
    """gpt_mlp35 beside itself with one line changed."""
    before, after = CHANGES[change]
    assert before in TEXT
    with TemporaryDirectory() as folder:
        path = Path(folder) / "gpt_mlp35.yaml"
        path.write_text(TEXT.replace(before, after, 1))
        shutil.copy(SPEC.with_name("gpt_mlp35.lock.json"), folder)
        comparison = Comparison.of(SPEC, path)
        assert comparison.details  # which reads the spec while it is there
        return comparison


@pytest.mark.parametrize("change", LONGEST)
def test_the_whole_output_is_short(change: str) -> None:
    assert len(compared(change).text().splitlines()) <= LONGEST[change]


LINES = {
    "act": (
        "parameters   29,951,068, as before",
        "step         at least 473 ms on sm90, as before; 555 ms measured before",
        "memory       about 21.7 GB -> about 17.9 GB",
        "saved        8,995 -> 5,119 MB per micro-batch by fused groups; blocks.*.mlp: act, slope -> act",
        "tiles lost   2: linear_leaky_relu2__n1792_k512, dgrad_mul__n1792_k512",
        "sm90/dgrad_mul__n1792_k512.cu -> dgrad_mul_sqrt__n1792_k512.cu",
    ),
    "ratio": (
        "parameters   29,951,068 -> 27,067,484 (-2,883,584)",
        "FLOP/token   245.9 MFLOP -> 228.6 MFLOP",
        ", budget 16,000,000 -> ",
        "step         at least 465 ms -> at least 445 ms on sm90; 555 ms measured before",
        "fused products           at least 45.7 ms -> at least 39.2 ms",
        "memory       about 21.7 GB -> about 20.5 GB",
        "saved        8,995 -> 7,887 MB per micro-batch by fused groups",
        "tiles lost   2: ",
        "shapes       blocks.*.mlp.up [1792, 512] -> [1536, 512]",
        "blocks.*.mlp.down [512, 1792] -> [512, 1536]",
    ),
    "heads": (
        "parameters   29,951,068 -> 32,867,376 (+2,916,308)",
        "\ndecoding     bytes per token: cache 11,264.5 -> 22,528.5; weights 26,010,520 -> 28,610,368\n",
        "norm and rotary          at least 15.6 ms -> at least 20.8 ms",
        "tiles lost   7: causal_attention__h8_g4_c64, ",
        "blocks.*.attention.k [256, 512] -> [512, 512]",
        "sm90/causal_attention__h8_g4_c64.py -> causal_attention__h4_g4_c128.py",
    ),
    "bits": (
        "step         555 ms, floor 362 on sm90, as before",
        "to fit 16,000,000 bytes",
        "69 tensors int7 -> int6",
        "(-3,783,",
        "changed      nothing",
    ),
    "fuse": (
        "step         at least 465 ms -> at least 494 ms",
        "fused products           at least 45.7 ms -> none",
        "tiles lost   2: ",
        "removed      sm90/dgrad_mul__n1792_k512.cu",
    ),
    # A group of the merged product computes its slices, which are views, but does not save them a second time
    "merge": ("memory       about 21.7 GB, as before", "\nsaved        8,995 MB per micro-batch by fused groups\n"),
    "allocate": (
        ", chosen per tensor to fit 16,000,000 bytes\n          -> by the rules\n",
        "\n  after      may not fit: use `quant.allocate: ",
    ),
    "gate": ("added        sm90/dgrad_add__n512_k1792.cu",),
    "rate": (
        "step         555 ms, floor 362 on sm90, as before",
        "memory       21.6 GB at most, as before",
        "changed      nothing",
    ),
}


@pytest.mark.parametrize("change", LINES)
def test_the_summary_shows_the_differences(change: str) -> None:
    summary = compared(change).summary
    assert len(summary) <= 25 and all(len(line) <= 120 for line in summary)
    shown = "\n".join(summary)
    assert [words for words in LINES[change] if words not in shown] == []
    assert ("decoding  " in shown) == (change in ("ratio", "heads", "bits", "gate"))
    assert ("tiles lost" in shown) == (change in ("act", "ratio", "heads", "fuse", "gate", "merge"))


def test_removed_and_added_kernels_are_listed() -> None:
    details = compared("fuse").details
    assert "removed: sm90/linear_leaky_relu2__n1792_k512.cu" in details
    assert not any("cpu/" in line for line in details), "the files of the CPU are one line"
    assert "added: sm90/dgrad_add__n512_k1792.cu" in compared("gate").details


def heads(change: str) -> list[tuple[str, str]]:
    """The pairs of compared files, in order."""
    details = compared(change).details
    return [(a[4:], b[4:]) for a, b in pairwise(details) if a.startswith("--- ") and b.startswith("+++ ")][1:]


def test_kernels_are_paired_by_node() -> None:
    assert heads("act") == [
        ("a/sm90/model.py", "b/sm90/model.py"),
        ("a/sm90/dgrad_mul__n1792_k512.cu", "b/sm90/dgrad_mul_sqrt__n1792_k512.cu"),
        ("a/sm90/dgrad_mul__n1792_k512.py", "b/sm90/dgrad_mul_sqrt__n1792_k512.py"),
        ("a/sm90/linear_leaky_relu2__n1792_k512.cu", "b/sm90/linear_relu2__n1792_k512.cu"),
        ("a/sm90/linear_leaky_relu2__n1792_k512.py", "b/sm90/linear_relu2__n1792_k512.py"),
    ]
    details = compared("act").details
    assert "-      dx[i] = p[i] * slope[i];" in details and "+      dx[i] = 2.0f * p[i] * sqrtf(y[i]);" in details
    assert not any("dgrad_mul_sqrt_workspace" in line for line in details), "a name alone is no difference"
    assert sum(line.startswith("cpu: ") for line in details) == 1


def test_a_learning_rate_is_in_the_spec_diff_alone() -> None:
    assert heads("rate") == []


def test_equal_specs_have_no_diff() -> None:
    assert run(["diff", str(SPEC), str(SPEC)]) == 0


def test_the_rows_of_the_plan_are_the_difference_of_measured_times(tmp_path: Path) -> None:
    other = Path(shutil.copy(SPEC, tmp_path))
    lock = SPEC.with_name("gpt_mlp35.lock.json").read_text()
    assert lock.count('"ms": 0.0316,') == 1
    (tmp_path / "gpt_mlp35.lock.json").write_text(lock.replace('"ms": 0.0316,', '"ms": 0.999,'))
    comparison = Comparison.of(SPEC, other)
    rows = [f"blocks.{block}.attention.y" for block in ("*", "9", "10")]
    assert comparison.summary[-1] == f"changed      PLAN.md: {', '.join(rows)}"
    assert [line[3:].split()[0] for line in comparison.details if "0.999, not in training" in line] == rows


def test_a_comment_for_a_pull_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = tmp_path / "gpt_mlp35.yaml"
    after.write_text(TEXT.replace(*CHANGES["bits"]))
    assert run(["diff", str(SPEC), str(after), "--format", "markdown"]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"### specc diff `{SPEC}` -> `{after}`\n\n```\n") and text.count("```") == 4
    assert "<details><summary>" in text and "\n```diff\n--- " in text and text.endswith("</details>\n")


def test_a_spec_that_does_not_build(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("spec_version: 2\n")
    with pytest.raises(SpecError):
        Comparison.of(SPEC, broken)


def test_a_copy_with_another_name_is_equal(tmp_path: Path) -> None:
    other = Path(shutil.copy(SPEC.with_name("gpt_mini.yaml"), tmp_path / "other.yaml"))
    assert Comparison.of(SPEC.with_name("gpt_mini.yaml"), other).equal


def test_times_of_different_steps_state_their_tokens(tmp_path: Path) -> None:
    other = tmp_path / "gpt_mlp35.yaml"
    other.write_text(TEXT.replace("tokens_per_step: 786432", "tokens_per_step: 393216"))
    summary = "\n".join(Comparison.of(SPEC, other).summary)
    assert " per 786,432 tokens -> " in summary and " per 393,216 tokens on sm90" in summary


def test_what_changes_in_some_blocks_and_targets_is_named(tmp_path: Path) -> None:
    """A kernel of all blocks stays beside a new one of two blocks. A layer more adds the matrices of one block."""
    path, text = tmp_path / "gpt_mini.yaml", SPEC.with_name("gpt_mini.yaml").read_text()
    window = "    changes: [{where: layer % 2 == 1, attention: {mask: j <= i and i - j < 64}}]\n  head:"
    assert "  head:" in text and "    count: 6" in text
    path.write_text(text.replace("  head:", window, 1).replace("    count: 6", "    count: 7"))
    summary = "\n".join(Comparison.of(SPEC.with_name("gpt_mini.yaml"), path).summary)
    assert "replaced" not in summary and "sm90/cached_attention_d_lt_64__h4_g2_c32.py" in summary
    assert "blocks.6.attention.k none -> " in summary and "targets " not in summary
    path.write_text(text.replace("targets: [cpu, sm90]", "targets: [sm90]"))
    assert "targets      cpu, sm90 -> sm90" in Comparison.of(SPEC.with_name("gpt_mini.yaml"), path).summary
