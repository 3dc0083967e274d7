"""A model of lines as a user has it: trained, shipped as one file, and asked for lines."""

import json
from pathlib import Path

import pytest
from pair_models import CROSS, EMBED, MLP, SELF, blocks, pairs_data

import specc.runtime
from specc.cli.app import run

LINES = ["(7-3*z)*(-5*z-9)", "x**2", "n*(n-11)"]
LEARNED = {**EMBED, "positions": "learned"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two steps and the file that it ships as."""
    folder = tmp_path_factory.mktemp("lines")
    data = pairs_data(
        [LEARNED, blocks({**SELF, "dropout": 0.1}, MLP)], [LEARNED, blocks(SELF, CROSS, MLP)], init={"normal": 0.7}
    )
    data["quant"] = {"default": {"scheme": "none", "dtype": "f32"}}
    data["train"] = {**data["train"], "teacher_forcing": {"at": [[0, 1.0], [1, 0.5]], "by": "step"}}
    data["eval"] = {"metric": "exact_match", "lines": 20}
    (folder / "tiny.yaml").write_text(json.dumps(data))
    directory, artifact = folder / "run", folder / "tiny.specc"
    assert run(["train", str(folder / "tiny.yaml"), "--run", str(directory)]) == 0
    assert run(["quantize", str(directory)]) == 0
    assert run(["export", str(directory), "--out", str(artifact)]) == 0
    return directory, artifact


def test_lines_come_out_in_order_from_run_and_file(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("".join(f"{line}\n" for line in LINES))
    translations = []
    for model in trained:
        for beam in ((), ("--beam", "2")):
            capsys.readouterr()
            assert run(["generate", str(model), "--lines", str(tmp_path / "lines.txt"), *beam]) == 0
            translations.append(capsys.readouterr().out.splitlines())
    assert translations[0] == translations[2] and translations[1] == translations[3]
    assert all(len(lines) == len(LINES) for lines in translations)
    model = specc.runtime.load(trained[1])
    assert model.translate(LINES) == translations[0]  # type: ignore[operator]
    assert model.translate(LINES[::-1]) == translations[0][::-1]  # type: ignore[operator]


def test_a_bad_line_is_an_error_and_gives_nothing(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.txt"
    for text, message in (
        ("x**2\nx=2\n", f"{path}:2: 'x=2' has '=', which is not in the vocabulary"),
        ("x\n\n(x-1)*(x-2)\nx\0\n", f"{path}:4: 'x\\x00' has '\\x00', which is not"),
        (
            "y\n" + "x" * 30 + "\nx=2\n",
            f"{path}:2: '{'x' * 30}' has 30 characters; a context of 30 tokens has room for 29 characters and a stop",
        ),
        ("x\ry\n", f"{path}:1: 'x\\ry' has '\\r', which is not"),  # of two lines it would be another
        ("x" * 5_000_000 + "\n" + "x\n" * 2000, f"{path}:1: '{'x' * 60}'... has 5,000,000 characters"),
    ):
        path.write_text(text)
        assert run(["generate", str(trained[1]), "--lines", str(path)]) != 0
        output = capsys.readouterr()
        assert output.out == "" and message in output.err.replace("\n", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--temperature", "0.5"], "--temperature has no effect together with --lines"),
        (["--top-k", "5", "--seed", "0"], "--top-k, --seed have no effect together with --lines"),
        (["--prompt", "", "--samples", "2"], "--prompt, --samples have no effect together with --lines"),
        (["--top-p", "1.0"], "--top-p has no effect together with --lines"),
        (["--max-tokens", "3"], "--max-tokens has no effect together with --lines"),
    ],
)
def test_options_of_texts_are_refused_beside_lines(
    trained: tuple[Path, Path], tmp_path: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("x**2\n")
    assert run(["generate", str(trained[1]), "--lines", str(tmp_path / "lines.txt"), *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--beam", "2"], "--beam has no effect together with a prompt"),
        (["--temperature", "0", "--top-k", "5"], "--top-k has no effect together with --temperature 0"),
    ],
)
def test_options_without_effect_are_refused_beside_a_prompt(
    trained: tuple[Path, Path], given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(trained[1]), "--prompt", "x", *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_model_of_lines_continues_no_text(trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(trained[1]), "--prompt", "x"]) == 2
    output = capsys.readouterr()
    assert "maps lines to lines: use --lines FILE" in output.err and not output.out


def test_a_mark_of_byte_order_is_no_character(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("x**2\n")
    (tmp_path / "marked.txt").write_text("x**2\n", encoding="utf-8-sig")
    for name in ("lines.txt", "marked.txt"):
        assert run(["generate", str(trained[1]), "--lines", str(tmp_path / name)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
