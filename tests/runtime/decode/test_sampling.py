"""Draws: their distribution is the one that is asked for, and settings that no distribution has are refused."""

import inspect
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_sites import interpret_calls
from torch import Tensor

from specc.runtime.decode.sampling import Sampling, SamplingError
from specc.runtime.model.cuda_graph import captured


def reference(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """The definition, by plain lists: sort, cut, renormalize."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [1.0 if i == order[0] else 0.0 for i in range(len(logits))]
    order = order[:top_k]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    total, candidates, mass = sum(weights.values()), [], 0.0
    for i in order:
        candidates.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    whole = sum(weights[i] for i in candidates)
    return [weights[i] / whole if i in candidates else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 1.0), (0.7, 5, 1.0), (1.3, None, 0.8), (0.9, 12, 0.5), (2.0, 1, 1.0), (0.0, 3, 0.5),
     (1e-300, 4, 1.0), (1.0, 999, 0.999), (1.0, None, 1e-9)],
)  # fmt: skip
def test_probabilities_are_those_of_the_definition(temperature: float, top_k: int | None, top_p: float) -> None:
    for seed in range(20):
        logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
        logits[7] = logits[11]  # equals
        got = Sampling(temperature, top_k, top_p).probabilities(logits)
        expected = torch.tensor(reference(logits.tolist(), temperature, top_k, top_p), dtype=torch.float64)
        assert float((got - expected).abs().max()) < 1e-12
        assert float(got.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, top_k=4), Sampling(1.2, top_p=0.7), Sampling(1.0, 6, 0.9)]
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    chances = sampling.probabilities(logits)
    draws = 20_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(sampling.pick(logits.expand(draws, 12), uniform), minlength=12).double()
    possible = chances > 0
    assert float(counts[~possible].sum()) == 0
    chi_square = float(((counts - draws * chances)[possible].square() / (draws * chances[possible])).sum())
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # 4 standard deviations; the seed is fixed


def test_a_token_without_a_chance_is_never_drawn_at_either_end() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1.0 - 2**-53, 1.0], dtype=torch.float64)
    assert Sampling().pick(logits.expand(5, 5), uniform).tolist() == [1, 1, 3, 3, 3]


def test_temperature_zero_takes_the_first_of_equals() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    uniform = torch.linspace(0, 1, 20, dtype=torch.float64)
    assert set(Sampling(0.0).pick(logits.expand(20, 4), uniform).tolist()) == {1}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(0.5, 2, 0.9)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_give_no_token(value: float, sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, value, 1.0], [-math.inf] * 3, [0.0, 9.0, -math.inf]])
    assert sampling.pick(logits, torch.full((4,), 0.5, dtype=torch.float64)).tolist() == [1, -1, -1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be"),
        ({"temperature": float("nan")}, "temperature is nan; it must be"),
        ({"temperature": float("inf")}, "temperature is inf; it must be"),
        ({"top_k": 0}, "top-k is 0; it must be"),
        ({"top_p": 0.0}, "top-p is 0.0; it must be"),
        ({"top_p": 1.1}, "top-p is 1.1; it must be"),
        ({"top_p": float("nan")}, "top-p is nan; it must be"),
    ],
)
def test_settings_out_of_range_are_usage_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message) as caught:
        Sampling(**settings)
    assert caught.value.exit_code == 2


SETTINGS = (
    Sampling(0.0),
    Sampling(),
    Sampling(0.7, 5),
    Sampling(1.3, None, 0.8),
    Sampling(0.9, 12, 0.5),
    Sampling(2.0, 1),
    Sampling(1e-300, 4),
    Sampling(1.0, 999, 0.999),
    Sampling(1.0, None, 1e-9),
)


def hard_logits(vocabulary: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows with many equals, signed zeros, NaN, and logits of -inf. Beyond the vocabulary are large logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(7, vocabulary + 3, generator=generator) * 2).to(dtype)
    logits[1] = logits[1].round()
    logits[2, :3], logits[2, 1] = 0.0, -0.0
    logits[3, 0], logits[4, ::2] = math.nan, -math.inf
    logits[5] = torch.randint(-2, 3, (vocabulary + 3,), generator=generator).to(dtype)
    logits[6, 1] = math.inf
    logits[:6, vocabulary:] = 99.0
    return logits


def kernel_cases(device: str = "cpu", sizes: tuple[int, ...] = (5, 70, 300)) -> Iterator[tuple[Sampling, list[Any]]]:
    """Settings, and the arguments of the kernel."""
    for seed, (vocabulary, sampling) in enumerate(product(sizes, SETTINGS)):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        logits = hard_logits(vocabulary, dtype, seed)[:, :vocabulary]
        uniform = torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        outputs = [torch.full((7,), -9), torch.full((7, 12), -9)]
        tensors = [logits, uniform, torch.tensor([seed % 11, seed % 3]), *outputs]
        yield sampling, [tensor.to(device) for tensor in tensors]


def check_chosen(sampling: Sampling, arguments: list[Any]) -> None:
    logits, uniform, counters, following, tokens = arguments[:5]
    column, row = counters.tolist()
    wanted = sampling.pick(logits.float(), uniform[row])
    assert tokens[:, column + 1].tolist() == wanted.tolist(), (sampling, logits.shape)
    assert torch.equal(following, wanted.clamp(min=0))
    assert int((tokens != -9).sum()) == len(tokens)
    assert wanted.tolist()[3] == wanted.tolist()[6] == -1


@pytest.mark.interpret
def test_the_kernel_chooses_without_a_sort_what_the_sort_chooses(tmp_path: Path) -> None:
    cases = list(kernel_cases())
    settings = [(sampling.temperature, sampling.top_k, sampling.top_p) for sampling, _ in cases]
    module = "specc.runtime.decode.choose_token"
    calls = [
        # up to four programs share a row
        ("", module, {"BLOCK": 128, "RESIDENT": 64}, "choose_token", [*arguments, *each])
        for (_, arguments), each in zip(cases, settings, strict=True)
    ]
    for (sampling, _), arguments in zip(cases, interpret_calls(tmp_path, calls), strict=True):
        check_chosen(sampling, arguments)


def test_torch_chooses_into_given_tensors() -> None:
    for sampling, arguments in kernel_cases():
        sampling.choose(*arguments)
        check_chosen(sampling, arguments)


@pytest.mark.gpu
def test_the_kernel_chooses_on_a_gpu_what_the_sort_chooses() -> None:
    for sampling, arguments in kernel_cases("cuda", (5, 300, 9000, 50257)):
        sampling.choose(*arguments)
        check_chosen(sampling, arguments)
        logits, uniform = arguments[:2]
        assert torch.equal(sampling.sample(logits, uniform[0]), sampling.pick(logits.float(), uniform[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_programs_that_share_a_row_choose_the_largest_logit_in_each_replay(rows: int) -> None:
    logits = torch.empty(rows, 50257, device="cuda")
    counters, uniform = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(1, rows, device="cuda").double()
    following, tokens = torch.empty(rows, device="cuda").long(), torch.empty(rows, 2, device="cuda").long()
    graph, _ = captured(lambda: Sampling(0.0).choose(logits, uniform, counters, following, tokens))
    for seed in range(200):
        logits.copy_(torch.randn(logits.shape, device="cuda").mul_(4).round_())  # many equal logits
        logits[seed % rows, seed] = torch.nan
        tokens.fill_(-9)
        graph.replay()
        first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
        first[seed % rows] = -1
        assert torch.equal(tokens[:, 1], first), seed


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.7), Sampling(1.0, 50), Sampling(1.3, 40, 0.9)])
@pytest.mark.parametrize(("dtype", "arch"), [("fp32", 80), ("bf16", 90)])
def test_the_kernel_compiles_for_gpus(sampling: Sampling, dtype: str, arch: int) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specc.runtime.decode.choose_token import BLOCK, WARPS, choose_token_kernel

    pointers = (f"*{dtype}", "*fp64", "*i64", "*fp64", "*i64", "*i64", "*i64", "*i32")
    constants = {
        "TEMPERATURE": sampling.temperature,
        "TOP_K": sampling.top_k or 0,
        "TOP_P": sampling.top_p,
        "BLOCK": BLOCK,
        "PARTS": 1 if sampling.temperature else 16,
        "PDL": arch >= 90,
        "ROWS": 1,  # Triton compiles a number that is 1 as a constant
    }
    names = list(inspect.signature(choose_token_kernel.fn).parameters)
    types = {name: "constexpr" if name in constants else "i32" for name in names} | dict(
        zip(names, pointers, strict=False)
    )
    code = compile(
        ASTSource(choose_token_kernel, types, constants),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": WARPS},
    )
    assert ".local" not in code.asm["ptx"] and code.metadata.shared < 100_000
