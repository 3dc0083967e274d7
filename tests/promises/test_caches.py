"""Folders whose files are loaded as code are private, and no one else can have put something into them."""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiers import Trials, tiers

from specc.compiler.spec.check import load
from specc.runtime.errors import IntegrityError
from specc.runtime.model import code_cache
from specc.runtime.model.load import instantiate
from specc.runtime.support import native

SPEC = Path(__file__).parents[2] / "specs" / "gpt_mini.yaml"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for variable in code_cache.CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for variable in code_cache.CACHES:
        os.environ.pop(variable, None)


def link(folder: Path) -> None:
    (folder.parent / "theirs").mkdir(parents=True)
    folder.symlink_to(folder.parent / "theirs")


def link_to_nowhere(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.symlink_to("/nowhere")


def file(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"")


def pipe(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    os.mkfifo(folder)


def with_mode(mode: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "planted.so").write_bytes(b"theirs")
        folder.chmod(mode)

    return make


def below_open_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)


ATTACKS: dict[str, Callable[[Path], None]] = {
    "a link": link,
    "a link to nowhere": link_to_nowhere,
    "a file": file,
    "a pipe": pipe,
    "writable by all": with_mode(0o777),
    "writable by all, sticky as /tmp": with_mode(0o1777),
    "writable by the group": with_mode(0o770),
    "writable by others alone": with_mode(0o702),
    "below a folder that all can write to": below_open_folder,
}


@tiers("C33", attacks_of_each_folder=(10, 10))
def test_attacks_on_each_folder_are_refused(trials: Trials, cache: Path, tmp_path: Path) -> None:
    assert len(ATTACKS) + 1 == trials["attacks_of_each_folder"]
    for number, (name, attack) in enumerate(ATTACKS.items()):
        for folder in code_cache.FOLDERS:
            place = tmp_path / f"{number}" / folder / "cache"
            attack(place / folder)
            os.environ["SPECC_CACHE_DIR"] = str(place)
            with pytest.raises(IntegrityError) as raised:
                native.cache_folder(folder)
            assert raised.value.exit_code == 5 and raised.value.hint, name
            place.chmod(0o700)


def test_a_folder_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code_cache.use_private_caches()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(cache).st_uid + 1)
    for variable in code_cache.CACHES:
        os.environ.pop(variable)
        with pytest.raises(IntegrityError, match="belongs to user"):
            code_cache.use_private_caches()


def test_a_folder_that_the_user_set_is_judged_too(tmp_path: Path) -> None:
    for variable in code_cache.CACHES:
        mine = tmp_path / variable
        mine.mkdir(mode=0o700)
        os.environ[variable] = str(mine)
    code_cache.use_private_caches()
    assert {variable: os.environ[variable] for variable in code_cache.CACHES} == {
        variable: str(tmp_path / variable) for variable in code_cache.CACHES
    }
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_somebody"  # of Torch, not the user
    code_cache.use_private_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    (tmp_path / "TRITON_CACHE_DIR").chmod(0o777)
    with pytest.raises(IntegrityError, match="has mode 777"):
        code_cache.use_private_caches()


def test_code_for_a_gpu_is_compiled_in_private_folders(cache: Path, tmp_path: Path) -> None:
    spec = load(SPEC, ("targets=[cpu, sm90]", "model.dim=32", "model.blocks.count=1"))[0]
    instantiate(spec, "cpu", tmp_path / "cpu")
    assert not cache.exists()  # nothing is compiled
    instantiate(spec, "sm90", tmp_path / "sm90")
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(cache / "triton")
    for folder in ("inductor", "triton"):
        assert stat.S_IMODE((cache / folder).stat().st_mode) == 0o700
