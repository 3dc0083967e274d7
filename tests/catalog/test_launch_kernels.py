"""What compute-sanitizer watches: what the script launches, and that a wrong kernel ends it with an error."""

import sys
from pathlib import Path

import launch_kernels
import pytest
import torch

from specc.compiler.build import compile_spec
from specc.runtime import judge as judging
from specc.runtime.load import instantiate

SPEC = Path(__file__).parents[2] / "specs/gpt_mini.yaml"


def test_modules_can_be_left_out() -> None:
    plan = compile_spec(SPEC, (), ("sm90",)).plans["sm90"]
    names = [choice.rendered.module for choice in launch_kernels.launched(plan, "")]
    left = [choice.rendered.module for choice in launch_kernels.launched(plan, "dgrad")]
    assert left == [name for name in names if "dgrad" not in name] and 0 < len(left) < len(names)
    with pytest.raises(SystemExit, match="no kernel is left to launch without '_'"):
        launch_kernels.launched(plan, "_")


def test_few_rows_and_many_are_launched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(judging, "multiprocessors", lambda device: 1)
    launch_kernels.main([str(SPEC), "cpu", "norm_rotary"])
    lines = capsys.readouterr().out.splitlines()
    names = {line.split(" ")[0].partition("__")[0] for line in lines}
    assert names == {"linear_leaky_relu2", "dgrad_mul", "softmax_loss_tanh", "softmax_nats_tanh"}
    assert len(lines) == 4 * (len(launch_kernels.ROWS) + 1) and "[3, 343, 128]" in lines[3]


def test_a_wrong_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*given: object, **words: object) -> object:
        loaded = instantiate(*given, **words)  # type: ignore[arg-type]
        module = vars(sys.modules[type(loaded.model).__module__])
        right = module["dgrad_mul"]
        module["dgrad_mul"] = lambda *inputs: torch.full_like(right(*inputs), torch.nan)
        return loaded

    monkeypatch.setattr(launch_kernels, "instantiate", spoiled)
    with pytest.raises(AssertionError):
        launch_kernels.main([str(SPEC), "cpu", "linear"])
    with pytest.raises(SystemExit, match="compute-sanitizer"):
        launch_kernels.main([str(SPEC)])
