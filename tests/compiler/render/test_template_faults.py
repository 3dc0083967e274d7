"""A fault in any template is an error with the template's line and the spec's line, and nothing is written."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import jinja2
import pytest

from specc.cli.app import run
from specc.compiler.build import compile_spec
from specc.compiler.plan.plan import Plan
from specc.compiler.render import jinja
from specc.compiler.render.jinja import TemplateFault
from specc.compiler.render.model import model_context

ROOT = Path(__file__).parents[3]
GPT_MINI = ROOT / "specs/gpt_mini.yaml"
# These use every template of a committed spec.
NAMES = (
    "gpt2_124m",
    "poly_attn",
    "poly_transformer",
    "nanochat_d12",
    "modded_gpt",
    "gpt_moe",
    "gpt_mlp35",
    "llama3_1b",
    "gpt_golf_sp8192",
)


@cache
def users(name: str) -> dict[str, str]:
    """Each template that renders a file of a spec, and a target that has the file."""
    built = compile_spec(ROOT / f"specs/{name}.yaml")
    return {
        template: target
        for plans in (built.deployed, built.plans)
        for target, plan in plans.items()
        for template in _templates(plan)
    }


def _templates(plan: Plan) -> Iterator[str]:
    """The templates of kernels, of operations in files of their own, and of functions in model.py."""
    yield from (template for choice in plan.choices for template, _ in choice.rendered.files.values())
    context = model_context(plan)
    yield from (template for template, _ in context.ops.values())
    yield from (f"torch/{name}.py.jinja" for name in context.supports)


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[str], str]], None]]:
    """Replaces the text of a template."""
    real = jinja2.FileSystemLoader.get_source

    def damage(template: str, change: Callable[[str], str]) -> None:
        def get_source(self: jinja2.FileSystemLoader, env: jinja2.Environment, name: str) -> tuple[str, str, object]:
            text, file, fresh = real(self, env, name)
            return (change(text) if name == template else text), file, fresh

        monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", get_source)
        jinja.environment.cache_clear()

    yield damage
    monkeypatch.undo()
    jinja.environment.cache_clear()


FAULTS = {  # what is added to a template, and what the message says
    "a value that the context lacks": ("{{ c.nothing_is_called_so }}\n", "nothing_is_called_so"),
    "no Python": ("def broken(:\n", "the result is not Python: "),
    "a name that nothing defines": ("\n\ndef other() -> None:\n    nothing_is_called_so()\n", "nothing_is_called_so"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_told_with_both_lines(name: str, damaged: Callable[[str, Callable[[str], str]], None]) -> None:
    """Each template gets one of the faults, in turn, because each needs a build."""
    spec, earlier = ROOT / f"specs/{name}.yaml", {"torch/model.py.jinja": "cpu"} if name == NAMES[0] else {}
    templates = users(name).keys() - {template for other in NAMES[: NAMES.index(name)] for template in users(other)}
    assert templates
    for number, template in enumerate(sorted({*templates, *earlier})):
        faults = [fault for fault in FAULTS.values() if "{{" in fault[0] or template.endswith(".py.jinja")]
        added, said = faults[number % len(faults)]
        damaged(template, lambda text: text + added)  # noqa: B023
        last = len((ROOT / "templates" / template).read_text().splitlines()) + added.count("\n")
        with pytest.raises(TemplateFault) as caught:
            compile_spec(spec, (), ({**users(name), **earlier}[template],))
        message = caught.value.message
        assert message.startswith(f"templates/{template}:{last}: ") and said in message
        assert re.search(rf" rendered for .* on \w+, {re.escape(str(spec))}:\d+$", message)


def test_no_template_of_a_committed_file_is_left_out() -> None:
    heads = (path.read_text()[:300] for path in (ROOT / "generated").rglob("*") if path.suffix in (".py", ".cu"))
    templates = {name for head in heads for name in re.findall(r"templates/(\S+\.jinja)", head)}
    assert templates - {"torch/model.py.jinja"} <= {template for name in NAMES for template in users(name)}


@pytest.mark.parametrize("text", ["def broken(:\n", "  return 1\n"])
def test_what_is_no_python_is_not_written(
    text: str, tmp_path: Path, damaged: Callable[[str, Callable[[str], str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged("torch/product.py.jinja", lambda rest: rest + text)
    assert run(["build", str(GPT_MINI), "--into", str(tmp_path / "generated")]) == 2
    error = capsys.readouterr().err
    assert "templates/torch/product.py.jinja:39: the result is not Python: " in error
    assert f"{GPT_MINI}:" in error and not any((tmp_path / "generated").rglob("*.py"))


def test_a_template_that_is_no_template(damaged: Callable[[str, Callable[[str], str]], None]) -> None:
    damaged("torch/product.py.jinja", lambda text: "{% if %}\n" + text)
    with pytest.raises(TemplateFault, match=r"templates/torch/product.py.jinja:1: "):
        compile_spec(GPT_MINI)
