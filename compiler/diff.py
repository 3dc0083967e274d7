"""Compares two specs by what they are, what they plan and what they generate."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from specc.compiler.build import Built, compile_spec
from specc.compiler.generated_folder import MANIFEST, diff_texts
from specc.compiler.report.summary import Summary, quantity


def compare(before: Path, after: Path) -> tuple[tuple[str, ...], str]:
    """Summary lines, and unified diffs of the spec texts, the plans and the generated files, kernels paired by node.

    Raises SpecError where either does not build.
    """
    old, new = compile_spec(before), compile_spec(after)
    left, right = _named(old), _named(new)
    pairs = dict(_pairs(old, new))
    texts = "".join(
        difflib.unified_diff(
            before.read_text(encoding="utf-8").splitlines(keepends=True),
            after.read_text(encoding="utf-8").splitlines(keepends=True),
            str(before),
            str(after),
        )
    )
    texts += diff_texts({"PLAN.md": left.pop("PLAN.md")}, {"PLAN.md": right.pop("PLAN.md")}, "a", "b")
    for source, target in sorted(pairs.items()):
        if source in left and target in right and source != target:
            texts += _renamed(source, left.pop(source), target, right.pop(target))
    texts += diff_texts(left, right, "a", "b")
    return (*_summary(old, new), *_changes(_named(old), _named(new), pairs)), texts


def _named(built: Built) -> dict[str, str]:
    """The files to compare: the manifest only repeats their digests."""
    return {name: text for name, text in built.files.items() if name != MANIFEST}


def _pairs(old: Built, new: Built) -> Iterator[tuple[str, str]]:
    """Files that compute the same node."""
    before, after = (json.loads(built.files[MANIFEST])["nodes"] for built in (old, new))
    for target in sorted(before.keys() & after.keys()):
        for node in sorted(before[target].keys() & after[target].keys()):
            source, other = before[target][node], after[target][node]
            if Path(source).suffix == Path(other).suffix:
                yield f"{target}/{source}", f"{target}/{other}"
                if source.endswith(".cu"):
                    yield f"{target}/{source[:-3]}.py", f"{target}/{other[:-3]}.py"


def _renamed(source: str, text: str, target: str, other: str) -> str:
    lines = difflib.unified_diff(
        text.splitlines(keepends=True), other.splitlines(keepends=True), f"a/{source}", f"b/{target}"
    )
    return "".join(lines)


def _summary(old: Built, new: Built) -> Iterator[str]:
    summaries = [Summary(built.spec, built.plans, built.deployed) for built in (old, new)]
    counts = [summary.parameters for summary in summaries]
    costs = [3 * summary.forward_flops for summary in summaries]
    yield f"{old.spec.name} -> {new.spec.name}"
    yield f"parameters   {counts[0]:,} -> {counts[1]:,} ({counts[1] - counts[0]:+,})"
    yield f"FLOP a token {quantity(costs[0])}FLOP -> {quantity(costs[1])}FLOP"


def _changes(left: Mapping[str, str], right: Mapping[str, str], pairs: Mapping[str, str]) -> Iterator[str]:
    renamed = {source: target for source, target in pairs.items() if source != target}
    changed = [name for name in sorted(left.keys() & right.keys()) if left[name] != right[name]]
    yield f"changed      {', '.join(changed) or 'nothing'}"
    if renamed:
        yield f"replaced     {', '.join(f'{source} -> {target}' for source, target in sorted(renamed.items()))}"
    gone = sorted(left.keys() - right.keys() - renamed.keys())
    come = sorted(right.keys() - left.keys() - set(renamed.values()))
    if gone:
        yield f"removed      {', '.join(gone)}"
    if come:
        yield f"added        {', '.join(come)}"
