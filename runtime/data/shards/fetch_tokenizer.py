"""Downloads the tokenizers that the specs in this repository name, for `specc data fetch`."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.hub import Kind, RemoteFile, Repository, Say, client, download, requests
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.ranks import rank_file, ranks_of
from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import write_atomically


def _same(path: Path) -> bytes:
    return path.read_bytes()


def _ranks(path: Path) -> bytes:
    return rank_file(ranks_of(json.loads(path.read_bytes()), path))


@dataclass(frozen=True, slots=True)
class HubTokenizer:
    """A tokenizer on the Hugging Face hub.

    Attributes:
        repository, path: the repository, and the path of the tokenizer file in the repository.
        kind: whether the repository is a model or a data set.
        content: a function that maps the path of the downloaded file to the bytes of the tokenizer file.
    """

    repository: str
    path: str
    kind: Kind = "model"
    content: Callable[[Path], bytes] = _same


# The keys are the names that specs use. Meta and Google grant access only to accounts that have accepted their license.
TOKENIZERS: Mapping[str, HubTokenizer] = {
    "gpt2.tiktoken": HubTokenizer("openai-community/gpt2", "tokenizer.json", content=_ranks),
    "llama3.tiktoken": HubTokenizer("meta-llama/Llama-3.2-1B", "original/tokenizer.model"),
    "qwen3.json": HubTokenizer("Qwen/Qwen3-0.6B", "tokenizer.json"),
    "gemma3.model": HubTokenizer("google/gemma-3-1b-pt", "tokenizer.model"),
}


def fetch_tokenizer(name: str, out: Path, say: Say, repository: str | None = None, revision: str | None = None) -> Path:
    """Downloads a tokenizer to the file `name` in the folder `out`. Opens the tokenizer to check the file.

    Args:
        name: a key of TOKENIZERS.
        out: the folder to write to.
        say: called with a message about the file.
        repository: the repository to download from. None selects the repository of the tokenizer in TOKENIZERS.
        revision: a branch, tag or commit of the repository. None selects the default branch.

    Returns:
        The path of the file.

    Raises:
        DataError: if the file exists already, the repository does not have the tokenizer, or the downloaded file is not
            a valid tokenizer.
        DataIntegrityError: if the downloaded file does not match the digest or size that the hub states.
        EnvironmentFailure: if huggingface_hub is not installed, the hub does not respond or denies access, or the file
            cannot be written.
    """
    wanted, target = TOKENIZERS[name], out / name
    where = repository or wanted.repository
    if target.exists():
        raise DataError(f"{target} already exists", "use this file, or remove it")
    with requests(where):
        api = client().HfApi()
        commit = str(api.repo_info(where, repo_type=wanted.kind, revision=revision).sha)
        entries = api.get_paths_info(where, [wanted.path], repo_type=wanted.kind, revision=commit)
    source = Repository(where, wanted.kind, commit)
    if not entries:
        raise DataError(f"{source} has no {wanted.path}", "name another --repo or --revision")
    folder = out / f".{name}.download"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = wanted.content(download(source, RemoteFile.of(entries[0]), folder, say))
        trial = folder / name
        trial.write_bytes(content)
        open_tokenizer(str(trial))
        write_atomically(target, [content])
    except OSError as error:
        raise cannot_write(target, error, "name another --out") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target
