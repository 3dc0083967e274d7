"""Entry points of the compiler. These functions turn a spec file into one plan per target and the text of every
generated file.

Functions of this module import the modules that render, report and write only when they run, because checking or
planning a spec does not need those modules.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from specc.compiler import pipeline
from specc.compiler.errors import SpecError
from specc.compiler.kernels.kernel import Rendered, Site
from specc.compiler.plan.lock import NO_LOCK, Lock, lock_path, read_lock
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import LoweringError, Parameter
from specc.compiler.records import record
from specc.compiler.spec.check import load, to_diagnostics
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.compiler.text.source import Source

if TYPE_CHECKING:
    from specc.compiler.report.lock_use import LockUse

DEPLOYED = "deployed"  # in a target's folder, the subfolder of the model that runs from an artifact
DECODING = "decoding"  # the name of plans for decoding steps, which no build writes
CALLED = "called"  # the name of the function in the result of `called_text`


@record
class Planned:
    """A checked spec and the plans of its targets.

    Attributes:
        spec: The checked spec.
        plans: The plan of each target, by name.
        deployed: The plan of the model that runs from an artifact, by target name. Contains only targets for which this
            plan differs from the plan in `plans`.
        lock: The measurements that the plans use.
    """

    spec: Spec
    plans: Mapping[str, Plan]
    deployed: Mapping[str, Plan]
    lock: Lock

    @property
    def lock_use(self) -> "LockUse":
        from specc.compiler.report.lock_use import lock_use

        return lock_use(self.lock, self.plans, self.spec)


@record
class Built(Planned):
    """A planned spec with the text of its generated files. Keys of `files` are paths below generated/<name>/."""

    files: Mapping[str, str]


def plan_spec(path: Path, overrides: Iterable[str] = (), targets: Iterable[str] = ()) -> Planned:
    """Checks a spec file and plans its targets without rendering code. If planning succeeds, the spec can be built.

    `overrides` are texts `path=value` that replace values of the spec. `targets` are target names. By default, all
    targets of the spec are planned.

    Raises SpecError with every problem if the spec is invalid or cannot be planned.
    """
    spec, source = load(path, tuple(overrides))
    return plan_loaded(spec, source, tuple(targets), read_lock(lock_path(path, spec.name)))


def plan_loaded(spec: Spec, source: Source | None, targets: tuple[str, ...] = (), lock: Lock = NO_LOCK) -> Planned:
    """Plans the targets of a spec that is already loaded.

    Args:
        spec: the checked spec.
        source: the text of the spec, for the positions of problems. If None, `eval` settings are not checked.
        targets: the names of the targets to plan. If empty, all targets of the spec are planned.
        lock: the measured kernels and tiles to use.

    Returns:
        The spec with the plan of each target.

    Raises:
        SpecError: with every problem, if the spec cannot be planned and `source` is given.
        LoweringError: with every problem, if the spec cannot be planned and `source` is None.
    """
    name = _source_name(spec)
    plans: dict[str, Plan] = {}
    deployed: dict[str, Plan] = {}
    problems: list[Problem] = []
    for target in targets or spec.targets:
        try:
            if source is not None:  # without a source, `specc eval` itself reports the problems of its settings
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
    return Planned(spec, plans, deployed, lock)


def compile_spec(path: Path, overrides: Iterable[str] = (), targets: Iterable[str] = ()) -> Built:
    """Checks, plans and renders a spec file in memory.

    `overrides` and `targets` have the meaning of the arguments of `plan_spec`. Raises SpecError with every problem if
    the spec is invalid or cannot be planned.
    """
    spec, source = load(path, tuple(overrides))
    return compile_loaded(spec, source, tuple(targets), read_lock(lock_path(path, spec.name)))


def compile_loaded(spec: Spec, source: Source | None, targets: tuple[str, ...] = (), lock: Lock = NO_LOCK) -> Built:
    """Plans and renders a spec that is already loaded.

    Args:
        spec: the checked spec.
        source: the text of the spec, for the positions of problems. If None, `eval` settings are not checked.
        targets: the names of the targets to build. If empty, all targets of the spec are built.
        lock: the measured kernels and tiles to use.

    Returns:
        The plans and the text of every generated file.

    Raises:
        SpecError: with every problem, if the spec cannot be planned and `source` is given.
        LoweringError: with every problem, if the spec cannot be planned and `source` is None.
    """
    planned = plan_loaded(spec, source, targets, lock)
    files = _files(spec, planned.plans, planned.deployed, lock, source)
    return Built(spec, planned.plans, planned.deployed, lock, files)


@record
class _Request:
    """The arguments of `compiled`, as the key of a cached result. Two requests are equal if their spec texts, targets
    and lock texts are equal."""

    spec_text: str
    targets: tuple[str, ...]
    lock_text: str
    spec: Spec = field(compare=False)
    lock: Lock = field(compare=False)


def compiled(spec: Spec, targets: Iterable[str] = (), lock: Lock = NO_LOCK) -> Built:
    """Plans and renders a checked spec for `targets`, by default all targets of the spec. The last results are cached,
    because a command such as `specc quantize` compiles the same specs several times.

    Raises LoweringError with every problem if the spec cannot be planned.
    """
    return _compiled(_Request(canonical(spec), tuple(targets), lock.text(), spec, lock))


@lru_cache(maxsize=8)
def _compiled(request: _Request) -> Built:
    return compile_loaded(request.spec, None, request.targets, request.lock)


def _source_name(spec: Spec) -> str:
    return f"specs/{spec.name}.yaml"


def _of_evaluation(spec: Spec, target: str) -> list[Problem]:
    shapes = {param.name: param.shape for param in pipeline.lower(spec, target).params}
    return [problem.under("eval") for problem in spec.eval.problems_of(shapes)]


def build(path: Path, into: Path, force: bool = False) -> tuple[tuple[str, str], ...]:
    """Builds a spec file and writes the result to generated/<name>/.

    Args:
        path: the spec file.
        into: the folder with one folder per spec, such as `generated`.
        force: whether to overwrite files that were edited by hand, or that were built from another spec file.

    Returns:
        A pair (state, file) for each file that changed. The state is `new`, `changed` or `removed`.

    Raises:
        SpecError: if the spec is invalid or cannot be planned.
        OtherSource: if the folder was built from another spec file of the same name and `force` is False.
        HandEdited: if a file was edited by hand and `force` is False, or if a folder is a link.
        EnvironmentProblem: if the disk cannot be written.
    """
    from specc.compiler.generated_folder import write

    built = compile_spec(path)
    return write(into / built.spec.name, built.files, force)


def check(path: Path, into: Path) -> tuple[str, ...]:
    """Returns one line per file that a build of the spec file `path` would change in generated/<name>/. `into` is the
    folder `generated`. Writes nothing.

    Raises SpecError if the spec is invalid or cannot be planned.
    """
    from specc.compiler.generated_folder import drift

    built = compile_spec(path)
    return tuple(f"{built.spec.name}/{file.path}: {file.state}" for file in drift(into / built.spec.name, built.files))


def canonical(spec: Spec) -> str:
    """Returns the resolved spec as canonical JSON, with all defaults and sorted keys. Equal specs have equal texts."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def spec_of(text: str | bytes) -> Spec:
    """Parses the output of `canonical`. Texts of old versions are accepted.

    Raises:
        pydantic.ValidationError: if the text is not a valid spec.
    """
    from specc.compiler.spec.migrate import upgraded

    try:
        data = json.loads(text)
    except ValueError:  # Pydantic reports the error
        data = None
    return Spec.model_validate_json(text if upgraded(data) is data else json.dumps(upgraded(data)))


def interface_digest(parameters: Iterable[Parameter], storage: Mapping[str, str]) -> bytes:
    """Returns the SHA-256 digest of the names, shapes and storage forms of `parameters`, in their order.

    An artifact records this digest. Only a model with an equal digest can load the artifact.
    """
    lines = [f"{param.name} {list(param.shape)} {storage[param.name]}" for param in parameters]
    return hashlib.sha256("\n".join(lines).encode()).digest()


def kernel_files(rendered: Rendered, key: str, source: str) -> Mapping[str, str]:
    """Renders the files of one kernel.

    Args:
        rendered: the templates and contexts of the kernel, by file name.
        key: the plan key, which the header of each file states.
        source: the path of the spec, which the header of each file states.

    Returns:
        File name -> text.
    """
    from specc.compiler.render.jinja import render

    return {name: render(template, context, source, key) for name, (template, context) in rendered.files.items()}


def called_text(site: Site) -> str | None:
    """Returns the source of a Python function that computes the node of `site` by the node's Torch call. The constant
    CALLED is the name of the function, and the node's inputs are its arguments. The source begins with the support
    functions that the Torch call uses. Returns None if the node has an epilogue or no Torch call. Also returns None if
    the Torch call uses no support functions, or uses a support function without a separate file."""
    from specc.compiler.render.jinja import render
    from specc.compiler.render.model import OpContext, is_op, op_file

    call = site.node.op.call(site.inputs)
    functions = {each.function: each.generated for each in call.supports} if call is not None else {}
    if call is None or not functions or site.node.epilogue or not all(is_op(*each) for each in functions.items()):
        return None
    names = [f"x{i}" for i in range(len(site.inputs))]
    texts = (render(*op_file(*each, OpContext("specc")), "", "") for each in functions.items())
    return "\n\n".join((*texts, f"def {CALLED}({', '.join(names)}):\n    return {call.text(names)}\n"))


def model_files(plan: Plan, source: Source | None = None) -> Mapping[str, str]:
    """Renders the files of one target: model.py, ops and kernels. Returns the text of each file, by file name.

    Raises TemplateFault if a template fails to render. The message states the node and the node's line in `source`.
    """
    from specc.compiler.render.jinja import render
    from specc.compiler.render.model import first_caller, model_context

    files: dict[str, str] = {}
    for choice in plan.choices:
        if not files.keys() >= choice.rendered.files.keys():
            with _rendering(plan, partial(str, choice.site.label), source):
                files |= kernel_files(choice.rendered, choice.key, plan.source)
    context = model_context(plan)
    for name, (template, op) in context.ops.items():
        key = hashlib.sha256(f"{template}\n{op!r}".encode()).hexdigest()[:12]
        with _rendering(plan, partial(first_caller, plan, name), source):
            files[f"{name}.py"] = render(template, op, plan.source, key)
    supports, known = [], {*context.IMPORTED, *context.supports, *context.ops}
    for name in context.supports:
        with _rendering(plan, partial(first_caller, plan, name), source):
            supports.append(render(f"torch/{name}.py.jinja", None, plan.source, "", known).rstrip())
    context = replace(context, supports=tuple(supports))
    with _rendering(plan, str, source):
        files["model.py"] = render(context.TEMPLATE, context, plan.source, "")
    return files


@contextmanager
def _rendering(plan: Plan, node_of: Callable[[], str], source: Source | None) -> Iterator[None]:
    """A context manager around the rendering of a file. If the rendering raises a TemplateFault, the context manager
    adds the node, the target and the spec line to the message. `node_of` returns the path of the node for which the
    file is rendered. An empty path stands for model.py."""
    from specc.compiler.render.jinja import TemplateFault

    try:
        yield
    except TemplateFault as fault:
        where, node = plan.source, node_of()
        if source is not None:
            place = source.place(plan.programs.place(node.split(" ")[0].replace("*", "0")))
            where = f"{place.file}:{place.mark.line}"
        message = f"{fault.message}; rendered for {node or 'model.py'} on {plan.target.name}, {where}"
        raise TemplateFault(message) from fault


def uncached_files(spec: Spec, target: str) -> Mapping[str, str]:
    """Renders the files of an encoder-decoder that decodes without a cache. Benchmarks use these files, and no build
    writes them.

    Raises ValueError if `passes.without_cache` cannot rewrite the model, and LoweringError if the model cannot be
    lowered.
    """
    return model_files(pipeline.uncached_plan(spec, target, _source_name(spec)))


def exported_files(spec: Spec, target: str) -> Mapping[str, str]:
    """Renders the files of the programs that `specc export` writes as graphs. No build writes these files.

    Raises ValueError if an operation cannot be exported, and LoweringError if the spec cannot be lowered.
    """
    return model_files(pipeline.exported_plan(spec, target, _source_name(spec)))


def decoding_files(spec: Spec, target: str, packed: bool = False) -> Mapping[str, str]:
    """Renders the files of the programs that append one token to each text, with kernels for few rows. No build writes
    these files. If `packed` is True, the kernels read the quantized weights of an artifact of the spec, and decode
    these weights.

    Raises ValueError if the model has no program that appends tokens, and LoweringError if the spec cannot be lowered.
    """
    return model_files(pipeline.decoding_plan(spec, target, _source_name(spec), packed))


def decoding_plans(planned: Planned) -> Mapping[str, Plan]:
    """Returns a plan for each GPU target. The planned programs append one token to each text, and read the quantized
    weights of an artifact. The result is empty unless the model is quantized and generates text."""
    spec = planned.spec
    names = [name for name in planned.plans if pipeline.reads_codes(spec, name)]
    return {name: pipeline.decoding_plan(spec, name, _source_name(spec), packed=True) for name in names}


@cache  # the search for the package reads folders
def _version() -> str:
    from importlib.metadata import version

    return version("specc")


def _files(
    spec: Spec, plans: Mapping[str, Plan], deployed: Mapping[str, Plan], lock: Lock, source: Source | None
) -> Mapping[str, str]:
    from specc.compiler.generated_folder import MANIFEST, digest
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
        "compiler": _version(),
        "files": {name: digest(text) for name, text in sorted(files.items())},
        "nodes": {folder: _nodes(plan) for folder, plan in sorted(folders.items())},
    }
    return {**files, MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n"}


def _other_source(spec: Spec, source: Source | None) -> Mapping[str, str]:
    path = Path(source.file) if source is not None else Path()
    if path.suffix != ".yaml":  # the spec is not a file: it is a text, or was stored with a run
        return {}
    within = f"specs/{path.name}" if path.absolute().parent.name == "specs" else path.name
    return {"source": within} if within != _source_name(spec) else {}


def _nodes(plan: Plan) -> Mapping[str, str]:
    """Maps each node path to the file that computes the node. For a kernel in CUDA C++, this is the .cu file and not
    its Python wrapper. If different programs compute a node by different ops, each op has an entry with the key `PATH
    OP`."""
    ops: dict[str, dict[str, Rendered]] = {}
    for choice in plan.choices:
        if choice.rendered.files:
            site = choice.site
            ops.setdefault(site.label.split(" ")[0], {})[site.node.op.name] = choice.rendered
    return {
        node if len(by_op) == 1 else f"{node} {op}": max(rendered.files, key=lambda name: name.endswith(".cu"))
        for node, by_op in sorted(ops.items())
        for op, rendered in sorted(by_op.items())
    }
