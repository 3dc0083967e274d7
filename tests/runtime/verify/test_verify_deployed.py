"""`specc verify` of deployed programs: correct code passes, and each error fails the checks that it affects."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from int8_models import BLOCKS, LOOPS, LSTM, QUANT, WIDE, data_of
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.compiler.spec.spec import Spec
from specc.runtime.verify import deployed as checks
from specc.runtime.verify.deployed import verify_deployed


def text_spec() -> Spec:
    data = spec_data((ATTENTION, {**MLP, "hidden": 16}), fuse=())
    data["quant"] = {**QUANT, "rules": [{"match": "embed.token", "scheme": "none", "dtype": "f32"}]}
    return spec_of(data)


SPECS: dict[str, Any] = {
    "lstm": lambda: spec_of(data_of(LSTM)),
    "lstm of 16 bits": lambda: spec_of(data_of(LSTM, WIDE)),
    "lstms in loops": lambda: spec_of(data_of(LOOPS)),
    "blocks": lambda: spec_of(data_of(BLOCKS)),
    "text": text_spec,
}


@pytest.mark.parametrize("name", SPECS)
def test_sound_code_passes(name: str) -> None:
    results = list(verify_deployed(SPECS[name](), ("cpu",)))
    assert [check for check in results if not check.ok] == []
    names = [check.name for check in results]
    assert names[:3] == ["fx score, deployed", "score against float64, deployed", "cached equals uncached, deployed"]
    assert sum(name.startswith("kernel int8_linear") for name in names) > 1
    assert any(check.name.startswith("kernel int8_lstm_step") for check in results) is name.startswith("lstm")


@pytest.mark.parametrize(("model", "seed"), [(LSTM, 3), (BLOCKS, 3)], ids=["lstm", "blocks"])
def test_a_tie_in_one_sample_is_no_fault(model: Any, seed: int) -> None:
    """With this seed a value of one sample is within 1e-5 of the middle of two codes and rounds differently in f32."""
    results = list(verify_deployed(spec_of(data_of(model)), ("cpu",), seed))
    assert [check for check in results if not check.ok] == []


def test_tolerance() -> None:
    """Large errors of a few samples pass. Errors of all samples, larger errors and NaN do not, unless eager Torch in
    the dtype of the model has such errors too."""
    cost, wrong, exact = 5e-3, torch.full((16, 30), 3e-7), torch.zeros(16, 30)
    assert checks.near(wrong, cost, exact)
    for samples, share, sound in ((1, 1.2, True), (4, 0.6, True), (16, 0.15, False), (9, 0.15, False), (4, 1.5, False)):
        some = wrong.clone()
        some[:samples, 5:] += share * cost
        assert checks.near(some, cost, exact) is sound
        assert checks.near(some, cost, some)
        assert not checks.near(9 * some + 9 * cost, cost, some)
    wrong[3, 4] = float("nan")
    assert not checks.near(wrong, cost, exact)


def test_a_target_of_another_machine_is_traced() -> None:
    results = list(verify_deployed(spec_of(data_of(LSTM, targets=["sm86"])), ("sm86",)))
    assert results[0].ok is True and results[0].name == "fx score, deployed"
    assert torch.cuda.is_available() or [check.ok for check in results[1:]] == [None]


def test_a_model_that_deploys_what_it_trains_has_no_checks() -> None:
    quant = {"default": {"scheme": "none", "dtype": "f32"}}
    assert list(verify_deployed(spec_of(data_of(LSTM, quant)), ("cpu",))) == []


def broken(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> dict[str, bool | None]:
    """Returns the results by name after a change of one constant of the module, but not of its reference."""
    real = checks._values

    def values(spec: Spec, loaded: Any, weights: Any) -> Iterator[Any]:
        exact = checks.reference.run
        buffer = dict(loaded.model.named_buffers())[name]
        unchanged = buffer.clone()
        change(buffer)

        def run(programs: Any, program: str, given: Any, params: Any) -> Any:
            whole = (
                {**params, name: unchanged.double() if unchanged.is_floating_point() else unchanged}
                if name in params
                else params
            )
            return exact(programs, program, given, whole)

        with monkeypatch.context() as patch:
            patch.setattr(checks.reference, "run", run)
            yield from real(spec, loaded, weights)

    monkeypatch.setattr(checks, "_values", values)
    return {check.name: check.ok for check in verify_deployed(spec_of(data_of(LSTM)), ("cpu",))}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("head.logits_offset", lambda buffer: buffer.add_(1000)),
        ("decoder.lstm.hidden_scale", lambda buffer: buffer.copy_(buffer.roll(16) * 2)),
        ("decoder.lstm.hidden_codes", lambda buffer: buffer.copy_(buffer.T.reshape(buffer.shape))),
        ("encoder.lstm.back_input_scale", lambda buffer: buffer.mul_(1.5)),
    ],
)
def test_a_wrong_constant_is_found(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = broken(monkeypatch, name, change)
    assert result["score against float64, deployed"] is False and result["cached equals uncached, deployed"] is False


@pytest.mark.parametrize("kernel", ["int8_linear", "int8_lstm_step"])
def test_a_wrong_kernel_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.vars if hasattr(checks, "vars") else vars

    def spoiled(outputs: Any) -> Any:
        return tuple(map(spoiled, outputs)) if isinstance(outputs, tuple) else outputs * 1.01

    def wrong(module: Any) -> dict[str, Any]:
        functions = dict(real(module))
        for name, function in functions.items():
            if name.startswith(kernel) and callable(function):
                functions[name] = lambda *given, function=function: spoiled(function(*given))
        return functions

    monkeypatch.setattr(checks, "vars", wrong, raising=False)
    results = {check.name: check.ok for check in verify_deployed(spec_of(data_of(LSTM)), ("cpu",))}
    assert any(ok is False for name, ok in results.items() if name.startswith(f"kernel {kernel}"))
    assert all(ok for name, ok in results.items() if name.startswith("kernel ") and kernel not in name)
