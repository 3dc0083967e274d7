"""The one entry: a spec file becomes a plan a target, and the text of every generated file.

What renders is imported when something is rendered: to check and to plan a spec needs none of it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from specc.compiler import pipeline
from specc.compiler.errors import SpecError
from specc.compiler.generated_folder import MANIFEST, digest, drift, write
from specc.compiler.kernels.kernel import Rendered
from specc.compiler.plan.lock import NO_LOCK, Lock, lock_path, read_lock
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import LoweringError, Parameter
from specc.compiler.report.lock_use import LockUse, lock_use
from specc.compiler.spec.check import load, to_diagnostics
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.compiler.text.source import Source

DEPLOYED = "deployed"  # the folder, below a target's, of what runs from an artifact


@dataclass(frozen=True, slots=True)
class Planned:
    """A spec with its plans by target. `deployed` are the plans of what runs from an artifact, where these are others;
    `lock_use` tells what of the lock applies."""

    spec: Spec
    plans: Mapping[str, Plan]
    deployed: Mapping[str, Plan]
    lock_use: LockUse


@dataclass(frozen=True, slots=True)
class Built(Planned):
    """A planned spec with its files, by path under generated/<name>/."""

    files: Mapping[str, str]


def plan_spec(path: Path, overrides: Iterable[str] = (), targets: Iterable[str] = ()) -> Planned:
    """Checks a spec file and plans all or some of its targets, rendering nothing. Raises SpecError with everything
    that is wrong: what can be planned can be built."""
    spec, source = load(path, tuple(overrides))
    return plan_loaded(spec, source, tuple(targets), read_lock(lock_path(path, spec.name)))


def plan_loaded(spec: Spec, source: Source | None, targets: tuple[str, ...] = (), lock: Lock = NO_LOCK) -> Planned:
    """As `plan_spec`, for a spec and a lock that were read before. Raises SpecError, or LoweringError where there is
    no source."""
    name = _source_name(spec)
    plans: dict[str, Plan] = {}
    deployed: dict[str, Plan] = {}
    problems: list[Problem] = []
    for target in targets or spec.targets:
        try:
            if source is not None:  # `specc eval` itself tells of settings that stand in no file
                problems += [problem for problem in _of_evaluation(spec, target) if problem not in problems]
            plans[target] = pipeline.plan(spec, target, name, lock)
            if (other := pipeline.deployed_plan(spec, target, name)) is not None:
                deployed[target] = other
        except LoweringError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        if source is None:
            raise LoweringError(tuple(problems))
        raise SpecError(to_diagnostics(problems, source), source.texts)
    return Planned(spec, plans, deployed, lock_use(lock, plans, spec))


def compile_spec(path: Path, overrides: Iterable[str] = (), targets: Iterable[str] = ()) -> Built:
    """The whole of a spec file, or of some of its targets, in memory. Raises SpecError with everything that is
    wrong."""
    spec, source = load(path, tuple(overrides))
    return compile_loaded(spec, source, tuple(targets), read_lock(lock_path(path, spec.name)))


def compile_loaded(spec: Spec, source: Source | None, targets: tuple[str, ...] = (), lock: Lock = NO_LOCK) -> Built:
    """As `compile_spec`, for a spec and a lock that were read before. Raises as `plan_loaded`."""
    planned = plan_loaded(spec, source, targets, lock)
    files = _files(spec, planned.plans, planned.deployed, lock, source)
    return Built(spec, planned.plans, planned.deployed, planned.lock_use, files)


def _source_name(spec: Spec) -> str:
    """The spec's file, as generated files call it."""
    return f"specs/{spec.name}.yaml"


def _of_evaluation(spec: Spec, target: str) -> list[Problem]:
    shapes = {param.name: param.shape for param in pipeline.lower(spec, target).params}
    return [problem.under("eval") for problem in spec.eval.problems_of(shapes)]


def build(path: Path, into: Path, force: bool = False) -> tuple[tuple[str, str], ...]:
    """Writes generated/<name>/ under `into`; returns (state, file) of what changed. Raises SpecError, HandEdited."""
    built = compile_spec(path)
    return write(into / built.spec.name, built.files, force)


def check(path: Path, into: Path) -> tuple[str, ...]:
    """What in generated/<name>/ is not as a build would have it, a line each; nothing is written. Raises SpecError."""
    built = compile_spec(path)
    return tuple(
        f"{built.spec.name}/{found.path}: {found.state}" for found in drift(into / built.spec.name, built.files)
    )


def canonical(spec: Spec) -> str:
    """The resolved spec as JSON: every default written out, keys sorted, one text for one spec."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def spec_of(text: str | bytes) -> Spec:
    """The spec that `canonical` wrote. Raises pydantic.ValidationError where it is none."""
    return Spec.model_validate_json(text)


def interface_digest(parameters: Iterable[Parameter], storage: Mapping[str, str]) -> bytes:
    """SHA-256 of what binds an artifact to a model: parameter names, shapes and storage, in order."""
    lines = [f"{param.name} {list(param.shape)} {storage[param.name]}" for param in parameters]
    return hashlib.sha256("\n".join(lines).encode()).digest()


def kernel_files(rendered: Rendered, key: str, source: str) -> Mapping[str, str]:
    """The text of one kernel's files with its plan key, for the spec that generated files call `source`."""
    from specc.compiler.render.jinja import render

    return {name: render(template, context, source, key) for name, (template, context) in rendered.files.items()}


def model_files(plan: Plan, source: Source | None = None) -> Mapping[str, str]:
    """The text of one target's files: model.py and its kernels. Raises TemplateFault, which names the line of `source`,
    where a template renders no code."""
    from specc.compiler.render.jinja import render
    from specc.compiler.render.model import OpContext, model_context

    files: dict[str, str] = {}
    for choice in plan.choices:
        if not files.keys() >= choice.rendered.files.keys():
            with _rendering(plan, choice.site.label, source):
                files |= kernel_files(choice.rendered, choice.key, plan.source)
    context = model_context(plan)
    for name in context.ops:
        template, package = f"torch/ops/{name}.py.jinja", OpContext(f"specc_{plan.name}")
        key = hashlib.sha256(f"{template}\n{package!r}".encode()).hexdigest()[:12]
        files[f"{name}.py"] = render(template, package, plan.source, key)
    supports = tuple(render(f"torch/{name}.py.jinja", None, plan.source, "").rstrip() for name in context.supports)
    context = replace(context, supports=supports)
    with _rendering(plan, "", source):
        files["model.py"] = render(context.TEMPLATE, context, plan.source, "")
    return files


@contextmanager
def _rendering(plan: Plan, node: str, source: Source | None) -> Iterator[None]:
    """Lets a fault of a template also name the node, and the line of the spec, that it was rendered for."""
    from specc.compiler.render.jinja import TemplateFault

    try:
        yield
    except TemplateFault as fault:
        where = plan.source
        if source is not None:
            place = source.place(plan.programs.place(node.split(" ")[0].replace("*", "0")))
            where = f"{place.file}:{place.mark.line}"
        raise TemplateFault(
            f"{fault.message}; rendered for {node or 'model.py'} on {plan.target.name}, {where}"
        ) from fault


def uncached_files(spec: Spec, target: str) -> Mapping[str, str]:
    """The text of the files of a model of pairs that decodes without a cache, as `passes.uncached` cuts it; no build
    writes them. Raises ValueError for a model that cannot be cut, LoweringError."""
    return model_files(pipeline.uncached_plan(spec, target, _source_name(spec)))


def _files(
    spec: Spec, plans: Mapping[str, Plan], deployed: Mapping[str, Plan], lock: Lock, source: Source | None
) -> Mapping[str, str]:
    from importlib.metadata import version

    from specc.compiler.report.plan_page import plan_page
    from specc.compiler.report.summary import Summary

    folders = {**plans, **{f"{target}/{DEPLOYED}": plan for target, plan in deployed.items()}}
    files = {
        f"{folder}/{name}": text for folder, plan in folders.items() for name, text in model_files(plan, source).items()
    }
    files["PLAN.md"] = plan_page(Summary(spec, plans, deployed))
    manifest = {
        **_other_source(spec, source),
        "spec": digest(canonical(spec)),
        "lock": digest(lock.text()) if lock.targets else None,
        "compiler": version("specc"),
        "files": {name: digest(text) for name, text in sorted(files.items())},
        "nodes": {folder: _nodes(plan) for folder, plan in sorted(folders.items())},
    }
    return {**files, MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n"}


def _other_source(spec: Spec, source: Source | None) -> Mapping[str, str]:
    """The file of a spec, from the folder of its project, where that is another than its name says."""
    path = Path(source.file) if source is not None else Path()
    if path.suffix != ".yaml":  # a text, or the spec that a run keeps
        return {}
    within = f"specs/{path.name}" if path.absolute().parent.name == "specs" else path.name
    return {"source": within} if within != _source_name(spec) else {}


def _nodes(plan: Plan) -> Mapping[str, str]:
    """Node path -> the file that computes it."""
    named = {c.site.label.split(" ")[0]: c.rendered for c in plan.choices if c.rendered.files}
    return {
        node: max(rendered.files, key=lambda name: name.endswith(".cu")) for node, rendered in sorted(named.items())
    }
