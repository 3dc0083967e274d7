"""Opening runs and artifacts: the right weights, one function on all paths, and nothing from a bad file."""

import base64
import hashlib
import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
from run_samples import add_checkpoint, make_run, random_weights, small_spec, write_text

import specc.runtime
from specc.compiler.build import canonical
from specc.compiler.errors import SpecError
from specc.compiler.targets import TARGETS
from specc.runtime.artifact.artifact import ArtifactContents, peek_spec, read_artifact, write_artifact
from specc.runtime.artifact.deployment import Deployment, deployment_of
from specc.runtime.data.errors import DataError
from specc.runtime.errors import EnvironmentFailure, IntegrityError, RunFailure
from specc.runtime.export.size import size
from specc.runtime.model.load import TargetError, device_asked_for
from specc.runtime.open_model import open_model, read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run, RunDirectoryError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("opened")
    trained = make_run(folder / "run", small_spec(), str(write_text(folder / "data")))
    quantize(trained.directory, QuantizeOptions(cache=folder / "cache", max_tokens=200), lambda _: None)
    return trained


@pytest.fixture
def artifact(run: Run, tmp_path: Path) -> Path:
    return Path(shutil.copy(run.quantized / "model.specc", tmp_path / "copy.specc"))


def test_a_run_gives_the_weights_that_it_ends_with(run: Run) -> None:
    model = open_model(run.directory)
    assert (model.source, model.same_code, model.data, model.device.type) == ("run", None, run.data, "cpu")
    expected = random_weights(run.spec)
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert not model.model.training


def test_the_newest_sound_checkpoint_counts(run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.directory, tmp_path / "run"))
    other = Run.open(folder)
    add_checkpoint(other, seed=5, step=8)
    name = "blocks.0.mlp.up"
    newest = random_weights(run.spec, 5)[name]
    assert torch.equal(open_model(folder).model.get_parameter(name), newest)
    file = other.checkpoints / "step_00000008" / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said: list[str] = []
    older = open_model(folder, say=said.append).model.get_parameter(name)
    assert torch.equal(older, random_weights(run.spec)[name])
    assert len(said) == 1 and "step_00000008" in said[0]


def test_weights_of_another_spec_are_refused(run: Run, tmp_path: Path) -> None:
    """The model of a changed spec.json would have these parameters too, but other scores."""
    folder = Path(shutil.copytree(run.directory, tmp_path / "run"))
    text = (folder / "spec.json").read_text(encoding="utf-8")
    assert text.count('"softcap": 30') == 1
    (folder / "spec.json").write_text(text.replace('"softcap": 30', '"softcap": 5'), encoding="utf-8")
    options = QuantizeOptions(cache=tmp_path / "cache", max_tokens=200)
    for opened in (lambda: open_model(folder), lambda: quantize(folder, options, lambda _: None)):
        with pytest.raises(IntegrityError, match=r"its spec\.json is not the spec that step_[0-9]+ was"):
            opened()
    assert run.requantized(("quant.default.bits=4",)).spec_digest == run.spec_digest


def test_an_artifact_of_older_weights_says_so(run: Run, artifact: Path, tmp_path: Path) -> None:
    """Of a run, whoever opens or counts what was quantized; a file of its own has no newer ones."""
    folder = Path(shutil.copytree(run.directory, tmp_path / "run"))
    said: list[str] = []

    def asked() -> list[str]:
        said.clear()
        open_model(folder, quantized=True, say=said.append)
        size(folder, say=said.append)
        return said

    assert asked() == []
    add_checkpoint(Run.open(folder), seed=5, step=8)
    newest = folder / "checkpoints" / "step_00000008"
    warning = f"the artifact has the weights of step 3, but {newest} is newer; to quantize it: specc quantize {folder}"
    assert asked() == [warning] * 2
    shutil.rmtree(folder / "checkpoints")
    assert asked() == []
    (folder / "quantized/report.json").write_text("{}")
    assert len(asked()) == 2 and all("is unknown" in line for line in said)
    size(artifact, say=said.append)
    assert len(said) == 2


def test_what_a_run_was_quantized_to_is_no_run(run: Run) -> None:
    for folder in (run.quantized, run.checkpoints / "step_00000003"):
        with pytest.raises(RunDirectoryError, match="is a part of a run") as caught:
            open_model(folder)
        assert caught.value.exit_code == 2 and caught.value.hint == f"name the run, {run.directory}"
    with pytest.raises(RunDirectoryError, match="is a part of a run"):
        size(run.quantized)


def test_a_quantized_run_is_its_artifact(run: Run, artifact: Path) -> None:
    inside, outside = open_model(run.directory, quantized=True), open_model(artifact)
    assert inside.source == outside.source == "artifact"
    assert inside.same_code is outside.same_code is True
    assert (inside.data, outside.data) == (run.data, None)
    for name, parameter in inside.model.named_parameters():
        assert torch.equal(parameter, outside.model.get_parameter(name))
        assert not torch.equal(parameter, random_weights(run.spec)[name])


def test_load_from_python_is_that_model(run: Run, artifact: Path) -> None:
    ids, targets = torch.randint(257, (2, 2, 32), generator=torch.Generator().manual_seed(0))
    for path in (run.directory, artifact):
        model = specc.runtime.load(str(path))
        assert isinstance(model, torch.nn.Module) and not model.training
        with torch.no_grad():
            assert torch.equal(model(ids, targets), open_model(path).model(ids, targets))
            mean = float(model.score(ids, targets).mean())
            assert float(model(ids, targets)) == pytest.approx(mean, rel=1e-5)
        for bad in (-1, 257):
            odd = targets.clone()
            odd[1, 3] = bad
            with pytest.raises(ValueError, match=rf"targets\[1, 3\] is {bad}; the vocabulary has ids 0 to 256"):
                model.score(ids, targets=odd)
        with pytest.raises(ValueError, match=r"ids is torch\.float32"):
            model.score(ids.float(), targets)


def test_the_code_lies_where_only_the_user_can_write_and_goes_with_the_model(run: Run) -> None:
    model = open_model(run.directory)
    folder = model.loaded.directory.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "cpu" / "model.py").is_file()
    del model
    assert not folder.exists()


def test_the_code_in_the_run_is_neither_used_nor_changed(run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.directory, tmp_path / "run"))
    trap = folder / "generated" / "cpu" / "model.py"
    trap.parent.mkdir(parents=True)
    trap.write_text("raise SystemExit('this ran')\n")
    open_model(folder)
    assert trap.read_text() == "raise SystemExit('this ran')\n"


@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_parameters_are_in_the_dtype_of_the_target(target: str, tmp_path: Path) -> None:
    spec = small_spec("targets=[cpu, sm90]", "fuse=[]")
    run = make_run(tmp_path / "run", spec, "stdlib")
    model = open_model(run.directory, target=target, device="cpu").model
    dtype = {"cpu": torch.float32, "sm90": torch.bfloat16}[target]
    expected = random_weights(spec)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, expected[name].to(dtype))


def test_what_is_not_there_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(RunDirectoryError) as caught:
            open_model(path)
        assert caught.value.exit_code == 2
    with pytest.raises(TargetError, match="does not list the target sm80"):
        open_model(run.directory, target="sm80")
    bare = make_run(tmp_path / "bare", small_spec(), "stdlib")
    with pytest.raises(RunFailure, match="is not quantized") as missing:
        open_model(bare.directory, quantized=True)
    assert missing.value.hint == f"first: specc quantize {bare.directory}"


def test_a_gpu_target_without_a_gpu_is_an_environment_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = make_run(tmp_path / "run", small_spec("targets=[sm90]", "fuse=[]"), "stdlib")
    with pytest.raises(EnvironmentFailure, match="target sm90 needs an NVIDIA GPU"):
        open_model(run.directory, target="sm90")


def test_errors_of_devices_name_the_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_model(run.directory, device="cpu").device.type == "cpu"
    for name in ("xyz", "meta", "cuda:first"):
        with pytest.raises(TargetError, match=f"device {name} is not supported"):
            open_model(run.directory, device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(EnvironmentFailure, match=f"device {name} needs an NVIDIA GPU, and torch finds none"):
            open_model(run.directory, device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EnvironmentFailure, match="device cuda:2 does not exist: torch finds 2"):
        device_asked_for(TARGETS["cpu"], "cuda:2")
    assert device_asked_for(TARGETS["cpu"], "cuda:1").index == 1


def test_the_tokenizer_has_to_fit_and_is_looked_for_nearby(tmp_path: Path) -> None:
    letters = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "letters.tiktoken").write_text(letters, encoding="ascii")
    small = small_spec("train.data={tokenizer: letters.tiktoken}", "model.vocab=200")
    model = open_model(make_run(tmp_path / "run", small, "stdlib").directory, search=[tmp_path])
    with pytest.raises(DataError, match="has 257 ids, but the model has only 200"):
        _ = model.tokenizer
    marked = small_spec(
        "train.data={tokenizer: letters.tiktoken}",
        "model.blocks.layers.0.bos=0",
        "model.blocks.layers.0.mask=j <= i and document(i) == document(j)",
    )
    model = open_model(make_run(tmp_path / "marked", marked, "stdlib").directory, search=[tmp_path])
    with pytest.raises(DataError, match=r"layers\.0\.bos is 0, but letters.tiktoken writes 256 before each document"):
        _ = model.tokenizer
    elsewhere = small_spec("train.data={tokenizer: some.model}")
    other = make_run(tmp_path / "other", elsewhere, str(write_text(tmp_path / "data")))
    named = open_model(other.directory, search=[tmp_path / "named"])
    with pytest.raises(DataError, match=r"no tokenizer 'some\.model'") as caught:
        _ = named.tokenizer
    for place in ("named", "other/files", "data"):
        assert str(tmp_path / place / "some.model") in caught.value.message


# What a file may do to us


def rewritten(artifact: Path, spec: bytes | None = None, code: bytes | None = None, **arrays: object) -> None:
    """Writes the artifact anew, sound as a file, with something else in it."""
    deployment = deployment_of(peek_spec(artifact))[1]
    old = read_artifact(artifact, lambda _: (deployment.interface, deployment.layout))
    tensors = {name: dict(stored) for name, stored in old.tensors.items()}
    for name, array in arrays.items():
        tensors[name.replace("__", ".")]["codes"] = array  # type: ignore[assignment]
    write_artifact(
        artifact,
        ArtifactContents(
            spec=spec or old.spec,
            interface=deployment.interface,
            code=code or old.code,
            layout=deployment.layout,
            tensors=tensors,
        ),
        quality=1,
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"heads":4', '"heads":5', "heads"),
        ('"kind":"decoder"', '"kind":"robot"', "not valid for this version of specc"),
        ('"spec_version":2', '"spec_version":3', "not valid for this version of specc"),
        ('"name":"gpt_mini"', '"name":"../../etc"', "not valid for this version of specc"),
        ('"match":"blocks.0.mlp.up"', '"match":"blocks.9.mlp.up"', "matches no parameter"),
        ('"dim":32', '"dim":40', "the stored parameters differ from those"),
        ('"count":2', '"count":1', "matches no parameter"),
        ('"tied":true', '"tied":false', "the stored parameters differ from those"),
        ("{", "[", "not valid for this version of specc"),
    ],
)
def test_a_spec_that_makes_no_such_model_is_found(artifact: Path, old: str, new: str, message: str) -> None:
    text = open_model(artifact).spec
    spec = canonical(text)
    assert old in spec
    rewritten(artifact, spec=spec.replace(old, new, 1).encode())
    with pytest.raises(IntegrityError, match=message) as caught:
        open_model(artifact)
    assert str(artifact) in caught.value.message


def test_codes_that_no_quantizer_writes_are_found(artifact: Path) -> None:
    spec = read_verified(artifact).spec
    name = "blocks.0.attention.q"
    shape = Deployment.of(spec).shapes[name]
    codes = torch.full(shape, 100, dtype=torch.int8).numpy()
    rewritten(artifact, blocks__0__attention__q=codes)
    with pytest.raises(IntegrityError, match=f"{name}: a code is outside"):
        open_model(artifact)


def test_an_error_of_the_compiler_is_one_of_the_file(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("specc.runtime.artifact.deployment.compiled", broken)
    with pytest.raises(IntegrityError, match="too deep"):
        open_model(artifact)


def test_other_code_is_reported_and_no_error(artifact: Path) -> None:
    rewritten(artifact, code=hashlib.sha256(b"of another compiler").digest())
    said: list[str] = []
    model = open_model(artifact, say=said.append)
    assert model.same_code is False
    assert said == [
        f"{artifact}: this version of specc generates different code, so results may differ in the last bits"
    ]


def test_an_artifact_of_version_1_opens_with_equal_logits(artifact: Path) -> None:
    now = open_model(artifact)
    data = json.loads(canonical(now.spec))
    data["spec_version"] = 1
    for layer in data["model"]["blocks"]["layers"]:
        assert layer.pop("write") == "x + residual * y" and list(layer.pop("learn")) == ["residual"]
        layer["residual"] = "learned"
    rewritten(artifact, spec=json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
    old = open_model(artifact)
    assert old.spec.model.blocks.every == now.spec.model.blocks.every  # type: ignore[attr-defined]
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        nats = [opened.text_model.score(ids, ids.roll(-1, 1)) for opened in (now, old)]
    assert torch.equal(*nats)


def built_spec(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(canonical(small_spec()))
    return path


def test_a_built_model_has_the_initial_weights_of_its_seed(tmp_path: Path) -> None:
    path = built_spec(tmp_path)
    first, same, other = (specc.runtime.build_model(path, target="cpu", seed=seed) for seed in (1, 1, 2))
    name = "blocks.0.mlp.up"
    assert torch.equal(first.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    default = specc.runtime.build_model(path)
    seeded = specc.runtime.build_model(path, seed=small_spec().train.seed)
    assert torch.equal(default.get_parameter(name), seeded.get_parameter(name))
    assert not first.training and first.get_parameter(name).std() > 0


def test_a_built_model_takes_the_weights_of_a_run(run: Run, tmp_path: Path) -> None:
    trained = specc.runtime.load(run.directory)
    model = specc.runtime.build_model(built_spec(tmp_path))
    ids = torch.randint(small_spec().model.vocabulary, (2, 8))
    with torch.no_grad():
        assert not torch.equal(model.score(ids, ids), trained.score(ids, ids))  # type: ignore[operator]
        model.load_state_dict(trained.state_dict())
        assert torch.equal(model.score(ids, ids), trained.score(ids, ids))  # type: ignore[operator]
    with pytest.raises(ValueError, match="the vocabulary has ids 0 to"):
        model.score(ids + small_spec().model.vocabulary, ids)  # type: ignore[operator]


def test_overrides_and_targets_of_a_built_model(tmp_path: Path) -> None:
    path = built_spec(tmp_path)
    small = specc.runtime.build_model(path, overrides=["model.blocks.count=1"])
    assert not any(name.startswith("blocks.1.") for name, _ in small.named_parameters())
    with pytest.raises(TargetError, match="does not list the target sm120"):
        specc.runtime.build_model(path, target="sm120")
    with pytest.raises(SpecError):
        specc.runtime.build_model(path, overrides=["model.dim=-1"])
