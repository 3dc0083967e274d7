"""One spec, one set of bytes; one changed activation, one set of changed lines; builds that are cut off or race."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tiers import Trials, soak, tiers
from tiny_models import spec_data

from specc.compiler.build import canonical, check, compile_loaded, compile_spec, compiled, interface_digest, spec_of
from specc.compiler.errors import SpecError
from specc.compiler.plan.lock import lock_path, read_lock
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.check import load

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
GOLF = (ROOT / "specs/gpt_mlp35_base.yaml").read_text()
BASE = compile_spec(ROOT / "specs/gpt_mlp35_base.yaml").files
LOCK = read_lock(ROOT / "specs/gpt_mlp35_base.lock.json")


def files_of(text: str) -> Mapping[str, str]:
    return compile_loaded(*load(text), (), LOCK).files


def changed(text: str) -> tuple[Mapping[str, str], dict[str, str]]:
    """The files of the golf spec with another text, and how each that differs does."""
    files = files_of(text)
    words = {(True, True): "changed", (True, False): "gone", (False, True): "new"}
    states = {
        name: words[name in BASE, name in files] for name in {**BASE, **files} if BASE.get(name) != files.get(name)
    }
    return files, states


def lines(files: Mapping[str, str], name: str) -> tuple[list[str], list[str]]:
    """The lines of one file that went and that came."""
    old, new = BASE[name].splitlines(), files[name].splitlines()
    gone, come = list(old), list(new)
    for line in old:
        if line in come:
            come.remove(line)
            gone.remove(line)
    return gone, come


def test_another_activation_changes_the_kernel_and_the_lines_that_name_it() -> None:
    files, states = changed(GOLF.replace("leaky_relu(x, 0.5) ** 2", "gelu(x)"))
    kernels = {f"{target}/linear_gelu__n1792_k512.py": "new" for target in ("cpu", "sm90")}
    kernels |= {f"{target}/linear_leaky_relu2__n1792_k512.py": "gone" for target in ("cpu", "sm90")}
    kernels |= {"sm90/linear_gelu__n1792_k512.cu": "new", "sm90/linear_leaky_relu2__n1792_k512.cu": "gone"}
    pages = dict.fromkeys(("PLAN.md", "manifest.json", "cpu/model.py", "sm90/model.py"), "changed")
    assert states == {**kernels, **pages}
    for target in ("cpu", "sm90"):
        gone, come = lines(files, f"{target}/model.py")
        assert gone == [
            "from .linear_leaky_relu2__n1792_k512 import linear_leaky_relu2",
            "        act, slope = linear_leaky_relu2(x, up)",
            "            act = F.leaky_relu(F.linear(h, self.mlp.up), 0.5) ** 2",
        ]
        assert come == [
            "from .linear_gelu__n1792_k512 import linear_gelu",
            "        act, slope = linear_gelu(x, up)",
            "            act = F.gelu(F.linear(h, self.mlp.up))",
        ]


def test_relu_squared_saves_no_slope() -> None:
    files, states = changed(GOLF.replace("leaky_relu(x, 0.5) ** 2", "relu(x) ** 2"))
    pages = dict.fromkeys(("PLAN.md", "manifest.json", "cpu/model.py", "sm90/model.py"), "changed")
    kernels = {}
    for target, endings in (("cpu", ("py",)), ("sm90", ("py", "cu"))):
        kernels |= {f"{target}/linear_relu2__n1792_k512.{ending}": "new" for ending in endings}
        kernels |= {f"{target}/linear_leaky_relu2__n1792_k512.{ending}": "gone" for ending in endings}
        kernels |= {f"{target}/dgrad_mul_sqrt__n1792_k512.{ending}": "new" for ending in endings}
        kernels |= {f"{target}/dgrad_mul__n1792_k512.{ending}": "gone" for ending in endings}
    assert states == {**kernels, **pages}
    for target in ("cpu", "sm90"):
        _, come = lines(files, f"{target}/model.py")
        assert come == [
            "from .dgrad_mul_sqrt__n1792_k512 import dgrad_mul_sqrt",
            "from .linear_relu2__n1792_k512 import linear_relu2",
            '    """blocks.*.mlp: up, act, down. Keeps act for the backward."""',
            "        act = linear_relu2(x, up)",
            "        ctx.save_for_backward(act, down, x, up)",
            "        act, down, x, up = ctx.saved_tensors",
            "        down_dgrad = dgrad_mul_sqrt(d, down, act)",
            "            act = F.relu(F.linear(h, self.mlp.up)) ** 2",
        ]


def test_a_gate_brings_its_parameter_and_its_lines() -> None:
    files, states = changed(GOLF.replace("leaky_relu(x, 0.5) ** 2", "silu(gate) * x"))
    pages = dict.fromkeys(("PLAN.md", "manifest.json", "cpu/model.py", "sm90/model.py"), "changed")
    assert {name: state for name, state in states.items() if state == "changed"} == pages
    kernels = {name.rpartition("/")[2].partition("__")[0] for name in states.keys() - pages.keys()}
    kernels_of = {
        "cpu": ("dgrad_mul_mul", "linear_silu_mul"),
        "sm90": ("dgrad_silu_mul_pre_grad", "linear_silu_mul_pre"),  # where the library writes one product, it is kept
    }
    assert kernels == {"linear_leaky_relu2", "dgrad_mul", "dgrad_add", *kernels_of["cpu"], *kernels_of["sm90"]}
    for target in ("cpu", "sm90"):
        gone, come = lines(files, f"{target}/model.py")
        about = re.compile(r"\b(mlp|up|gate|act|down|slope|pre_x|d_x|\w*dgrad\w*|linear_\w+|silu)\b")
        other = [line for line in (*gone, *come) if line and not about.search(line) and "def backward" not in line]
        broken = {")", "0, h.shape[:-1]", "x = (", "x", "return ("}  # lines of calls of the group, which are longer now
        assert {line.strip() for line in other} <= broken
        assert come.count("        self.mlp = weights(up=(E, D), gate=(E, D), down=(D, E), residual=(D,))") == 1
        assert [line for line in come if line.startswith("from .")] == [
            "from .dgrad_add__n512_k1792 import dgrad_add",
            *(f"from .{kernel}__n1792_k512 import {kernel}" for kernel in kernels_of[target]),
        ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lr: 0.035", "lr: 0.034"),
        ("clip_norm: 0.3", "clip_norm: 0.4"),
        ("tokenizer: fineweb_1024_bpe.model", "tokenizer: bytes"),
        ("{orthogonal: 1.0}", "{orthogonal: 0.9}"),
        ("eval: {stride: 64}", "eval: {stride: 32}"),
    ],
)
def test_how_a_model_is_trained_touches_the_manifest_alone(before: str, after: str) -> None:
    assert before in GOLF
    files, states = changed(GOLF.replace(before, after))
    assert states == {"manifest.json": "changed"}
    assert [line.strip()[:6] for line in lines(files, "manifest.json")[1]] == ['"spec"']


def test_comments_layout_and_written_defaults_change_nothing() -> None:
    text = "# another comment\n" + re.sub(r"#.*", "", GOLF).replace("  tied: true", "  tied:  true")
    assert changed(text)[1] == {}
    written = GOLF.replace("  clip_norm: 0.3", "  clip_norm: 0.3\n  seed: 1337\n  validate_every: 0")
    assert changed(written)[1] == {}


def test_a_rule_of_storage_changes_the_plan_and_no_code() -> None:
    _, states = changed(GOLF.replace("default: {scheme: gptq, bits: 5}", "default: {scheme: gptq, bits: 4}"))
    assert states == {"manifest.json": "changed", "PLAN.md": "changed"}


def test_a_longer_context_changes_no_kernel() -> None:
    _, states = changed(GOLF.replace("context: 2048", "context: 1024"))
    assert set(states) == {"manifest.json", "PLAN.md", "cpu/model.py", "sm90/model.py"}


SCRIPT = """
import hashlib, json, random, sys
from pathlib import Path
from specc.compiler.build import compile_loaded
from specc.compiler.spec.check import load
from specc.compiler.plan.lock import lock_path, read_lock
from specc.compiler.text.yaml import parse

def shuffled(value):
    if isinstance(value, dict):
        items = list(value.items())
        random.shuffle(items)
        return {key: shuffled(item) for key, item in items}
    return [shuffled(item) for item in value] if isinstance(value, (list, tuple)) else value

seed = int(sys.argv[2])
random.seed(seed)
digests = {}
for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
    data = shuffled(json.loads(sys.argv[3])[path.stem])
    spec, source = load(json.dumps(data) if seed % 3 else path)
    files = compile_loaded(spec, source, (), read_lock(lock_path(path, spec.name))).files
    digests[path.stem] = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in files.items()}
print(json.dumps(digests))
"""


@tiers("C7", hash_seeds=(2, 40))
def test_bytes_depend_on_nothing_but_the_spec(trials: Trials, tmp_path: Path) -> None:
    """Two locales, five time zones and two working directories; a third read the files themselves, the others their
    mappings with keys shuffled anew. The bytes are those of the committed files."""
    (digests,) = digests_of(tmp_path, [(sys.executable, seed) for seed in range(1, trials["hash_seeds"] + 1)])
    committed = {
        path.stem: {name: hashlib.sha256(text.encode()).hexdigest() for name, text in committed_files(path).items()}
        for path in SPECS
    }
    assert json.loads(digests) == committed


def committed_files(spec: Path) -> dict[str, str]:
    """Returns the committed files of a spec, by path in its generated folder."""
    folder = ROOT / "generated" / spec.stem
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in files}


@soak("C7", versions_of_python=2)
def test_another_python_gives_the_same_bytes(trials: Trials, tmp_path: Path) -> None:
    """Python 3.11 and 3.12. SPECC_OTHER_PYTHON is the other interpreter, in which specc is installed."""
    other = os.environ.get("SPECC_OTHER_PYTHON")
    if other is None:
        pytest.skip("SPECC_OTHER_PYTHON is not set")
    versions = {
        subprocess.run([python, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True).stdout
        for python in (sys.executable, other)
    }
    assert len(versions) == trials["versions_of_python"]
    assert len(digests_of(tmp_path, [(python, seed) for seed in (1, 3) for python in (sys.executable, other)])) == 1


def digests_of(tmp_path: Path, runs: list[tuple[str, int]]) -> set[str]:
    """Returns the digests of all files of all committed specs that interpreters with seeds of hashes compute."""
    import ruamel.yaml

    specs = {path.stem: ruamel.yaml.YAML(typ="safe").load(path) for path in SPECS}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    locales, folders = ("C.UTF-8", "POSIX"), (ROOT, tmp_path)
    waiting: list[subprocess.Popen[str]] = []
    results: set[str] = set()

    def collect() -> None:
        process = waiting.pop(0)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        results.add(output)

    for python, seed in runs:
        environment = {
            "PYTHONHASHSEED": str(seed),
            "LC_ALL": locales[seed % 2],
            "PATH": os.environ["PATH"],
            "TZ": f"UTC-{seed % 5}",
        }
        command = [python, str(script), str(ROOT / "specs"), str(seed), json.dumps(specs)]
        folder = folders[seed // 2 % 2]
        waiting.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=-1, stderr=-1, text=True))
        if len(waiting) == 2:
            collect()
    while waiting:
        collect()
    assert all(json.loads(result).keys() == specs.keys() for result in results)
    return results


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(spec_data()))
    return path


def test_the_manifest_tells_digests_and_nodes(small: Path) -> None:
    built = compile_spec(small)
    manifest = json.loads(built.files["manifest.json"])
    assert manifest["spec"] == hashlib.sha256(canonical(built.spec).encode()).hexdigest()
    others = {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in built.files.items() if name != "manifest.json"
    }
    assert manifest["files"] == others
    assert manifest["nodes"] == {
        "cpu": {"blocks.*.mlp.down.dgrad": "dgrad_mul_sqrt__n12_k8.py", "blocks.*.mlp.up": "linear_relu2__n12_k8.py"}
    }


def test_an_override_is_a_part_of_the_spec(small: Path) -> None:
    plain, other = compile_spec(small), compile_spec(small, ("train.steps=7",))
    assert other.spec.train.steps == 7
    assert json.loads(plain.files["manifest.json"])["spec"] != json.loads(other.files["manifest.json"])["spec"]


def test_the_resolved_spec_reads_back() -> None:
    for path in SPECS:
        spec, _ = load(path)
        lock = read_lock(lock_path(path, spec.name))
        assert spec_of(canonical(spec)) == spec
        assert compile_loaded(spec_of(canonical(spec)), None, (), lock).files == committed_files(path)


def test_equal_requests_are_compiled_once_and_others_anew() -> None:
    """A request is equal if the text of its spec is, whatever objects it is made of."""
    spec, _ = load(GOLF)
    first = compiled(spec, ("sm90",), LOCK)
    assert compiled(spec_of(canonical(spec)), ["sm90"], LOCK) is first
    assert first.files == compile_loaded(spec, None, ("sm90",), LOCK).files
    others = [
        compiled(spec, ("cpu",), LOCK),
        compiled(spec, ("sm90",)),
        compiled(spec.plain, ("sm90",), LOCK),
        compiled(spec.model_copy(update={"name": "other"}), ("sm90",), LOCK),
    ]
    assert len({json.dumps(dict(built.files), sort_keys=True) for built in (first, *others)}) == 5


def test_one_target_of_several() -> None:
    whole = compile_spec(ROOT / "specs/gpt_mini.yaml")
    build = compile_spec(ROOT / "specs/gpt_mini.yaml", (), ("cpu",))
    assert set(build.plans) == {"cpu"}
    same = {name: text for name, text in whole.files.items() if name.startswith("cpu/")}
    assert {name: text for name, text in build.files.items() if name.startswith("cpu/")} == same


def test_errors_have_places_where_there_is_a_text() -> None:
    data = spec_data(fuse=({"blocks.*.nope": ["up", "act"]},))
    with pytest.raises(SpecError, match="S302"):
        compile_loaded(*load(json.dumps(data)))
    with pytest.raises(LoweringError, match="matches no part"):
        compile_loaded(load(json.dumps(data))[0], None)


def test_an_error_of_every_target_is_told_once() -> None:
    data = spec_data(fuse=({"blocks.*.nope": ["up", "act"]},), targets=("cpu", "sm90"))
    with pytest.raises(SpecError) as caught:
        compile_loaded(*load(json.dumps(data)))
    assert len(caught.value.diagnostics) == 1


def test_the_interface_is_names_shapes_and_storage() -> None:
    programs = compile_spec(ROOT / "specs/gpt_mini.yaml").plans["cpu"].programs
    storage = {param.name: "int5" for param in programs.params}
    digest = interface_digest(programs.params, storage)
    gpu = compile_spec(ROOT / "specs/gpt_mini.yaml").plans["sm90"].programs
    assert interface_digest(gpu.params, storage) == digest
    assert interface_digest(programs.params, {**storage, "embed.token": "int8"}) != digest


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "specc.cli", *arguments]


def test_two_builds_at_once_leave_a_whole_one(small: Path, tmp_path: Path) -> None:
    into = tmp_path / "generated"
    for _ in range(2):
        processes = [subprocess.Popen(command("build", str(small), "--into", str(into)), stdout=-1) for _ in range(3)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
        assert check(small, into) == ()
        for path in into.rglob("*.py"):
            path.unlink()
