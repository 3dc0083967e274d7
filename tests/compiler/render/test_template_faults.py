"""A fault in any template is an error with the template's line and the spec's line, and nothing is written."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import jinja2
import pytest

from specc.cli.app import run
from specc.compiler.build import Built, compile_spec
from specc.compiler.render import jinja
from specc.compiler.render.jinja import TemplateFault

ROOT = Path(__file__).parents[3]
SPECS = {path.stem: path for path in sorted((ROOT / "specs").glob("*.yaml"))}


@cache
def built(name: str) -> Built:
    return compile_spec(SPECS[name])


def users() -> Iterator[tuple[str, str]]:
    """Each template that renders a file of a committed spec, and one such spec."""
    seen: dict[str, str] = {}
    for name in SPECS:
        plans = (*built(name).plans.values(), *built(name).deployed.values())
        for template, _ in (file for plan in plans for c in plan.choices for file in c.rendered.files.values()):
            seen.setdefault(template, name)
    yield from sorted((*seen.items(), ("torch/model.py.jinja", "gpt_mini")))


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[str], str]], None]]:
    """Replaces the text of a template."""
    real = jinja._Loader.get_source

    def damage(template: str, change: Callable[[str], str]) -> None:
        def get_source(self: jinja._Loader, env: jinja2.Environment, name: str) -> tuple[str, str, None]:
            text, file, fresh = real(self, env, name)
            return (change(text) if name == template else text), file, fresh

        monkeypatch.setattr(jinja._Loader, "get_source", get_source)
        jinja.environment.cache_clear()

    yield damage
    monkeypatch.undo()
    jinja.environment.cache_clear()


@pytest.mark.parametrize(("template", "name"), list(users()))
def test_an_undefined_name_is_told_with_both_lines(
    template: str, name: str, damaged: Callable[[str, Callable[[str], str]], None]
) -> None:
    damaged(template, lambda text: text + "{{ c.nothing_is_called_so }}\n")
    last = len((ROOT / "templates" / template).read_text().splitlines()) + 1
    with pytest.raises(TemplateFault) as caught:
        compile_spec(SPECS[name])
    message = caught.value.message
    assert message.startswith(f"templates/{template}:{last}: ") and "nothing_is_called_so" in message
    assert re.search(rf" rendered for .* on \w+, {re.escape(str(SPECS[name]))}:\d+$", message)


@pytest.mark.parametrize("text", ["def broken(:\n", "  return 1\n"])
def test_what_is_no_python_is_not_written(
    text: str, tmp_path: Path, damaged: Callable[[str, Callable[[str], str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged("torch/product.py.jinja", lambda rest: rest + text)
    assert run(["build", str(SPECS["gpt_mini"]), "--into", str(tmp_path / "generated")]) == 2
    error = capsys.readouterr().err
    assert "templates/torch/product.py.jinja: what it renders is no Python: line " in error
    assert f"{SPECS['gpt_mini']}:" in error and not any((tmp_path / "generated").rglob("*.py"))


def test_a_template_that_is_no_template(damaged: Callable[[str, Callable[[str], str]], None]) -> None:
    damaged("torch/product.py.jinja", lambda text: "{% if %}\n" + text)
    with pytest.raises(TemplateFault, match=r"templates/torch/product.py.jinja:1: "):
        compile_spec(SPECS["gpt_mini"])
