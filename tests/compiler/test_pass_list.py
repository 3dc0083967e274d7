"""The pass list: it names every pass, each is verified, and a dump after each shows its effect."""

import ast
from pathlib import Path

import pytest

from specc.compiler import pipeline
from specc.compiler.report.explain import graphs_text
from specc.compiler.spec.check import load

ROOT = Path(__file__).parents[2]
POLY = load(ROOT / "specs/poly_attn.yaml")[0]  # int8 products, fine-tuned with rounded inputs
TEXT = load(ROOT / "specs/gpt_mini.yaml")[0]
PLAIN = load(ROOT / "specs/gpt2_124m.yaml")[0]  # no node stands between rotation and attention

SPEC_OF = dict.fromkeys(("logits", "row_linears", "rope_writes", "packed_weights"), TEXT)  # without loops over tokens
SPEC_OF |= {"rope_attentions": PLAIN, "lookups": PLAIN}
FOLDERS = ("specc.compiler.passes", "specc.compiler.int8")


def test_each_pass_changes_what_its_dump_shows() -> None:
    names = list(pipeline.forms())
    assert names[0] == pipeline.LOWER and names[-1] == pipeline.SELECT_KERNELS
    texts = {name: graphs_text(pipeline.after(SPEC_OF.get(name, POLY), "sm90", name), None) for name in names}
    assert "optimizer 0" in texts["assign_optimizers"] and "optimizer" not in texts["lower"]
    assert "int8:" in texts["assign_quant"] and "int8:" not in texts["assign_optimizers"]
    assert "int8_linear" in texts["quantize_products"] and "int8_linear" not in texts["fuse"]
    assert "graph logits(ids: i64[B,T])" in texts["logits"] and "graph train(" not in texts["logits"]
    assert "graph logits(" in texts["uncached"] and "graph logits(" not in texts["lower"]
    assert "row_linear" in texts["row_linears"] and "rope_write" not in texts["row_linears"]
    assert "= rope_write(" in texts["rope_writes"] and "cache_write(" not in texts["rope_writes"]
    assert "= rope_attention(" in texts["rope_attentions"] and "= rope_attention(" not in texts["rope_writes"]
    assert "= lookups(" in texts["lookups"] and "= embedding(" not in texts["lookups"]
    assert "@mlp.up_codes" in texts["packed_weights"] and "_codes" not in texts["rope_writes"]
    fused = graphs_text(pipeline.after(TEXT, "sm90", "fuse"), None)
    assert "# fused group" in fused
    assert "# fused group" not in graphs_text(pipeline.after(TEXT, "sm90", "fake_quantize"), None)


def test_every_pass_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(pipeline, "verify", lambda programs, after, before=None: seen.append(after))
    for form, passes in pipeline.PIPELINES.items():
        seen.clear()
        pipeline.run(SPEC_OF.get(passes[-1][0], POLY), "sm90", form=form)
        assert seen[-len(passes) :] == [name for name, _ in passes]


def test_a_form_that_a_model_does_not_have() -> None:
    with pytest.raises(ValueError, match="cannot be split into encoder and decoder"):
        pipeline.after(TEXT, "cpu", "uncached")
    assert pipeline.deployed(TEXT, "cpu") is None


def test_a_model_that_cannot_be_exported_names_the_place() -> None:
    with pytest.raises(ValueError, match=r"model\.encoder\.1 has a loop over tokens"):
        pipeline.after(POLY, "cpu", "logits")


def test_nobody_else_calls_a_pass() -> None:
    """Whoever needs programs asks the pipeline."""
    passes = {
        "assign_optimizers",
        "assign_quant",
        "round_inputs",
        "fuse",
        "quantize_products",
        "uncached",
        "with_logits",
    }
    for half in ("compiler", "runtime", "cli"):
        for path in (ROOT / half).rglob("*.py"):
            imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            ours = [node for node in imports if (node.module or "").startswith(FOLDERS)]
            names = {alias.name for node in ours for alias in node.names}
            assert path.name == "pipeline.py" or not names & passes, path
