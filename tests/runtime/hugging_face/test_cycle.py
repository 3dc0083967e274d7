"""A model trained here goes to `transformers` and back: the same text, the same bytes, and every command goes on."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import families_of_gpt
import families_of_llama
import family
import pytest
import torch
import transformers
from run_samples import write_text
from safetensors.torch import load_file, save_file

from specc.cli.app import run
from specc.runtime.hugging_face.exporting import ExportOptions, export_folder
from specc.runtime.hugging_face.importing import ImportOptions, import_folder
from specc.runtime.hugging_face.recognizing import NoFamily

SPEC = """spec_version: 2
name: small
targets: [cpu]
model:
  kind: decoder
  vocab: 257
  dim: 32
  context: 32
  embed: [{kind: token}]
  blocks:
    count: 2
    norm: {kind: rms, weight: w}
    layers:
      - {kind: attention, heads: 4, kv_heads: 2, rope: {base: 10000}}
      - {kind: mlp, ratio: 2, act: silu(gate) * x, dropout: 0.1}
  norm: {kind: rms, weight: w}
  head: {tied: false}
quant:
  default: {scheme: gptq, bits: 4}
  rules: [{match: embed.token, scheme: round, bits: 8}, {match: "*_weight", scheme: none, dtype: f16}]
train:
  data: {tokenizer: bytes}
  micro_batch: 4
  tokens_per_step: 128
  steps: 3
  optimizers: [{kind: adamw, match: "*", lr: 0.01}]
  validate_tokens: 512
"""
SHORT = ("train.steps=2", "train.tokens_per_step=128", "train.micro_batch=4", "train.validate_tokens=512")


def test_a_trained_model_goes_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SPEC)
    data = str(write_text(tmp_path / "data"))
    assert run(["train", "small.yaml", "--run", "small", "--data", data]) == 0
    assert run(["export", "small", "--format", "hf", "--out", "there"]) == 0
    capsys.readouterr()
    assert run(["generate", "small", "--prompt", "for é", "--max-tokens", "20", "--temperature", "0"]) == 0
    ours = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained("there")
    tokenizer = transformers.AutoTokenizer.from_pretrained("there")
    ids = model.generate(**tokenizer("for é", return_tensors="pt"), max_new_tokens=20, do_sample=False)
    assert ours == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"
    changes = [word for text in (*SHORT, "quant.calibrate={sequences: 4, batch: 4}") for word in ("--set", text)]
    assert run(["import", "there", "--name", "back", "--data", data, *changes]) == 0
    assert "tokenizer: bytes" in Path("specs/back.yaml").read_text()
    assert run(["export", "runs/back-001", "--format", "hf", "--out", "again"]) == 0
    names = sorted(os.listdir("there"))
    assert names == ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir("again")) == names
    # the card names its run
    assert [Path("there", name).read_bytes() == Path("again", name).read_bytes() for name in names[1:]] == [True] * 4
    # the same text, then training, quantization and scores of what came back
    capsys.readouterr()
    assert run(["generate", "runs/back-001", "--prompt", "for é", "--max-tokens", "20", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == ours
    assert run(["train", "--run", "runs/back-001", "--resume", "auto"]) == 0
    for bits in (4, 5):
        assert run(["quantize", "runs/back-001", "--max-tokens", "256", "--set", f"quant.default.bits={bits}"]) == 0
        report = json.loads(Path("runs/back-001/quantized/report.json").read_text())
        assert report["step"] == 2 and {row["bits"] for row in report["parameters"]} == {bits, 8, 16}
    # another run starts from the folder itself
    start = ["--set", "train.start={path: there}", *changes[:-2]]
    assert run(["train", "small.yaml", "--run", "begun", "--data", data, "--steps", "0", *start]) == 0
    assert run(["export", "begun", "--format", "hf", "--out", "third"]) == 0
    assert Path("third/model.safetensors").read_bytes() == Path("there/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("act: silu(gate) * x", "act: silu(gate) * x ** 2"), "no name for the activation"),
        (("heads: 4,", "heads: 4, sinks: true,"), "blocks.0.attention.sinks is true"),
        (("head: {tied: false}", "head: {tied: false, bias: true}"), "head.bias is true"),
        (("kind: rms, weight: w}\n    layers", "kind: rms, weight: 1 + w}\n    layers"), "blocks.0.norm is"),
    ],
)
def test_a_model_of_no_family_is_refused_by_its_first_difference(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    from specc.compiler.spec.check import load
    from specc.runtime.hugging_face.recognizing import recognized

    assert recognized(load(SPEC)[0].model).family.name == "llama"
    with pytest.raises(NoFamily, match=re.escape(message)):
        recognized(load(SPEC.replace(*change))[0].model)


def test_heads_that_do_not_divide_the_features_are_those_of_mistral() -> None:
    """Transformers refuses them in Llama, whatever the size of a head, and not in Mistral, which is else the same."""
    from specc.compiler.spec.check import load
    from specc.runtime.hugging_face.recognizing import recognized

    changed = SPEC.replace("heads: 4, kv_heads: 2", "heads: 6, kv_heads: 2, head_dim: 8")
    match = recognized(load(changed)[0].model, "llama")
    assert match.family.name == "mistral" and match.config["sliding_window"] is None
    assert transformers.AutoConfig.for_model("mistral", **match.config).head_dim == 8


def imported(folder: Path, place: Path) -> Path:
    import_folder(folder, ImportOptions("model", place / "spec.yaml", place / "run", "stdlib"), lambda line: None)
    return place / "run"


def every_tensor(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_dtypes_companions_and_shards_come_back(tmp_path: Path) -> None:
    theirs = family.randomized(families_of_llama.FAMILIES["llama"].config(random.Random(1)), 1).bfloat16()
    theirs.save_pretrained(tmp_path / "there", max_shard_size="20KB")
    there = tmp_path / "there"
    assert (there / "model.safetensors.index.json").is_file()
    companions = {
        "chat_template.jinja": "{{ x }}\r\n",
        "special_tokens_map.json": '{"a":\n "b"}',
        "tokenizer.json": "{}",
    }
    for name, text in companions.items():
        (there / name).write_bytes(text.encode())
    first = next(there.glob("model-00002*.safetensors"))
    tensors = load_file(first)
    mixed = next(iter(tensors))
    save_file({**tensors, mixed: tensors[mixed].float()}, first, {"format": "pt"})
    out = export_folder(imported(there, tmp_path), ExportOptions(tmp_path / "out", shard=20_000), lambda line: None)
    for name in ("config.json", "generation_config.json", *companions):
        assert (out / name).read_bytes() == (there / name).read_bytes()
    assert len(list(out.glob("*.safetensors"))) > 2
    here, wanted = (every_tensor(path) for path in (out, there))
    assert here.keys() == wanted.keys()
    assert all(here[name].dtype == wanted[name].dtype and torch.equal(here[name], wanted[name]) for name in wanted)
    (out / "tokenizer.json").unlink()  # it is not one
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, theirs.lm_head.weight)


def test_files_of_older_versions(tmp_path: Path) -> None:
    """GPT-2 without the prefix of its tensors, with masks as buffers and a second copy of the tied table."""
    theirs = family.randomized(families_of_gpt.FAMILIES["gpt2"].config(random.Random(2)), 2)
    theirs.save_pretrained(tmp_path / "there")
    path = tmp_path / "there" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file({**tensors, **masks}, path, {"format": "pt"})
    out = export_folder(imported(tmp_path / "there", tmp_path), ExportOptions(tmp_path / "out"), lambda line: None)
    written = load_file(out / "model.safetensors")
    assert {name.removeprefix("transformer."): 0 for name in written} == dict.fromkeys(tensors, 0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)
    shutil.rmtree(out)
