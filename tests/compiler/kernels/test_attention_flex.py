"""FlexAttention as a kernel of attention with a score and a mask: what it takes and writes, and its values."""

from dataclasses import replace
from pathlib import Path

import pytest
from kernel_sites import check_clean, imported, library_outputs, written
from scored_sites import CASES, Attention, exact, scored_inputs
from torch import Tensor

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.kernels.attention.flex import FLEX, FLEX_GRAD
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.targets import TARGETS
from specc.runtime.tune.candidates import candidates
from specc.runtime.verify.judge import PEAK, Judge, inputs_of

SHAPE = (4, 2, 16)
ALL = {
    **CASES,
    "plain": Attention(sinks=True),
    "wide table": Attention("s + p[i % 64, j % 64]", tables={"p": (64, 64)}),
}
LENGTHS = (150,)
COMPUTED = (
    "window",
    "documents",
    "nothing seen at first",
    "first keys",
    "buckets",
    "per head",
    "one table twice",
    "plain",
)


def kernel_of(site: Site) -> Kernel:
    return FLEX_GRAD if site.node.op.name.endswith("_grad") else FLEX


def test_every_kind_renders_as_clean_python(tmp_path: Path) -> None:
    for i, attention in enumerate(ALL.values()):
        for backward in (False, True):
            site = attention.site(SHAPE, backward)
            written(kernel_of(site), site, tmp_path / f"site_{i}_{backward}")
    check_clean(tmp_path, 200)  # names of expressions may be long


def chosen(site: Site) -> str:
    """The kernel that is chosen without a measurement."""
    every = catalog(kernels, Kernel).values()
    known = [kernel for kernel in every if isinstance(site.node.op, kernel.computes)]
    accepting = [kernel for kernel in known if not missing(kernel, site.target) and not kernel.rejects(site)]
    return min(accepting, key=lambda kernel: (kernel.rank(site), kernel.name)).name


def test_it_is_a_candidate_everywhere_and_chosen_only_where_no_other_kernel_accepts() -> None:
    for target in (name for name, row in TARGETS.items() if "mma" in row.features):
        for backward in (False, True):
            site = CASES["window"].site((4, 2, 64), backward, target=target)
            names = {candidate.kernel.name for candidate in candidates(site, "specs/x.yaml")}
            assert kernel_of(site).name in names and chosen(site) == f"scored_attention{'_grad' * backward}"
    assert chosen(ALL["wide table"].site((4, 2, 64), True)) == "flex_attention_grad"


def test_refusals_say_why() -> None:
    site = CASES["window"].site((4, 2, 8))
    assert FLEX.rejects(site) == "takes heads of at least 16 channels; these have 8"
    assert FLEX.rejects(CASES["window"].site(SHAPE, dtype="f32")) == "computes in bf16 or f16, not in f32"
    twice = CASES["one table twice"]
    assert FLEX.rejects(twice.site(SHAPE)) is None
    words = "differentiates one read of each table; the score reads p at several places"
    assert FLEX_GRAD.rejects(twice.site(SHAPE, True)) == words
    assert missing(FLEX, replace(site, target=TARGETS["cpu"]).target) is not None


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool, int], list[Tensor]]:
    """The outputs of each case and length."""
    folder = tmp_path_factory.mktemp("flex")
    runs, keys = [], []
    for i, name in enumerate(COMPUTED):
        for backward in (False, True):
            site = ALL[name].site(SHAPE, backward)
            (path,) = written(kernel_of(site), site, folder / f"flex_{i}_{backward}")
            for t in LENGTHS:
                runs.append((f"{path.parent.name}.{path.stem}", symbol(site)[0], scored_inputs(site, 2, t, t)))
                keys.append((name, backward, t))
    return dict(zip(keys, library_outputs(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_it_gives_the_reference(name: str, backward: bool, computed: dict[tuple[str, bool, int], list[Tensor]]) -> None:
    site = ALL[name].site(SHAPE, backward)
    for t in LENGTHS:
        results, inputs = computed[name, backward, t], scored_inputs(site, 2, t, t)
        for label, type, got, want in zip(
            site.node.op.output_labels, site.node.types, results, exact(site, inputs), strict=True
        ):
            assert str(got.dtype).endswith({"bf16": "bfloat16", "f32": "float32"}[type.dtype]) and got.is_contiguous()
            error, scale = (got.double() - want).norm().item(), want.norm().item()
            slack = 2e-2 * want.numel() ** 0.5 * (scale < 1e-1)
            most = 5e-2 if label[1:] in ALL[name].tables else 1e-2  # of a table, the sum of y in 16 bits over all pairs
            assert error <= most * scale + slack, f"{label} of {t} tokens is off by {error:.3g} of {scale:.3g}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window", "documents", "plain", "per head"])
def test_gradients_of_rows_that_torch_would_pad(name: str, tmp_path: Path) -> None:
    """Torch pads rows of more than 1,024 numbers to a multiple of 128 bytes; FlexAttention would read other numbers."""
    site = ALL[name].site(SHAPE, True)
    op = getattr(imported(FLEX_GRAD, site, tmp_path / f"flex_padded_{name.split()[0]}"), symbol(site)[0])
    judge = Judge.of(site, inputs_of(site, {"B": 2, "T": 1057, "S": 1057}, "cuda"))
    for label, error in zip(site.node.op.output_labels, judge.errors(judge.call(op)), strict=True):
        assert error.peak <= PEAK, f"{label} {error.words}"
