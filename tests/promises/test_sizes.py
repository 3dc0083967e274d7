"""Codes and sizes: every code comes back, and the size is that of the file."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from export_samples import CODE, INTERFACE, Layout, layout_of, spec_of
from run_samples import make_run, small_spec, write_text
from tiers import Trials, soak, tiers

from specc.cli.app import run as specc
from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.int8 import Int8
from specc.compiler.quant.round import Round
from specc.compiler.quant.rows import PerRow
from specc.runtime.artifact.artifact import ArtifactContents, read_artifact, write_artifact
from specc.runtime.export.size import size
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run

EACH = 100  # tensors of an artifact


def schemes() -> list[PerRow]:
    """Every scheme of codes, with each of its widths."""
    made: list[PerRow] = [Int8(scheme="int8")]
    for bits in range(2, 9):
        for kind, name in ((Round, "round"), (Gptq, "gptq")):
            try:
                made.append(kind(scheme=name, bits=bits))
            except ValueError:
                continue
    return made


@tiers("C18", shapes=(300, 10_000))
def test_every_code_comes_back(trials: Trials, tmp_path: Path) -> None:
    """All codes of all widths in matrices of random shapes, also odd ones and single rows: through the file, and to the
    f32 product of code and scale, which is exact."""
    every = schemes()
    assert {scheme.bits for scheme in every} >= {4, 5, 6, 7, 8}
    rng, done = np.random.default_rng(18), 0
    while done < trials["shapes"]:
        count = min(EACH, trials["shapes"] - done)
        layout: Layout = []
        tensors, of = {}, {}
        for number in range(count):
            scheme = every[(done + number) % len(every)]
            codes = np.arange(-scheme.top, scheme.top + 1, dtype=np.int8)
            rows, columns = int(rng.integers(1, 40)), int(rng.integers(1, 70))
            shape: tuple[int, ...] = (rows, columns)
            if rng.random() < 0.1 and scheme.rejects((2, *shape)) is None:
                shape = (int(rng.integers(1, 4)), *shape)
            values = rng.permutation(np.resize(codes, int(np.prod(shape)))).reshape(shape)
            scale = rng.integers(1, 0x7BFF, shape[:-1], dtype=np.uint16).view(np.float16)  # any positive number
            layout += [(f"t{number}", stored) for stored in scheme.stored(shape)]
            tensors[f"t{number}"] = {"codes": values, "scale": np.asarray(scale)}
            if scheme.integer:
                tensors[f"t{number}"]["input_scale"] = np.ones(1, np.float32)
            of[f"t{number}"] = (scheme, shape)
        contents = ArtifactContents(
            spec=spec_of(layout), interface=INTERFACE, code=CODE, layout=layout, tensors=tensors
        )
        write_artifact(tmp_path / "m", contents, quality=1)
        read = read_artifact(tmp_path / "m", layout_of).tensors
        for name, (scheme, shape) in of.items():
            codes, scale = tensors[name]["codes"], tensors[name]["scale"]
            assert np.array_equal(read[name]["codes"], codes) and read[name]["scale"].tobytes() == scale.tobytes()
            exact = codes.astype(np.float64) * scale.astype(np.float64)[..., None]
            assert np.array_equal(scheme.dequantize(read[name], shape).numpy().astype(np.float64), exact)
        done += count


@pytest.mark.gpu
@soak("C18", shapes_on_a_gpu=1_000)
def test_a_gpu_dequantizes_to_the_same_bits(trials: Trials) -> None:
    every, rng = schemes(), np.random.default_rng(18)
    for number in range(trials["shapes_on_a_gpu"]):
        scheme, shape = every[number % len(every)], (int(rng.integers(1, 400)), int(rng.integers(1, 700)))
        codes = rng.integers(-scheme.top, scheme.top + 1, shape, dtype=np.int8)
        scale = rng.integers(1, 0x7BFF, shape[:-1], dtype=np.uint16).view(np.float16)
        on_cpu, on_gpu = (
            torch.from_numpy(codes).to(device).float() * torch.from_numpy(scale).to(device).float()[:, None]
            for device in ("cpu", "cuda")
        )
        arrays = {"codes": codes, "scale": scale}
        if scheme.integer:
            arrays["input_scale"] = np.ones(1, np.float32)
        assert torch.equal(on_cpu, on_gpu.cpu()) and torch.equal(on_cpu, scheme.dequantize(arrays, shape).float())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("sizes")
    return make_run(folder / "run", small_spec("quant.promote=null"), str(write_text(folder / "data")))


@tiers("C20", artifacts=(3, 20))
def test_the_size_is_that_of_the_file(trials: Trials, trained: Run, tmp_path: Path) -> None:
    """`specc size` is the sum of the files; a budget of one byte less ends with exit code 1, one of as many or more
    with 0."""
    chance, seen = random.Random(20), set[int]()
    for number in range(trials["artifacts"]):
        run = Run.open(Path(shutil.copytree(trained.directory, tmp_path / f"{number}")))
        words = [
            f"quant.default.bits={chance.choice([4, 5, 6, 7, 8])}",
            f"quant.rules.0.bits={chance.choice([6, 7, 8])}",
        ]
        options = QuantizeOptions(cache=tmp_path / "cache", max_tokens=50, overrides=tuple(words))
        artifact = quantize(run.directory, options, lambda _: None).artifact
        total = artifact.stat().st_size
        assert size(artifact).total == size(run.directory).total == total
        for budget, code in ((total - 1, 1), (total, 0), (total + 1, 0)):
            assert specc(["size", str(artifact), "--budget", str(budget)]) == code
        seen.add(total)
    assert len(seen) > 1
