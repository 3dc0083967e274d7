"""Lookups in several tables in one kernel, against their rows, and in the programs of decoding steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_sites import lookups_site
from gpus import gpu_target
from kernel_sites import DTYPES, check_clean, imported, interpret_calls
from tiny_models import MLP, tiny
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.norm_rope.lookups import LOOKUPS_TRITON
from specc.compiler.ops.decoding.lookups import Lookups
from specc.runtime.model.cuda_graph import captured

ROPES = ((8, 10000.0, 40), (20, 500.0, 60))
CASES = {
    "embedding and angles": ((70,), ROPES[:1]),
    "two embeddings": ((33, 128), ()),
    "two of each": ((5, 64), ROPES),
    "angles": ((), ROPES[1:]),
}
ROPE = {"kind": "attention", "heads": 2, "rope": {}}


def inputs_of(site: Site, texts: int, device: str = "cpu") -> list[Tensor]:
    """Random inputs. Some indices are the first and the last row."""
    generator, op, values = torch.Generator(device).manual_seed(texts), site.node.op, []
    for type in site.inputs:
        shape = [texts if dim == "B" else int(dim) for dim in type.shape]
        if type.dtype == "i64":
            below = op.ids_below(site.inputs)
            value = torch.randint(below, shape, generator=generator, device=device)
            value.view(-1)[:2] = torch.tensor([below - 1, 0], device=device)[: value.numel()]
        else:
            value = torch.randn(shape, generator=generator, device=device).to(DTYPES[type.dtype])
        values.append(value)
    return values


def check(site: Site, inputs: list[Tensor], outputs: list[Tensor], name: str) -> None:
    """Rows are copies; angles are those of f64, up to the rounding of f32."""
    wanted: Any = site.node.op.reference(*inputs)
    for i, (got, value) in enumerate(zip(outputs, wanted, strict=True)):
        assert got.shape == value.shape, (name, i)
        if value.dtype == torch.float64:
            torch.testing.assert_close(got.double(), value, rtol=0, atol=2e-5)
        else:
            assert torch.equal(got, value), (name, i)


def test_interpreted_rows_are_those_of_the_tables(tmp_path: Path) -> None:
    calls, sites = [], []
    for i, (name, (widths, ropes)) in enumerate(CASES.items()):
        site = lookups_site(widths, ropes, dtype="f32" if i % 2 else "f16")
        module = imported(LOOKUPS_TRITON, site, tmp_path / f"lookups_{i}").__name__
        for texts in (1, 3):
            inputs = inputs_of(site, texts)
            shapes = [[texts if dim == "B" else int(dim) for dim in type.shape] for type in site.node.types]
            outputs = [
                torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=DTYPES[type.dtype])
                for shape, type in zip(shapes, site.node.types, strict=True)
            ]
            calls.append((str(tmp_path), module, {"PDL": False}, "launch", [*inputs, *outputs]))
            sites.append((name, site, inputs))
    for arguments, (name, site, inputs) in zip(interpret_calls(tmp_path, calls), sites, strict=True):
        assert all(map(torch.equal, arguments, inputs)), f"{name}: an input was written"
        outputs = arguments[len(inputs) :]
        assert all(output[-1].isnan().all() for output in outputs), f"{name}: a row past the end was written"
        check(site, inputs, [output[:-1] for output in outputs], name)
    check_clean(tmp_path)


def test_an_index_outside_of_a_table_reads_the_nearest_row(tmp_path: Path) -> None:
    site = lookups_site((6,), dtype="f32", rows=5)
    module = imported(LOOKUPS_TRITON, site, tmp_path / "outside").__name__
    ids, table, rows = torch.tensor([[-1], [2**40], [3]]), torch.randn(5, 6), torch.empty(3, 1, 6)
    ((*_, got),) = interpret_calls(tmp_path, [(str(tmp_path), module, {"PDL": False}, "launch", [ids, table, rows])])
    assert torch.equal(got[:, 0], table[[0, 4, 3]])


def test_nodes_that_the_kernel_does_not_compute_say_why() -> None:
    assert "reads tables of bf16, f16, f32" in str(LOOKUPS_TRITON.rejects(lookups_site((6,), dtype="f64")))
    assert "up to 16384 elements" in str(LOOKUPS_TRITON.rejects(lookups_site((16385,))))
    assert LOOKUPS_TRITON.rejects(lookups_site((16384,))) is None


@pytest.mark.parametrize(
    ("settings", "tables", "ropes"),
    [({}, 1, 1), ({"embed": [{"kind": "token"}, {"kind": "positions"}]}, 2, 1), ({"cache": {"page": 16}}, 1, 1)],
    ids=["token", "token and position", "pages"],
)
def test_a_step_has_one_lookup(settings: dict[str, Any], tables: int, ropes: int) -> None:
    spec = tiny(layers=(ROPE, MLP), context=64, fuse=(), **settings)
    for target in ("sm90", "cpu"):
        (graph,) = pipeline.run(spec, target, form="decoding").programs
        lookups = [node for node in graph.nodes if isinstance(node.op, Lookups)]
        names = {node.op.name for node in graph.nodes}
        if target == "cpu":  # the kernel is Triton's
            assert not lookups and {"embedding", "rope_rows"} <= names
            continue
        (op,) = (node.op for node in lookups)
        assert isinstance(op, Lookups) and (op.tables, len(op.ropes)) == (tables, ropes)
        assert not {"embedding", "rope_rows"} & names


# --- a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_captured_lookups_follow_ids_and_positions(name: str, dtype: str, folder: Path) -> None:
    widths, ropes = CASES[name]
    site = lookups_site(widths, ropes, gpu_target(), dtype)
    module = imported(LOOKUPS_TRITON, site, folder / f"gpu_{name.replace(' ', '_')}_{dtype}")
    function = vars(module)[LOOKUPS_TRITON.render(site).function]
    for texts in (1, 7, 64):
        inputs = inputs_of(site, texts, "cuda")
        graph, outputs = captured(lambda inputs=inputs: function(*inputs))
        for _ in range(3):
            for value in inputs:
                if value.dtype == torch.int64:
                    value.copy_(torch.randint(site.node.op.ids_below(site.inputs), value.shape, device="cuda"))
            graph.replay()
            check(site, inputs, list(outputs), name)
    with pytest.raises(ValueError, match="expected contiguous"):
        function(*(value.cpu() for value in inputs))
