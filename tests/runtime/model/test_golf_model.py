"""The parameter-golf model and its options against an independent plain-Torch model; its size, its start, its base."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from golf_models import OPTIONS, spec_of
from plain_golf import at, copied, place
from tiny_models import tiny

from specc.compiler import pipeline
from specc.compiler.ops.positions import RopeAngles
from specc.compiler.ops.region import Call
from specc.compiler.programs.programs import Programs
from specc.compiler.spec.check import load, problems_of
from specc.runtime.model.load import initialize, instantiate

SPEC = Path(__file__).parents[3] / "specs/gpt_mlp35.yaml"


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_every_gradient_equal_the_plain_model(name: str, fuse: bool, tmp_path: Path) -> None:
    p = OPTIONS[name]
    model = instantiate(spec_of(p), "cpu", tmp_path, fuse).model
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.7 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    plain = copied(p, dict(model.named_parameters()))
    ids, targets = torch.randint(p.vocab, (2, 2, p.context), generator=generator)
    ids[0, 7] = ids[1, 0] = ids[1, 12] = p.bos
    loss, want = model(ids, targets), plain(ids, targets)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    loss.backward()
    want.backward()
    gradients = {key: value.grad for key, value in plain.named_parameters()}
    for key, parameter in model.named_parameters():
        gradient = at(gradients, place(key, p.count), parameter.shape)  # type: ignore[arg-type]
        scale = float(gradient.abs().max())
        assert scale > 0, f"the gradient of {key} tests nothing"
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=2e-4, atol=2e-5 * scale, msg=lambda text, key=key: f"{key}: {text}"
        )


def golf() -> Programs:
    return pipeline.lower(load(SPEC)[0], "cpu")


def test_it_has_the_published_parameters() -> None:
    table = {param.name: param.shape for param in golf().params}
    assert sum(math.prod(shape) for shape in table.values()) == 29_951_068
    banks = [shape for name, shape in table.items() if name.startswith("blocks.") and len(shape) == 2 and shape[1] > 1]
    assert sum(map(math.prod, banks)) == 28_835_840
    shared = {name: shape for name, shape in table.items() if not name.startswith("blocks.")}
    assert shared == {
        "embed.token": (1024, 512),
        "embed.bigram.table": (3072, 112),
        "embed.bigram.project": (512, 112),
        "embed.bigram.scale": (1,),
        "embed.smear.gate": (512,),
        "attention_values.table": (1024, 128),
        "attention_values.project": (256, 128),
        "attention_values.scale": (1,),
    }
    small = {name.split(".", 2)[2] for name, shape in table.items() if name.startswith("blocks.") and len(shape) == 1}
    assert small == {
        "attention.residual",
        "attention.value_scale",
        "mlp.residual",
        "mix.stream",
        "mix.embedded",
        "skip.scale",
    }
    assert [name for name in table if name.endswith("value_scale")] == [
        f"blocks.{layer}.attention.value_scale" for layer in (9, 10)
    ]


@pytest.mark.parametrize(
    ("late", "count", "order"),
    [
        ("{at: [[0, 0..10], [0.35, 0..5 3..5 3..5 6..10]]}", 35_944_536, (0, 1, 2, *(3, 4, 5) * 3, *range(6, 11))),
        ("{at: [[0, 0..10], [0.5, 0..5 4..5 4..5 6..10]]}", 35_943_512, (0, 1, 2, 3, *(4, 5) * 3, *range(6, 11))),
    ],
    ids=["layers 3 to 5", "PR 1394"],
)
def test_the_late_stack_has_the_published_parameters_and_order(late: str, count: int, order: tuple[int, ...]) -> None:
    spec = load(SPEC.with_name("gpt_golf_sp8192.yaml"), (f"model.blocks.order={late}",))[0]
    programs = pipeline.lower(spec, "cpu")
    assert sum(param.count for param in programs.params) == count
    for program, wanted in (("train", order), ("score", order), ("train_once", tuple(range(11)))):
        runs = [str(node.op.at) for node in programs.program(program).nodes if isinstance(node.op, Call)]
        assert tuple(int(at.partition(".")[2]) for at in runs if at.startswith("blocks.")) == wanted
        assert sum(at.startswith("skips.") for at in runs) == len(wanted) // 2


LATE = 35_944_536
ABLATIONS = {
    "no loop": (("model.blocks.order=null",), LATE - 3 * 1024),
    "a loop from the start": (("model.blocks.order=0..5 3..5 3..5 6..10",), LATE),
    "no parallel layers": (("model.blocks.changes=[]",), LATE),
    "additive skips": (
        (
            "model.blocks.between.0.learn={scale: {init: 1}}",
            "model.blocks.between.0.read=x + scale * output(2 * (runs // 2) - 1 - run)",
        ),
        LATE - 8 * 512,
    ),
    "gated attention": (
        (
            "model.blocks.layers.0.learn={residual: {init: 1}, open: {of: h, features: 12, shape: 8, init: 0}}",
            "model.blocks.layers.0.y=y * 2 * sigmoid(open)",
        ),
        LATE + 11 * 8 * 12,
    ),
    "documents": (
        ("model.blocks.layers.0.bos=1", "model.blocks.layers.0.mask=j <= i and document(i) == document(j)"),
        LATE,
    ),
    "growing rows": (("train.context={at: [[0, 512], [0.3, 1024], [0.6, 2048]]}",), LATE),
    "MLP 3.5x": (("model.blocks.layers.1.ratio=3.5",), LATE - 11 * 2 * 512 * 256),
    "a vocabulary of 1024": (("model.vocab=1024", "train.data.tokenizer=fineweb_1024_bpe.model"), LATE - 7168 * 512),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_technique_of_the_late_stack_is_one_setting(name: str) -> None:
    overrides, count = ABLATIONS[name]
    spec = load(SPEC.with_name("gpt_golf_sp8192.yaml"), overrides)[0]
    assert not list(problems_of(spec))
    plan = pipeline.plan(spec, "sm90", "spec.yaml")
    assert sum(param.count for param in plan.programs.params) == count


def test_its_rope_turns_as_far_over_its_context_as_the_trained_length_did() -> None:
    (angles,) = (node.op for node in golf().program("train").nodes if isinstance(node.op, RopeAngles))
    assert angles.dims == 16 and angles.base == pytest.approx(10000 * 2 ** (16 / 14)) and round(angles.base) == 22082
    slowest = 14 / 16
    assert 2048 * angles.base**-slowest == pytest.approx(1024 * 10000**-slowest)
    assert all(node.op in (angles,) for p in golf().programs for node in p.nodes if node.op.name == "rope_angles")
    shorter, _ = load(SPEC, ("model.context=1024",))
    (plain,) = (n.op for n in pipeline.lower(shorter, "cpu").program("train").nodes if isinstance(n.op, RopeAngles))
    assert plain.base == 10000


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole model as training begins."""
    loaded = instantiate(load(SPEC)[0], "cpu", tmp_path_factory.mktemp("golf"))
    initialize(loaded, 314)
    return loaded.model


def test_it_starts_as_published(started: Any) -> None:
    results = {name: value.detach() for name, value in started.named_parameters()}
    for name, deviation in (("embed.token", 0.005), ("attention_values.table", 0.01)):
        assert float(results[name].std()) == pytest.approx(deviation, rel=0.01)
        assert abs(float(results[name].mean())) < deviation / 100
    constants = {
        "embed.bigram.table": 0,
        "embed.bigram.scale": 0.05,
        "attention_values.scale": 0.1,
        "attention.out": 0,
        "attention.q_gain": 1.5,
        "attention.value_scale": 1,
        "mlp.down": 0,
        "residual": 1,
        "mix.stream": 1,
        "mix.embedded": 0,
        "skip.scale": 1,
        "smear.gate": 0,
    }
    for name, value in results.items():
        if (tail := next((tail for tail in constants if name.endswith(tail)), None)) is not None:
            torch.testing.assert_close(value, torch.full_like(value, constants[tail]), rtol=0, atol=0)
        elif name not in ("embed.token", "attention_values.table"):
            small = value if value.shape[0] <= value.shape[1] else value.T  # orthogonal along its shorter side
            torch.testing.assert_close(small @ small.T, torch.eye(small.shape[0]), rtol=0, atol=1e-4)


def test_its_first_loss_is_that_of_knowing_nothing(started: Any) -> None:
    ids, targets = torch.randint(1024, (2, 1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float(started(ids, targets)) == pytest.approx(math.log(1024), abs=0.03)


@pytest.mark.parametrize("name", ["documents", "documents_late_stack"])
def test_no_document_reads_another_nor_a_later_token(name: str, tmp_path: Path) -> None:
    """Changing token j, a mark or not, moves all of its own document from j on, and nothing else."""
    p = OPTIONS[name]
    model: Any = instantiate(spec_of(p), "cpu", tmp_path).model
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.7 if parameter.dim() < 2 else 2 * parameter.shape[-1] ** -0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
        ids = 2 + torch.randint(p.vocab - 3, (1, p.context), generator=generator)
        starts = [0, 4, 5, 11]
        ids[0, starts[1:]] = p.bos
        before = model.score(ids, ids)[0]
        for j in range(p.context):
            other = ids.clone()
            other[0, j] = p.vocab - 1
            moved = (model.score(other, ids)[0] - before).abs() > 0
            end = next((start for start in starts if start > j), p.context)
            if j in starts[1:]:  # the mark is gone, and two documents are one
                assert not moved[:j].any() and not moved[end:].any()
            else:
                wanted = (torch.arange(p.context) >= j) & (torch.arange(p.context) < end)
                assert torch.equal(moved, wanted), j


@pytest.mark.parametrize("kind", ["smear", "smear_by_token"])
def test_a_document_starts_anew_at_its_mark_where_the_spec_says_so(kind: str, tmp_path: Path) -> None:
    """Without attention nothing but the embedding reads the token before."""

    def moved(bos: dict[str, int], folder: str) -> torch.Tensor:
        pairs = {"kind": "bigram", "buckets": 64, "dim": 3, **bos}
        smear = {"kind": kind, **bos} | ({"features": 3} if kind == "smear_by_token" else {})
        mlp = {"kind": "mlp", "hidden": 8, "act": "relu(x)"}
        spec = tiny(layers=(mlp,), fuse=(), embed=[{"kind": "token"}, pairs, {"kind": "norm"}, smear])
        model: Any = instantiate(spec, "cpu", tmp_path / folder).model
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            ids = torch.tensor([[4, 7, 3, 9, 4, 2, 8, 4, 4, 5, 6, 1]])
            before = model.score(ids, ids)
            changed = []
            for j in range(ids.shape[1]):
                other = ids.clone()
                other[0, j] = 10
                changed.append((model.score(other, ids) - before)[0].abs() > 0)
        return torch.stack(changed)

    reset, crossing = moved({"bos": 4}, "reset"), moved({}, "crossing")
    wanted = torch.eye(12).bool() | torch.diag(torch.ones(11), 1).bool()
    wanted |= torch.diag(torch.ones(10), 2).bool()  # the token before holds a pair with the one before it
    assert torch.equal(crossing, wanted)
    for start in (0, 4, 7, 8):
        assert not reset[:start, start:].any()  # what stands before a mark moves nothing from it on
    assert reset.diagonal().all() and reset[1, 2] and reset[1, 3] and reset[5, 6]
