"""Rows that grow over a run: windows cut into shorter ones, of the same tokens in the same order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import small_spec, write_text
from test_golf_phases import saved, trained
from toy import feed_of, train_spec

from specc.compiler.programs.programs import Phase
from specc.compiler.spec.spec import Spec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.distributed.world import World
from specc.runtime.model.load import initialize, instantiate
from specc.runtime.train.segments import LAST, RunSegment, run_segments, segment_at
from specc.runtime.train.trainer import TrainableModel, Trainer

GROWING = ("train.steps=6", "train.context={at: [[0, 8], [0.3, 16], [0.66, 32]]}", "train.tokens_per_step=256")


def test_segments_are_those_of_phases_and_lengths_together() -> None:
    early = Phase(0.35, "train_once", "score_once")
    train = {"micro_batch": 2, "tokens_per_step": 128}
    assert run_segments((), train_spec(**train), 32) == (RunSegment(0.0, LAST, 32, 2),)
    train |= {"context": {"at": ((0, 8), (0.2, 16), (0.35, 24), (0.7, 32))}}
    train["tokens_per_step"] = {"at": ((0, 64), (0.2, 128), (0.5, 192))}
    run = run_segments((early,), train_spec(**train), 32)
    wanted = ((0.0, early, 8, 1), (0.2, early, 16, 2), (0.35, LAST, 24, 2), (0.5, LAST, 24, 3), (0.7, LAST, 32, 3))
    assert run == tuple(RunSegment(*fields) for fields in wanted)
    assert [segment_at(run, done) for done in (0, 0.1999, 0.2, 0.349, 0.35, 0.69, 0.7, 1)] == [0, 0, 1, 1, 2, 3, 4, 4]


def trainer_of(spec: Spec, folder: Path, target: str = "cpu", compiled: bool = False) -> Trainer:
    folder.mkdir(exist_ok=True)
    loaded = instantiate(spec, target, folder / "generated")
    initialize(loaded, spec.train.seed)
    stream: Any = open_stream(write_text(folder / "data"), "train", ByteTokenizer(), folder / "cache")
    loader = Loader(stream, spec.train.at_once(), spec.model.window, "coprime_stride", spec.train.seed)
    device, window = torch.device("cpu" if target == "cpu" else "cuda"), spec.model.window
    model = TrainableModel(loaded.model, loaded.programs.params, window, "digest", loaded.programs.phases)
    return Trainer(model, spec.train, feed_of(spec.train, loader, window), World.alone().on(device), compiled)


def test_a_step_is_of_the_same_tokens_in_shorter_rows(tmp_path: Path) -> None:
    growing, plain = (trainer_of(small_spec(*GROWING), tmp_path / name) for name in ("one", "plain"))
    shapes: list[tuple[int, ...]] = []
    growing._module.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    for step in range(6):
        plain.masters.restore(growing.masters.tensors)
        tokens = (8, 8, 16, 16, 32, 32)[step]
        wanted = []
        for _ in range(2):  # micro-batches of 4 windows of 32
            ids, targets = plain.loader.next()
            nats = [
                plain._module(ids[:, at : at + tokens], targets[:, at : at + tokens]) for at in range(0, 32, tokens)
            ]
            wanted.append(float(torch.stack(nats).mean().detach()))
        (known,) = growing.advance()
        assert known.loss == pytest.approx(sum(wanted) / 2, rel=1e-5)
        assert shapes[-2:] == [(4 * 32 // tokens, tokens)] * 2
    assert growing.feed.counted() == (None, 6 * 256)
    for trainer in (growing, plain):
        trainer.loader.close()


def test_warming_up_runs_every_stretch_to_come_and_leaves_all_as_it_was(tmp_path: Path) -> None:
    late = (
        "model.blocks.order={at: [[0, 0..2], [0.5, 0 0..2]]}",
        "model.blocks.between=[{name: skips, where: run // (runs // 2) == 1, learn: {scale: {init: 1}}, "
        "read: x + scale * output(2 * (runs // 2) - 1 - run)}]",
    )
    spec = small_spec(*GROWING, *late, "model.blocks.count=3", 'quant.rules.1.match="*.{residual,q_gain,scale}"')
    trainer = trainer_of(spec, tmp_path)
    called: list[int] = []
    for number, work in enumerate(trainer._passes):

        def spied(*args: torch.Tensor, number: int = number, work: Any = work) -> None:
            called.append(number)
            work(*args)

        trainer._passes[number] = spied
    seen = []
    while trainer.done < 1:
        state = {**trainer.masters.tensors, **trainer.optimizers.state()}
        before = {name: tensor.clone() for name, tensor in state.items()}
        number, loader = trainer._index, trainer.loader.state()
        called.clear()
        trainer.warm_up(257)
        assert set(called) == set(range(number, 4)) and trainer._index == number and trainer.segments_left == 3 - number
        assert trainer.loader.state() == loader
        for name, tensor in before.items():
            assert torch.equal(state[name], tensor), name
        trainer.advance()
        seen.append((trainer.segment.phase.train, trainer.segment.tokens))
    once, looped = [("train_once", 8)] * 2 + [("train_once", 16)], [("train", 16)] + [("train", 32)] * 2
    assert seen == once + looped
    trainer.loader.close()


def test_a_run_resumed_anywhere_ends_the_same_and_is_scored_on_whole_windows(tmp_path: Path) -> None:
    late = ("model.blocks.order={at: [[0, 0..1], [0.5, 0 0..1]]}",)  # four stretches with the lengths'
    spec, data = small_spec(*GROWING, *late), str(write_text(tmp_path / "data"))
    whole = trained(tmp_path / "whole", spec, data)
    want = saved(whole)
    short = small_spec(*GROWING, *late, "train.context=8")
    assert not torch.equal(
        saved(trained(tmp_path / "short", short, data)).weights["embed.token"], want.weights["embed.token"]
    )
    for stop in range(1, 6):
        folder = tmp_path / f"stop{stop}"
        trained(folder, spec, data, stop)
        result = trained(folder, spec, data, resume=True)
        assert result.raw.record() == whole.raw.record()
        for name, tensor in want.weights.items():
            assert torch.equal(saved(result).weights[name], tensor), (stop, name)
