"""Steps as CUDA graphs: which shapes are captured, and that replays give what the model gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_models import CHARS, LSTM, data_of, lines, quantized_model
from tiny_models import spec_of

from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.decode import step_graphs as steps
from specc.runtime.decode.lines import Translator, translator
from specc.runtime.decode.step_graphs import Eager, Graphed


class Replayed:
    """Stands for a CUDA graph: does the work again, into the results of the first time."""

    def __init__(self, work: Callable[[], Any], outputs: Any) -> None:
        self._work, self._outputs, self.times = work, outputs, 0

    def replay(self) -> None:
        self.times += 1
        for output, new in zip(flat(self._outputs), flat(self._work()), strict=True):
            output.copy_(new)


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for tensors in value.values() for t in tensors]


@pytest.fixture()
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    results: list[Replayed] = []

    def captured(work: Callable[[], Any], pool: Any = None) -> tuple[Replayed, Any]:
        outputs = work()
        results.append(Replayed(work, outputs))
        return results[-1], outputs

    monkeypatch.setattr(steps, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return results


def test_a_shape_of_sources_is_captured_when_it_comes_again(graphs: list[Replayed]) -> None:
    model: Any = quantized_model(spec_of(data_of(LSTM))).whole
    graphed, eager = Graphed(model), Eager(model)
    with torch.no_grad():
        for seed, (rows, captures) in enumerate(((8, 0), (5, 0), (8, 1), (8, 1), (5, 2), (8, 2))):
            source = lines(seed, rows)[0]
            result, wanted = graphed.encode(source), eager.encode(source)
            assert len(graphs) == captures
            assert all(torch.equal(a, b) for a, b in zip(flat(result), flat(wanted), strict=True))
    assert [graph.times for graph in graphs] == [3, 1]


def test_translations_are_those_of_the_model(graphs: list[Replayed]) -> None:
    models = quantized_model(spec_of(data_of(LSTM)))
    tokenizer, cpu = CharTokenizer(CHARS), torch.device("cpu")
    texts = ["(7-z)", "x*2", "(x-1)*(x-2)", "x", "9*s", "t-1", "(7-3*z)*(-5*z-9)"]
    wanted = translator(models.whole, models.spec, tokenizer, cpu, batch=2).translate(texts)
    graphed = Translator(Graphed(models.whole), tokenizer, models.spec.model.window, True, cpu, 2)  # type: ignore[arg-type]
    for _ in range(2):
        assert graphed.translate(texts) == wanted
    assert len(graphs) > 2


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("deployed", [False, True])
def test_replays_on_a_gpu_are_the_model(deployed: bool) -> None:
    major, minor = torch.cuda.get_device_capability()
    target = "sm90" if (major, minor) == (9, 0) else "sm86"
    models = quantized_model(spec_of(data_of(LSTM, targets=["cpu", target])), target=target)
    model: Any = models.whole if deployed else models.floats
    graphed, eager = Graphed(model), Eager(model)
    with torch.no_grad():
        for seed in range(4):
            source = lines(seed, 64)[0].cuda()
            result, wanted = graphed.encode(source), eager.encode(source)
            for a, b in zip(flat(result), flat(wanted), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            state, other = graphed.begin(result), eager.begin(wanted)
            ids = torch.ones(64, 1, dtype=torch.int64, device="cuda")
            for t in range(4):
                torch.testing.assert_close(
                    graphed.extend(ids, t, state), eager.extend(ids, t, other), rtol=1e-4, atol=1e-4
                )
