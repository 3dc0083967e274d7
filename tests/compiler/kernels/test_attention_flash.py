"""Attention with a score and a mask by flash-attn-4: what the kernels take and write, and what they compute with Torch
in place of flash-attn-4."""

from pathlib import Path

import pytest
from kernel_sites import check_clean, library_outputs, written
from scored_sites import CASES, Attention, exact, scored_inputs
from torch import Tensor

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.kernels.attention.flash_scored import FLASH_SCORED, FLASH_SCORED_GRAD
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.targets import TARGETS

SHAPE = (4, 2, 64)
ALL = {
    **CASES,
    "heads": Attention(mask="j <= i and (i - j < 64 or h > 1)"),
    "blocks of keys": Attention("s * (1 + h)", "j <= i and i // 128 == j // 128"),
    "far keys": Attention(mask="j <= i and i - j > 200"),
}
LENGTHS = (1, 129, 300)


def site_of(name: str, backward: bool, target: str = "sm90") -> Site:
    return ALL[name].site(ALL[name].hook_shape(SHAPE, backward), backward, target=target)


def kernel_of(site: Site) -> Kernel:
    return FLASH_SCORED_GRAD if site.node.op.name.endswith("_grad") else FLASH_SCORED


def test_every_kind_renders_as_clean_python(tmp_path: Path) -> None:
    for i, name in enumerate(ALL):
        for target in ("sm90", "sm100"):
            for backward in (False, True):
                site = site_of(name, backward, target)
                if kernel_of(site).rejects(site) is None:
                    written(kernel_of(site), site, tmp_path / f"site_{i}_{target}_{backward}")
    check_clean(tmp_path, 200)  # names of expressions may be long


def test_refusals_say_why() -> None:
    def reason(attention: Attention, backward: bool = False, shape: tuple[int, int, int] = SHAPE, **words: str) -> str:
        site = attention.site(shape, backward, **words)
        return missing(kernel_of(site), site.target) or kernel_of(site).rejects(site) or ""

    assert reason(CASES["buckets"]) == "" and reason(CASES["documents"], True) == ""
    assert reason(CASES["buckets"], True) == "returns no gradient of tables that a score reads; this score reads bias"
    misread = "passes a wrong i to the hooks of the gradient if query heads share keys (4.0.0b36)"
    assert reason(CASES["alibi"], True) == misread
    assert reason(CASES["alibi"], True, shape=(4, 4, 64)) == reason(CASES["alibi"]) == ""
    assert reason(Attention("s * (1 + h)"), True) == misread.replace("wrong i", "wrong h")
    assert reason(CASES["alibi"], dtype="f32") == "computes in bf16 or f16, not in f32"
    assert reason(CASES["distances"], shape=(4, 2, 32)).startswith("takes heads of a multiple of 64 channels")
    assert reason(CASES["alibi"], target="sm80") == "sm80 has no tma"
    hooks = "has hooks for scores and masks on H100, H200 and B200, and not on"
    assert reason(CASES["alibi"], target="sm120").startswith(hooks)


@pytest.mark.parametrize("backward", [False, True])
def test_it_is_never_chosen_by_rule(backward: bool) -> None:
    for target in (name for name, row in TARGETS.items() if row.arch):
        site = site_of("window", backward, target)
        accepting = [
            kernel
            for kernel in catalog(kernels, Kernel).values()
            if isinstance(site.node.op, kernel.computes)
            and not missing(kernel, site.target)
            and not kernel.rejects(site)
        ]
        best = min(accepting, key=lambda kernel: (kernel.rank(site), kernel.name))
        assert not best.package and (target not in ("sm90", "sm100") or kernel_of(site) in accepting)


def test_a_hook_has_its_numbers_in_its_text(tmp_path: Path) -> None:
    """flash-attn-4 tells hooks apart by their source text."""
    texts = []
    for cap in (20, 30):
        site = Attention(f"{cap} * tanh(s / {cap})").site(SHAPE)
        (path,) = written(FLASH_SCORED, site, tmp_path / f"cap_{cap}")
        texts.append(path.read_text().split("def score(")[1].split("@torch")[0])
    assert texts[0] != texts[1] and "20.0 * cute.math.tanh(0.05 * s, fastmath=True)" in texts[0]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool, int], list[Tensor]]:
    """The outputs of each case and length."""
    folder = tmp_path_factory.mktemp("flash_scored")
    runs, keys = [], []
    for i, name in enumerate(ALL):
        for backward in (False, True):
            site = site_of(name, backward)
            if kernel_of(site).rejects(site) is not None:
                continue
            (path,) = written(kernel_of(site), site, folder / f"flash_{i}_{backward}")
            for t in LENGTHS:
                runs.append((f"{path.parent.name}.{path.stem}", symbol(site)[0], scored_inputs(site, 2, t, t)))
                keys.append((name, backward, t))
    return dict(zip(keys, library_outputs(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_hooks_and_lists_of_blocks_give_the_reference(
    name: str, backward: bool, computed: dict[tuple[str, bool, int], list[Tensor]]
) -> None:
    site = site_of(name, backward)
    if backward and ALL[name].tables:
        assert kernel_of(site).rejects(site) is not None
        return
    for t in LENGTHS:
        result, inputs = computed[name, backward, t], scored_inputs(site, 2, t, t)
        for label, got, want in zip(site.node.op.output_labels, result, exact(site, inputs), strict=True):
            error, scale = (got.double() - want).norm().item(), want.norm().item()
            most = 1e-2 if backward else 1e-5  # the gradient reads y in 16 bits
            slack = 1e-2 * want.numel() ** 0.5 * (scale < 1e-2)
            assert error <= most * scale + slack, f"{label} of {t} tokens is off by {error:.3g} of {scale:.3g}"
