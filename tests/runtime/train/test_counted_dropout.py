"""Dropout in models of text: known numbers, the same mask in all forms of a model, in both passes and on all ranks."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from command_server import shell_environment
from log_lines import read_log
from run_samples import SPEC, random_weights, small_spec, write_text
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from specc.compiler import pipeline
from specc.compiler.ops.dropout import Dropout, philox
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.programs import reference
from specc.compiler.spec.check import load
from specc.runtime.distributed.world import World
from specc.runtime.model.load import Loaded, import_file, instantiate
from specc.runtime.train.dropout_draws import DropoutDraws, key_of
from specc.runtime.train.train import TrainOptions, train

MLP = "model.blocks.layers.1.dropout=0.25"
ATTENTION = "model.blocks.layers.0.dropout=0.125"
FUSED = 'fuse=[{"blocks.*.attention": [q.norm, q.rope, q.gain]}, {"blocks.*.mlp": [up, act, down, dropped, x]}]'


def test_numbers_are_those_of_philox() -> None:
    """The first words that Salmon et al. publish for Philox2x32-7, where the counter and the key are 0; words of other
    counters and keys, by integers of Python."""
    assert philox(0, [0], 1).tolist() == [[0x257A3673]]
    for key, row, column in ((2**64 - 1, 2**32 - 1, 5), (0x0123456789ABCDEF, 2**40 + 3, 70)):
        counter, word = [column, (row ^ (key >> 32)) % 2**32], key % 2**32
        for _ in range(7):
            high, low = divmod(counter[0] * 0xD256D193, 2**32)
            counter, word = [high ^ counter[1] ^ word, low], (word + 0x9E3779B9) % 2**32
        assert philox(key, [row], column + 1)[0, column] == counter[0]
    spread = philox(key_of(1, 2, "a"), range(512), 512) / 2**32
    assert abs(spread.mean() - 0.5) < 0.003 and abs(spread.std() - 12**-0.5) < 0.003
    rows = spread - spread.mean()
    assert abs((rows[1:] * rows[:-1]).mean()) < 0.001 and abs((rows[:, 1:] * rows[:, :-1]).mean()) < 0.001


def built(folder: Path, fuse: bool) -> Loaded:
    loaded = instantiate(small_spec(MLP, ATTENTION, FUSED), "cpu", folder / str(fuse), fuse)
    weights = random_weights(loaded.spec)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            parameter.copy_(weights[name])
    loaded.model.double()
    return loaded


def test_unfused_fused_and_interpreted_programs_agree_to_the_last_digits(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ids = torch.randint(257, (3, 33), generator=torch.Generator().manual_seed(2))
        batch: Any = ids[:, :-1], ids[:, 1:]
        results = []
        for fuse in (False, True):
            loaded = built(tmp_path, fuse)
            DropoutDraws(loaded.model, 7, 3, 32, World.alone()).write(5, 2)
            loss = loaded.model(*batch)
            loss.backward()
            results.append((loss.detach(), {name: p.grad for name, p in loaded.model.named_parameters()}))
        programs = pipeline.run(loaded.spec.plain, "cpu", "count_dropout")
        exact = {name: p.detach().clone().requires_grad_() for name, p in loaded.model.named_parameters()}
        buffers = {name: loaded.model.get_buffer(name) for name, _ in programs.buffers}
        loss = reference.run(
            programs, "train", dict(zip(("ids", "targets"), batch, strict=True)), {**exact, **buffers}
        )["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        results.append((loss.detach(), {name: p.grad for name, p in exact.items()}))
        for have, gradients in results[:2]:
            torch.testing.assert_close(have, loss.detach(), rtol=1e-12, atol=0)
            for name, want in results[2][1].items():
                torch.testing.assert_close(gradients[name], want, rtol=1e-9, atol=1e-12)
        plain = reference.run(
            pipeline.lower(loaded.spec, "cpu"), "score", dict(zip(("ids", "targets"), batch, strict=True)), exact
        )
        assert abs(plain["loss"].mean() - loss) > 1e-6  # in f64, programs agree to 1e-12
        torch.testing.assert_close(loaded.model.score(*batch), plain["loss"], rtol=1e-10, atol=1e-10)  # type: ignore[operator]
    finally:
        torch.set_default_dtype(before)


def test_a_fused_group_stores_no_mask(tmp_path: Path) -> None:
    loaded = built(tmp_path, True)
    group = next(group for group in loaded.programs.groups if "mlp.dropped" in group.members)
    joined = next(node for node in group.forward.nodes if "mlp.dropped" in node.members)
    assert isinstance(joined.epilogue, Pointwise) and dict(joined.epilogue.draws) == {"keep": 0.25}
    assert joined.members == ("mlp.down", "mlp.dropped", "mlp.x")
    assert sum(isinstance(node.op, Dropout) for node in group.backward.nodes) == 1
    saved = {name: type for name, type in group.backward.inputs if name in group.saved}
    assert str(saved["dropped_draw"]) == "draw:i64[4]"
    assert not any(type.dtype == "bool" for type in saved.values())
    # the gradient of the learned factor of the branch reads its value, which the spec asks for
    assert {name for name, type in saved.items() if type.shape == ("B", "T", 32)} <= {"x", "dropped", "residual_x"}


def test_a_compiled_norm_after_dropout_draws_the_mask_again(tmp_path: Path) -> None:
    """The partition of Torch's compiler saves no mask, and the gradients are those of eager Torch."""
    code = import_file(built(tmp_path, False).directory, "counted_dropout")
    graphs: list[torch.fx.GraphModule] = []

    def captured(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def layer(x: torch.Tensor, stream: torch.Tensor, w: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.rms_norm(stream + code.counted_dropout(x, draw, 0.3), (64,)), w)

    backend = aot_autograd(
        fw_compiler=captured, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(s, generator=generator).requires_grad_() for s in ((2, 8, 64), (2, 8, 64), (32, 64))]
    gradients = []
    for function in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        y = function(*given, torch.tensor([5, 1, 2, 8]))
        gradients.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for have, want in zip(*gradients, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 2
    saved = [node.meta["val"] for node in graphs[1].graph.nodes if node.op == "placeholder"]
    assert saved and all(value.is_floating_point() or not value.shape for value in saved)


class Node(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a_draw", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("b_draw", torch.zeros(4, dtype=torch.int64))


def test_masks_depend_on_the_row_of_the_step_and_not_on_its_parts(tmp_path: Path) -> None:
    """Sequences of a step in any cut: 8 passes of one, two of four, or four of two ranks with one each."""
    code = import_file(built(tmp_path, False).directory, "counted_dropout")
    masks = {}
    for ranks, rows in ((1, 8), (1, 1), (1, 4), (2, 1), (2, 2)):
        whole = torch.empty(8, 6, 10)
        for rank in range(ranks):
            node = Node()
            draws = DropoutDraws(node, 3, rows, 6, World(rank, ranks))
            for part in range(8 // rows // ranks):
                draws.write(11, part)
                masked = code.counted_dropout(torch.ones(rows, 6, 10), node.a_draw, 0.3)
                short = code.counted_dropout(torch.ones(2 * rows, 3, 10), node.a_draw, 0.3)
                assert torch.equal(masked.flatten(0, 1), short.flatten(0, 1))
                whole[part * rows * ranks + rank : (part + 1) * rows * ranks : ranks] = masked
        masks[ranks, rows] = whole
    first = masks[1, 8]
    assert all(torch.equal(first, mask) for mask in masks.values())
    assert set(first.unique().tolist()) == {0.0, first.max().item()} and first.max().item() == pytest.approx(1 / 0.7)
    assert 0.6 < (first > 0).float().mean() < 0.8
    node = Node()
    draws = DropoutDraws(node, 3, 8, 6, World.alone())
    others = []
    for step, name in ((11, "b_draw"), (12, "a_draw")):
        draws.write(step, 0)
        others.append(code.counted_dropout(torch.ones(8, 6, 10), node.get_buffer(name), 0.3))
    DropoutDraws(node, 4, 8, 6, World.alone()).write(11, 0)
    others.append(code.counted_dropout(torch.ones(8, 6, 10), node.a_draw, 0.3))
    assert all(0.3 < ((other > 0) == (first > 0)).float().mean() < 0.75 for other in others)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder / "log.jsonl") if record["event"] == "step"]


def test_a_resumed_run_is_the_whole_run(tmp_path: Path) -> None:
    def run(name: str, steps: int | None = None) -> Path:
        spec = small_spec(MLP, FUSED, "train.steps=4")
        data = str(write_text(tmp_path / "data")) if not (tmp_path / "data").exists() else str(tmp_path / "data")
        options = TrainOptions(
            spec, "cpu", data, tmp_path / name, resume="auto", stop_after_steps=steps, cache=tmp_path / "c"
        )
        return train(options, lambda line: None).run

    whole = losses(run("whole"))
    for steps in (1, 3, 4):
        parts = run("parts", steps)
    assert losses(parts) == whole and len(whole) == 4


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    sets = ("targets=[cpu]", "model.dim=32", "model.context=32", "model.blocks.count=2", "train.steps=3", MLP, FUSED)
    sets += ("train.tokens_per_step=256", "train.schedule={}", "train.validate_tokens=64")
    for name, gpus, rows in (("one", "1", 8), ("two", "2", 2)):
        words = [word for text in (*sets, f"train.micro_batch={rows}") for word in ("--set", text)]
        command = ["specc", "train", str(SPEC), "--data", str(tmp_path / "data"), "--run", str(tmp_path / name), *words]
        command += ["--target", "cpu", "--gpus", gpus]
        done = subprocess.run(command, env=shell_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-6)
    ours, yours = (
        load_file(tmp_path / name / "checkpoints/step_00000003/model.safetensors") for name in ("one", "two")
    )
    for name, tensor in ours.items():
        assert float((tensor - yours[name]).norm()) <= 1e-4 * float(tensor.norm()), name


def test_a_model_of_lines_keeps_the_generator_of_torch() -> None:
    spec, _ = load(SPEC.parent / "poly_lstm.yaml")
    programs = pipeline.run(spec, "cpu", "count_dropout")
    drops = [node.op for graph in programs.graphs for node in graph.nodes if isinstance(node.op, Dropout)]
    assert drops and not any(op.counted for op in drops) and not programs.buffers
