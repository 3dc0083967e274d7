"""The load of experts by kind of documents, with a router that is planted."""

import random
from pathlib import Path
from typing import Any

import pytest
import run_samples
import torch
from run_samples import EXPERTS, make_run, random_weights, small_spec, write_text

from specc.runtime.inspection.experts import ExpertLoad, expert_loads_by_kind
from specc.runtime.inspection.inspect import Inspection, InspectOptions, inspect
from specc.runtime.inspection.pictures import draw
from specc.runtime.inspection.table import tables
from specc.runtime.storage.run_directory import Run


def planted(spec: Any, seed: int) -> dict[str, torch.Tensor]:
    """Weights whose experts 0 and 1 compute tokens of even ids, and 2 and 3 those of odd ids."""
    weights = random_weights(spec, seed)
    for name, tensor in weights.items():
        if name.endswith((".out", ".down", "router_bias")):
            tensor.zero_()
        elif name.endswith(".router"):
            tensor.zero_()[:, 0] = torch.tensor([5.0, 5.0, -5.0, -5.0])
    weights["embed.token"].mul_(0.01)[:, 0] = 1.0 - 2.0 * (torch.arange(len(weights["embed.token"])) % 2)
    return weights


def kind_of(folder: Path, letters: str) -> str:
    folder.mkdir()
    chooser = random.Random(letters)
    for split in ("train", "val"):
        (folder / f"{split}.txt").write_text("".join(chooser.choices(letters, k=4000)))
    return str(folder)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(run_samples, "random_weights", planted)
    return make_run(tmp_path / "run", small_spec(*EXPERTS), str(write_text(tmp_path / "data")))


def measured(run: Run, folder: Path, **options: Any) -> Inspection:
    options = {"parts": ("experts",), "sequences": 4, **options}
    return inspect(run.directory, InspectOptions(**options, cache=folder / "cache"), lambda line: None)


def test_kinds_of_documents_have_their_experts(run: Run, tmp_path: Path) -> None:
    kinds = {"even": kind_of(tmp_path / "a", "bdfhj"), "odd": kind_of(tmp_path / "b", "acegi")}
    result = measured(run, tmp_path, kinds=kinds)
    assert [(row.layer, row.kind) for row in result.experts] == [
        (layer, kind) for layer in ("blocks.0.mlp", "blocks.1.mlp") for kind in kinds
    ]
    for row in result.experts:
        wanted = [0.5, 0.5, 0.0, 0.0] if row.kind == "even" else [0.0, 0.0, 0.5, 0.5]
        assert row.loads == pytest.approx(wanted, abs=0.02) and sum(row.loads) == pytest.approx(1)
        assert row.largest == pytest.approx(2, abs=0.1) and row.differs == pytest.approx(0.5, abs=0.02)
    text = "\n".join(tables(result))
    assert "experts      share of the tokens" in text and text.count("blocks.0.mlp") == 2 and "odd" in text
    assert result.facts()["experts"][0]["kind"] == "even"
    assert [path.name for path in draw(result, tmp_path / "pictures")] == ["experts.png"]


def test_without_kinds_the_validation_split_is_one(run: Run, tmp_path: Path) -> None:
    result = measured(run, tmp_path)
    assert [(row.kind, row.differs) for row in result.experts] == [("validation split", None)] * 2


def test_a_model_without_experts_has_no_loads(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run", small_spec(), str(write_text(tmp_path / "data")))
    result = measured(plain, tmp_path)
    assert result.experts == () and result.notes == {} and "experts" not in "\n".join(tables(result))
    result = measured(plain, tmp_path, kinds={"a": plain.data})
    assert result.notes == {"experts": "the model has no mixture of experts"}


def test_loads_are_means_over_batches_and_many_experts_are_cut() -> None:
    first, second = ExpertLoad("l", "a", (0.25, 0.75), 1.5, 0.25), ExpertLoad("l", "b", (0.75, 0.25), 1.5, 0.25)
    kinds = {"a": [{"l": [0.0, 1.0]}, {"l": [0.5, 0.5]}], "b": [{"l": [0.75, 0.25]}]}
    assert list(expert_loads_by_kind(kinds)) == [first, second]
    many = ExpertLoad("m", "a", (0.01,) * 100, 1.0, None)
    text = "\n".join(tables(Inspection("model", 1, experts=(many, first))))
    assert "16 of 100 experts are shown" in text
