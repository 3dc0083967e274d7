"""Adaptation on a GPU: compiled, in bf16, by the plan's kernels; near what the CPU finds in f32."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapt_scene import ADAMW, CAUSAL, SLOT, TTT, Nats, adapted, counted, plain
from run_samples import SPEC, make_run, write_text

from specc.compiler.spec.check import load
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.eval.text import adapting
from specc.runtime.open_model import OpenedModel, open_model
from specc.runtime.storage.run_directory import Run

pytestmark = pytest.mark.gpu
STRIDE, WINDOW = 64, 256


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("adapt_gpu")
    spec = load(SPEC, ("model.blocks.count=2", "eval={batch: 8}"))[0]
    return make_run(folder / "run", spec, str(write_text(folder / "data")))


def opened_on(run: Run, device: str) -> OpenedModel:
    return open_model(
        run.directory,
        "cpu" if device == "cpu" else None,
        device,
        prepared=partial(adapting, options=EvaluateOptions(adapt="slot")),
    )


def text(folder: Path, changed: int | None = None) -> str:
    """2,500 bytes; with `changed`, others from that token position on."""
    folder.mkdir()
    chooser = random.Random(1)
    data = bytes(chooser.choices(b"the model of a tile", k=2500))
    if changed is not None:
        data = data[: changed - 1] + bytes(byte ^ 1 for byte in data[changed - 1 :])
    (folder / "train.txt").write_bytes(b"not read")
    (folder / "val.txt").write_bytes(data)
    return str(folder)


def nats(model: OpenedModel, how: dict[str, Any] | None, where: dict[str, Any]) -> Nats:
    return counted(lambda: plain(model, **where) if how is None else adapted(model, how, **where))


def test_it_is_near_what_the_cpu_finds(run: Run, tmp_path: Path) -> None:
    where = {"data": text(tmp_path / "text"), "cache": tmp_path, "stride": STRIDE}
    gpu, cpu = (opened_on(run, device) for device in ("cuda", "cpu"))
    gain = []
    for how in (None, SLOT, CAUSAL, {**TTT, "chunk": 512}, {**ADAMW, "chunk": 512}):
        on_gpu, on_cpu = (nats(model, how, where) for model in (gpu, cpu))
        gain.append((on_gpu.mean(), on_cpu.mean()))
        assert on_gpu.mean() == pytest.approx(on_cpu.mean(), abs=0.02), how
    for result, want in gain[1:]:  # what each method changes is the same on both
        assert result - gain[0][0] == pytest.approx(want - gain[0][1], rel=0.2, abs=2e-3)


@pytest.mark.parametrize("kind", ["plain", "slot", "slot_causal"])
def test_what_comes_later_moves_nothing_before_it_where_that_is_promised(run: Run, kind: str, tmp_path: Path) -> None:
    model, how = opened_on(run, "cuda"), {"slot": SLOT, "slot_causal": CAUSAL}.get(kind)
    texts = [text(tmp_path / str(at), at) for at in (None, 900)]  # type: ignore[arg-type]

    def where(data: str) -> dict[str, Any]:
        return {"data": data, "cache": tmp_path, "stride": STRIDE}

    before, after, again = (nats(model, how, where(data)) for data in (*texts, texts[0]))
    # not to the last bit: compiled again for another shape, it sums in the order that Inductor then times as fastest
    repeat, earlier, later = (abs(before - again), *np.split(abs(before - after), [899]))
    assert repeat.max() < 0.01 < later.max()
    assert (earlier.max() < 0.01) == (kind != "slot")
