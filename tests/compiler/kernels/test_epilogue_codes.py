"""8-bit codes from the epilogue of a product: those of rounding the result afterwards, and its largest magnitude."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from epilogue_sites import FORMS, STATE, codes_site
from gpus import gpu_target, skip_without_e4m3
from kernel_sites import compiled, imported, interpret_calls
from torch import Tensor

from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.kernels.gemm.torch import EPILOGUE_PRODUCT
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Site, refusal
from specc.compiler.programs import reference
from specc.compiler.targets import TARGETS
from specc.runtime.verify.judge import Judge

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TORCH |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MOST = {"e4m3": 448.0, "e5m2": 57344.0}


def inputs_of(site: Site, m: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(m)
    values = []
    for type in site.inputs:
        if type == STATE:  # the last is that of the codes
            last = len(values) == len(site.inputs) - 1
            state = torch.zeros(5, 3)
            state[0] = torch.tensor([2.0**-7, 7.0, 2.0**-15] if last else [1.0, 0.5, 0.02])
            values.append(state)
            continue
        value = torch.randn([dim if isinstance(dim, int) else m for dim in type.shape], generator=generator)
        factor = (
            (site.inputs[0].width ** -0.5 if type.dtype in ("f16", "bf16", "f32") else 8.0) if len(values) == 1 else 1.0
        )
        values.append((value * factor).to(TORCH[type.dtype]))
    return values


def rounded(value: Tensor, scale: Tensor, format: str) -> Tensor:
    return (value.float() / scale).clamp(-MOST[format], MOST[format]).to(TORCH[format])


def check(site: Site, have: list[Tensor], state: Tensor, given: list[Tensor], both: bool) -> None:
    """Codes are those of the value, which is near the reference; the state has the largest magnitude."""
    format, factor = site.node.types[-1 if both else 0].dtype, FORMS_OF[site.node.types[-1 if both else 0].dtype]
    wide = [value.float().double() if value.is_floating_point() else value for value in given]
    plain = replace(site.node.epilogue, codes=())
    wanted = reference.node_value(replace(site.node, epilogue=plain), wide)
    low = 2**-10 if TORCH["f16"] in (have[1].dtype,) else 2**-7
    torch.testing.assert_close(have[1].double(), wanted[1], rtol=low, atol=low)
    if both:
        torch.testing.assert_close(have[0].double(), wanted[0], rtol=low, atol=low)
        codes = rounded(have[0], given[-1][0, factor], format)
        assert torch.equal(have[2].view(torch.uint8), codes.view(torch.uint8))
        assert state[1, factor] == have[0].abs().max()
    else:
        torch.testing.assert_close(state[1, factor].double(), wanted[0].abs().max(), rtol=low, atol=low)
        step = {"e4m3": 2**-3, "e5m2": 2**-2}[format]
        far = have[0].double() * given[-1][0, factor] - wanted[0].clamp(
            *(s * MOST[format] * given[-1][0, factor].item() for s in (-1, 1))
        )
        assert (far.abs() <= step * wanted[0].abs() + 1e-2).all()
    assert torch.equal(state[[0, 2, 3, 4]], given[-1][[0, 2, 3, 4]])
    others = [column for column in range(3) if column != factor]
    assert not state[1, others].any()


FORMS_OF = {"e4m3": 0, "e5m2": 2}
SHAPES = ((272, 80), (128, 64))
CASES = [(form, both, target, *shape) for form in FORMS for both in (True, False) for target, shape in (
    ("sm90", SHAPES[0]), ("sm90", SHAPES[1]), ("sm89", SHAPES[0]))]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[Tensor]]:
    folder = tmp_path_factory.mktemp("codes_kernels")
    calls: list[Any] = []
    keys = []
    for i, case in enumerate(CASES):
        site = codes_site(*case)
        module = imported(LINEAR_TRITON, site, folder / f"codes_{i}").__name__
        for m in (1, 130):
            outputs = [torch.full((m, case[3]), torch.nan).to(TORCH[type.dtype]) for type in site.node.types]
            calls.append((str(folder), module, {}, "launch", [*inputs_of(site, m), *outputs]))
            keys.append((case, m))
    return dict(zip(keys, interpret_calls(folder, calls), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_interpreted_kernels_write_the_codes_of_the_value(case: tuple, results: dict[tuple, list[Tensor]]) -> None:
    site = codes_site(*case)
    for m in (1, 130):
        after = results[case, m]
        count = len(site.inputs)
        check(site, after[count:], after[count - 1], inputs_of(site, m), case[1])
        if not case[1]:  # alone, the codes are the same
            other = results[(case[0], True, *case[2:]), m]
            assert torch.equal(after[count].view(torch.uint8), other[-1].view(torch.uint8))


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_plain_torch_on_the_cpu_writes_the_codes_of_the_value(form: str, both: bool, tmp_path: Path) -> None:
    site = codes_site(form, both, "cpu", 48, 32, "f32")
    module = imported(EPILOGUE_PRODUCT, site, tmp_path / f"plain_{form}_{both}")
    given = inputs_of(site, 51)
    inputs = [value.clone() for value in given]
    have = getattr(module, EPILOGUE_PRODUCT.render(site).function)(*inputs)
    check(site, list(have), inputs[-1], given, both)


@pytest.mark.parametrize("target", ["sm89", "sm90", "sm120"])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_compile_to_machine_code(form: str, target: str, tmp_path: Path) -> None:
    code = compiled(codes_site(form, False, target, 1792, 512, "bf16"), tmp_path / f"compiled_{target}_{form}")
    ptx = code.asm["ptx"]
    assert "atom" in ptx or "red." in ptx
    assert ("e4m3x2" if FORMS[form][2] == "e4m3" else "e5m2x2") in ptx
    if form in ("codes", "gradients") and target == "sm90":
        assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{FORMS[form][1][0]}.e4m3" in ptx
    assert code.metadata.shared <= TARGETS[target].shared_memory


def test_kernels_state_why_they_write_no_codes() -> None:
    site = codes_site("forward", False, "sm90", 1792, 512, "bf16")
    assert refusal(LINEAR_TRITON, site) is None
    reason = GEMM_EVT.rejects(site)
    assert reason is not None and "scales" in reason
    odd = refusal(LINEAR_TRITON, codes_site("forward", False, "sm90", 1800, 512, "bf16"))
    assert odd is not None and "1792 or 1808" in odd


@pytest.mark.gpu
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [272, 1792])
def test_kernels_on_a_gpu_write_the_codes_of_the_value(form: str, both: bool, n: int, tmp_path: Path) -> None:
    target = gpu_target()
    skip_without_e4m3(target)
    site = codes_site(form, both, target, n, 512, "bf16")
    module = imported(LINEAR_TRITON, site, tmp_path / f"gpu_codes_{form}_{both}_{n}")
    for m in (1, 130, 1009):
        given = inputs_of(site, m)
        inputs = [value.cuda() for value in given]
        have = getattr(module, LINEAR_TRITON.render(site).function)(*inputs)
        check(site, [value.cpu() for value in have], inputs[-1].cpu(), given, both)


@pytest.mark.parametrize("form", FORMS)
def test_the_judge_accepts_codes_and_rejects_those_of_another_scale(form: str, tmp_path: Path) -> None:
    site = codes_site(form, False, "cpu", 48, 32, "f32")
    module = imported(EPILOGUE_PRODUCT, site, tmp_path / f"judged_{form}")
    function = getattr(module, EPILOGUE_PRODUCT.render(site).function)
    inputs = inputs_of(site, 51)
    judge = Judge.of(site, inputs)
    assert all(errors.ok for errors in judge.errors(function(*(value.clone() for value in inputs))))
    inputs[-1][0] *= 1.2
    assert not judge.errors(function(*inputs))[0].ok


@pytest.mark.parametrize("form", ["forward", "backward"])
def test_verify_refuses_codes_of_another_rounding(form: str) -> None:
    """A few large values must not hide errors of the many small ones."""
    judge = Judge.of(site := codes_site(form, False, "cpu", 64, 32, "f32"), inputs_of(site, 64))
    codes, saved = (value.to(TORCH[type.dtype]) for value, type in zip(judge.exact, site.node.types, strict=True))
    assert all(error.ok for error in judge.errors((codes, saved)))
    bits = codes.view(torch.uint8)
    flips = torch.rand(bits.shape, generator=torch.Generator().manual_seed(0))
    for share, ok in ((0.05, True), (0.5, False)):  # half of the codes is off by one step if a kernel truncates
        lower = torch.where((flips < share) & (bits & 127 > 0), bits - 1, bits).view(codes.dtype)
        assert judge.errors((lower, saved))[0].ok == ok
    lost = codes.clone()
    lost.view(torch.uint8)[:, 5] = 0
    assert not judge.errors((lost, saved))[0].ok
