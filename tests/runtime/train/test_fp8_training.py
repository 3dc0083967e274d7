"""Products of 8-bit floats: against a plain reference, their scales over steps, causality, resuming and ranks."""

import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_server import shell_environment
from log_lines import read_log
from run_samples import SPEC, random_weights, small_spec, write_text
from torch import Tensor, nn
from toy import Toy

from specc.compiler import pipeline
from specc.compiler.ops.fp8 import Fp8Linear, delayed_scale
from specc.compiler.ops.fp8_codes import Fp8Codes
from specc.compiler.programs.programs import LoweringError
from specc.runtime.distributed.world import World
from specc.runtime.model.load import Loaded, import_file, initialize, instantiate
from specc.runtime.storage import checkpoint
from specc.runtime.train.fp8_scales import Fp8Scales
from specc.runtime.train.train import TrainOptions, train

RULES = (
    '[{match: "blocks.*.mlp.*", scaling: delayed, history: 3}, '
    '{match: "blocks.*.attention.*", scale: row}, {match: head.logits}]'
)
FP8 = (f"train.precision.fp8={RULES}", "fuse=[]")
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def with_weights(sets: Sequence[str], folder: Path) -> Loaded:
    """The small model with random weights."""
    loaded = instantiate(small_spec(*sets), "cpu", folder)
    weights = random_weights(loaded.spec)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            parameter.copy_(weights[name])
    return loaded


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return with_weights(FP8, tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def code(loaded: Loaded) -> ModuleType:
    return import_file(loaded.directory, "fp8_linear")


def near(value: Tensor, kind: torch.dtype, scale: Tensor) -> Tensor:
    """A plain rounding: the nearest 8-bit float of value / scale."""
    return (value / scale).clamp(-MOST[kind], MOST[kind]).to(kind).float()


def plainly(x: Tensor, w: Tensor, dy: Tensor, by_rows: bool, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw with a scale of each factor, written out product by product."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

    def product(a: Tensor, b: Tensor, kinds: Any, factors: tuple[int, int]) -> Tensor:
        sizes = [value.abs().amax(1, keepdim=True) if by_rows else value.abs().amax() for value in (a, b)]
        scales = [size / MOST[kind] for size, kind in zip(sizes, kinds, strict=True)]
        if given is not None:
            scales = [given[factor] for factor in factors]
        rounded = [near(value, kind, scale) for value, kind, scale in zip((a, b), kinds, scales, strict=True)]
        return (rounded[0] @ rounded[1].T) * (scales[0] * (scales[1].T if by_rows else scales[1]))

    y = product(x, w, (e4m3, e4m3), (0, 1))
    dx = product(dy, w.T.contiguous(), (e5m2, e4m3), (2, 1))
    return y, dx, product(dy.T.contiguous(), x.T.contiguous(), (e5m2, e4m3), (2, 0))


def values(seed: int = 0, rows: int = 32, k: int = 48, n: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((rows, k), (n, k), (rows, n)))
    return x * torch.linspace(0.1, 9.0, rows)[:, None], 0.1 * w, 1e-4 * dy


@pytest.mark.parametrize("form", ["tensor", "row", "delayed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_gradients_equal_a_plain_reference(code: ModuleType, form: str, compiled: bool) -> None:
    x, w, dy = values()
    given = torch.tensor([9.0 / 448, 0.3 / 448, 2e-4 / 57344]) if form == "delayed" else None
    state = torch.zeros(4, 3) if given is not None else None
    if state is not None and given is not None:
        state[0] = given
    expected = plainly(x, w, dy, form == "row", given)
    function: Callable[..., Tensor] = code.fp8_linear
    function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    a, b = x.clone().view(2, 16, -1).requires_grad_(), w.clone().requires_grad_()
    y = function(a, b, state, form == "row")
    y.backward(dy.view(2, 16, -1))
    assert a.grad is not None and b.grad is not None
    for have, want in zip((y.detach(), a.grad, b.grad), expected, strict=True):
        torch.testing.assert_close(have.reshape(want.shape), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    if state is not None:
        assert torch.equal(state[1], torch.stack([x.abs().amax(), w.abs().amax(), dy.abs().amax()]))
        assert torch.equal(state[0], given) and not state[2:].any()
    reference = Fp8Linear(form == "row", form == "delayed").reference
    again = reference(*(v for v in (x, w, state) if v is not None))
    torch.testing.assert_close(again, expected[0], rtol=1e-6, atol=1e-6)


def has_product(by_rows: bool) -> bool:
    """Whether this build of Torch multiplies 8-bit floats on a CPU, by a call with operands that are surely valid."""
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = (torch.ones(16, 1), torch.ones(1, 16)) if by_rows else (torch.ones(()), torch.ones(()))
    try:
        torch._scaled_mm(ones, ones.t(), *scales, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("n", [16, 21])
@pytest.mark.parametrize("by_rows", [False, True])
def test_the_call_of_the_library_equals_the_emulation(code: ModuleType, by_rows: bool, n: int) -> None:
    """A CPU's `_scaled_mm` has the layouts of a GPU's. 21 is padded."""
    x, w, _ = values(n=n, k=48 if n == 16 else 40)
    scales = [code.scale_of(value, code.E4M3, by_rows) for value in (x, w)]
    codes = [code.rounded(value, scale, code.E4M3) for value, scale in zip((x, w), scales, strict=True)]
    dtype = torch.bfloat16
    if not has_product(by_rows):
        pytest.skip("this Torch has no such product on a CPU")
    have = code.library_product(*codes, *scales, dtype)
    want = code.multiplied(*codes, *scales, torch.float32)
    assert have.shape == want.shape and have.dtype == dtype
    torch.testing.assert_close(have.float(), want, rtol=2**-7, atol=1e-3 * float(want.abs().max()))


def test_zeros_stay_zeros_and_large_values_become_the_largest(code: ModuleType) -> None:
    x, w = torch.zeros(16, 16), torch.randn(16, 16)
    assert not code.fp8_linear(x, w).any() and not code.fp8_linear(x, w, None, True).any()
    state = torch.ones(3, 3)
    y = code.fp8_linear(torch.full((16, 16), 1e6), torch.eye(16), state)
    assert torch.equal(y, torch.full((16, 16), 448.0))


def test_only_training_has_8_bits(loaded: Loaded) -> None:
    where = {
        graph.name: sorted(node.name for node in graph.nodes if isinstance(node.op, Fp8Linear))
        for graph in loaded.programs.graphs
    }
    layers = ["attention.k", "attention.out", "attention.q", "attention.v", "mlp.down", "mlp.up"]
    assert {name: nodes for name, nodes in where.items() if nodes} == {
        "block.forward_fp8": layers,
        "train": ["head.logits"],
    }
    assert [name for name, _ in loaded.programs.buffers] == [
        f"blocks.{i}.mlp.{name}_fp8" for name in ("up", "down") for i in (0, 1)
    ]
    plain = instantiate(small_spec("fuse=[]"), "cpu", loaded.directory.parent / "plain")
    with torch.no_grad():
        for name, parameter in plain.model.named_parameters():
            parameter.copy_(loaded.model.get_parameter(name))
    ids = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(2))
    batch: Any = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        assert torch.equal(plain.model.score(*batch), loaded.model.score(*batch))  # type: ignore[operator]
        assert not torch.equal(plain.model(*batch), loaded.model(*batch))


@pytest.mark.parametrize(
    ("rule", "causal"), [("scale: row", True), ("scaling: delayed", True), ("scale: tensor", False)]
)
def test_which_scales_are_causal_in_training(tmp_path: Path, rule: str, causal: bool) -> None:
    """The scale of a whole tensor follows from later tokens too, which is why scores have no 8-bit products."""
    loaded = instantiate(small_spec(f'train.precision.fp8=[{{match: "*.mlp.up", {rule}}}]', "fuse=[]"), "cpu", tmp_path)
    weights = random_weights(loaded.spec)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            parameter.copy_(weights[name])
        block: Any = loaded.model.get_submodule("blocks.0")
        x = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(5))
        later = x.clone()
        later[:, 20:] = torch.linspace(-40, 30, 32)
        h = [torch.nn.functional.rms_norm(v, (32,)) * torch.linspace(1, 3, 32)[:, None] for v in (x, later)]
        code = import_file(loaded.directory, "fp8_linear")
        state = [block.mlp.up_fp8] if "delayed" in rule else []
        first, second = (
            code.fp8_linear(v, block.mlp.up, *state, **({"by_rows": True} if "row" in rule else {})) for v in h
        )
    assert torch.equal(first[:, :20], second[:, :20]) is causal
    assert not torch.equal(first[:, 20:], second[:, 20:])


def test_a_delayed_scale_is_the_smallest_power_of_two_that_fits() -> None:
    most = torch.tensor([448.0])
    for exponent in (-60, -9, -1, 0, 1, 30):
        exact = most * 2.0**exponent
        above, below = torch.nextafter(exact, exact * 2), torch.nextafter(exact, exact / 2)
        assert delayed_scale(exact, most) == 2.0**exponent == delayed_scale(below, most)
        assert delayed_scale(above, most) in (2.0**exponent, 2.0 ** (exponent + 1))  # the quotient may round to a power
        assert delayed_scale(above * (1 + 2**-20), most) == 2.0 ** (exponent + 1)
    assert delayed_scale(torch.zeros(1), most) == 1 == delayed_scale(torch.tensor([1e-45]), most)
    assert delayed_scale(torch.tensor([1e-41]), most).log2() == -126  # the reciprocal is finite


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((2, 2), -3.0))
        self.register_buffer("up_fp8", torch.empty(2 + 4, 3))


def test_delayed_scales_follow_a_plain_loop_over_50_steps() -> None:
    model, rows = Scaled(), 64
    scales = Fp8Scales(model, rows, World.alone(), 8.0)
    buffer: Tensor = model.get_buffer("up_fp8")
    history = [[16.0, 3.0, 16.0 / rows]] * 4
    generator = torch.Generator().manual_seed(1)
    factor = 8.0
    for step in range(50):
        largest = [max(column) for column in zip(*history, strict=True)]
        wanted = [largest[0] / 448, largest[1] / 448, largest[2] * factor / 57344]
        assert buffer[0].tolist() == [2.0 ** math.ceil(math.log2(scale)) for scale in wanted]
        assert not buffer[1].any()
        seen = (torch.rand(3, generator=generator) * torch.tensor([9.0, 1.0, 0.01 * factor])).tolist()
        if step % 11 == 5:
            seen[2] = float("inf") if step % 2 else float("nan")  # the step overflowed
        if step == 30:
            seen[0] = 0.0
        buffer[1] = torch.tensor(seen)
        new = [seen[0], seen[1], seen[2] / factor]
        new = [value if abs(value) < float("inf") else largest[i] for i, value in enumerate(new)]
        factor = 4.0 if step % 7 == 0 else 8.0
        scales.update(factor)
        history = [*history[1:], new]
    other = Scaled()
    restored = Fp8Scales(other, rows, World.alone())
    restored.restore(scales.state(), factor)
    assert torch.equal(other.get_buffer("up_fp8"), buffer)


def test_a_model_without_delayed_scales_has_no_state() -> None:
    scales = Fp8Scales(Toy(), 8, World.alone())
    scales.update(1.0)
    assert scales.state() == {}


def run(folder: Path, name: str, steps: int | None = None) -> Path:
    spec = small_spec(*FP8, "train.steps=6")
    data = str(write_text(folder / "data")) if not (folder / "data").exists() else str(folder / "data")
    options = TrainOptions(spec, "cpu", data, folder / name, resume="auto", stop_after_steps=steps, cache=folder / "c")
    return train(options, lambda line: None).run


def end(folder: Path) -> tuple[list[float], checkpoint.Snapshot]:
    newest = checkpoint.latest(folder / "checkpoints", lambda text: None)
    assert newest is not None
    records = read_log(folder / "log.jsonl")
    return [record["loss"] for record in records if record["event"] == "step"], checkpoint.load(newest)


def test_a_resumed_run_is_the_whole_run(tmp_path: Path) -> None:
    losses, whole = end(run(tmp_path, "whole"))
    for steps in (2, 5, 6):
        run(tmp_path, "parts", steps)
    again, parts = end(tmp_path / "parts")
    assert again == losses and len(losses) == 6
    for group in ("weights", "optimizer"):
        first, second = getattr(whole, group), getattr(parts, group)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    kept = whole.optimizer["fp8.largest/blocks.1.mlp.down"]
    assert kept.shape == (3, 3) and bool((kept > 0).all()) and len(kept[:, 0].unique()) == 3


def test_two_ranks_are_as_one(tmp_path: Path) -> None:
    """Delayed scales are maxima over all ranks. A code that another order of sums changes is another by 6 to 12 %."""
    write_text(tmp_path / "data")
    rules = '[{match: "blocks.*.mlp.*", scaling: delayed, history: 3}]'
    sets = ("targets=[cpu]", "model.dim=32", "model.context=32", "model.blocks.count=2", "train.steps=4", "fuse=[]")
    sets += ("train.micro_batch=2", "train.tokens_per_step=256", "train.schedule={}", "train.validate_tokens=64")
    words = [word for text in (*sets, f"train.precision.fp8={rules}") for word in ("--set", text)]
    for name, gpus in (("one", "1"), ("two", "2")):
        command = ["specc", "train", str(SPEC), "--data", str(tmp_path / "data"), "--run", str(tmp_path / name), *words]
        command += ["--target", "cpu", "--gpus", gpus]
        done = subprocess.run(command, env=shell_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (losses, one), (others, two) = end(tmp_path / "one"), end(tmp_path / "two")
    assert others == pytest.approx(losses, rel=1e-5)
    slots = [name for name in one.optimizer if name.startswith("fp8.largest/")]
    assert len(slots) == 4
    for name in slots:
        torch.testing.assert_close(one.optimizer[name], two.optimizer[name], rtol=0.02, atol=0)


FUSED = f"train.precision.fp8={RULES}", 'fuse=[{"blocks.*.mlp": [up, act, down]}]'


def same_steps(folder: Path, plain: Sequence[str], fused: Sequence[str]) -> tuple[Loaded, dict[str, Tensor]]:
    """Compares two steps of a fused model with those of a plain one: loss, gradients and magnitudes. Returns the fused
    model and the magnitudes."""
    results = []
    ids = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(2))
    for name, sets in (("plain", plain), ("fused", fused)):
        loaded = with_weights(sets, folder / name)
        scales = Fp8Scales(loaded.model, 64, World.alone())
        for _ in range(2):  # the second step has scales that fit
            loaded.model.zero_grad()
            loss = loaded.model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            seen = {path: buffer[1].clone() for path, buffer in loaded.model.named_buffers() if path.endswith("_fp8")}
            scales.update(1.0)
        results.append((loss.detach(), {path: p.grad for path, p in loaded.model.named_parameters()}, seen))
    (loss, gradients, magnitudes), (fused_loss, fused_gradients, fused_magnitudes) = results
    torch.testing.assert_close(fused_loss, loss, rtol=1e-4, atol=0)
    for path, want in gradients.items():
        assert want is not None
        error = (fused_gradients[path] - want).norm() / want.norm()
        assert error < 0.02, f"{path} is off by {error}"  # a code next to a boundary may be its neighbor
    assert magnitudes.keys() == fused_magnitudes.keys()
    for path, largest in magnitudes.items():
        assert largest.all()
        torch.testing.assert_close(fused_magnitudes[path], largest, rtol=1e-2, atol=0)
    return loaded, magnitudes


def test_a_fused_group_writes_codes_and_not_the_activation(tmp_path: Path) -> None:
    """The products, gradients and magnitudes are those of the unfused layers; only codes and slopes are saved."""
    loaded, magnitudes = same_steps(tmp_path, FP8, FUSED)
    assert len(magnitudes) == 4
    group = next(group for group in loaded.programs.groups if "up_fp8" in dict(group.forward.inputs))
    saved = {name: type.dtype for name, type in group.backward.inputs if type.shape[:2] == ("B", "T") and name != "d"}
    assert saved == {"down_x_codes": "e4m3", "slope": "f32", "up_x_codes": "e4m3"}
    kernels = {node.name: [type.dtype for type in node.types] for node in (*group.forward.nodes, *group.backward.nodes)}
    assert kernels["mlp.up"] == ["e4m3", "f32"] and kernels["mlp.down.dgrad"] == ["e5m2"]
    rounded = [node.name for node in (*group.forward.nodes, *group.backward.nodes) if isinstance(node.op, Fp8Codes)]
    assert rounded == ["mlp.up.x_codes", "mlp.up.codes", "mlp.down.codes", "mlp.down.dcodes"]


@pytest.mark.parametrize("vocab", [257, 264])
def test_the_fused_loss_reads_logits_of_8_bit_products(tmp_path: Path, vocab: int) -> None:
    """A vocabulary that is not aligned is padded before its weight is rounded."""
    sets = "train.precision.fp8=[{match: head.logits, scaling: delayed}]", f"model.vocab={vocab}"
    group = "fuse=[{head: [logits, softcap, loss]}]"
    loaded, magnitudes = same_steps(tmp_path, (*sets, "fuse=[]"), (*sets, group))
    assert [*magnitudes] == ["embed.token_fp8"]
    head = next(group for group in loaded.programs.groups if "token_fp8" in dict(group.forward.inputs))
    assert [node.op.name for node in head.forward.nodes if "pad" in node.name] == (["pad_rows"] if vocab == 257 else [])
    assert {node.op.name for node in head.forward.nodes} >= {"fp8_codes", "fp8_product", "softmax_loss"}


def test_a_fused_group_compiles_to_one_graph(tmp_path: Path) -> None:
    loaded = with_weights(FUSED, tmp_path)
    Fp8Scales(loaded.model, 64, World.alone())
    ids = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(2))
    results = []
    before = {name: buffer.clone() for name, buffer in loaded.model.named_buffers()}
    for function in (loaded.model, torch.compile(loaded.model, fullgraph=True, backend="aot_eager")):
        for name, buffer in loaded.model.named_buffers():
            buffer.copy_(before[name])
        loaded.model.zero_grad()
        loss = function(ids[:, :-1], ids[:, 1:])
        loss.backward()
        states = {name: buffer.clone() for name, buffer in loaded.model.named_buffers() if name.endswith("_fp8")}
        results.append((loss.detach(), {name: p.grad for name, p in loaded.model.named_parameters()}, states))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_group_refuses_scales_that_are_known_too_late() -> None:
    for words, reason in (("scale: row", "sum over rows"), ("scaling: current", "known only after the whole tensor")):
        sets = f'train.precision.fp8=[{{match: "blocks.*.mlp.*", {words}}}]', FUSED[1]
        with pytest.raises(LoweringError, match=reason):
            pipeline.run(small_spec(*sets), "cpu")


DELAYED = 'train.precision.fp8=[{match: "{blocks.*.mlp.*,head.logits}", scaling: delayed}]'


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sets",
    [FP8, (DELAYED, 'fuse=[{"blocks.*.mlp": [up, act, down]}, {head: [logits, softcap, loss]}]')],
    ids=["rows, delayed and current", "fused"],
)
def test_compiled_steps_on_a_gpu_are_near_those_of_the_compute_dtype(sets: Sequence[str], tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm90 has tensor cores for 8-bit floats")
    ids = torch.randint(257, (4, 65), generator=torch.Generator().manual_seed(2)).cuda()
    results = []
    for name, chosen in (("plain", ("fuse=[]",)), ("fp8", sets)):
        torch.compiler.reset()
        spec = small_spec(*chosen, "targets=[sm90]", "model.dim=64")
        loaded = instantiate(spec, "sm90", tmp_path / name)
        initialize(loaded, 1)
        model = loaded.model.cuda()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1 and not weight.any():  # outputs that begin at 0 would hide wrong values
                    weight.normal_(std=0.1, generator=torch.Generator("cuda").manual_seed(3))
        scales = Fp8Scales(model, 4 * 64, World.alone().on(torch.device("cuda")))
        function = torch.compile(model, fullgraph=True)
        for _ in range(2):  # the second step has scales that fit
            model.zero_grad()
            loss = function(ids[:, :-1], ids[:, 1:])
            loss.backward()
            scales.update(1.0)
        results.append((loss.item(), {path: p.grad for path, p in model.named_parameters()}))
    (loss, gradients), (rounded_loss, rounded_gradients) = results
    assert abs(rounded_loss - loss) < 0.02 * loss
    for path, want in gradients.items():
        assert want is not None
        error = (rounded_gradients[path] - want).norm() / want.norm()
        assert error < 0.3, f"{path} is off by {error}"
