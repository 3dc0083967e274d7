"""Private folders for the caches of torch.compile and Triton, whose files are loaded as code.

By default, torch uses a folder of a known name in /tmp, which another user can create first.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from specc.runtime.support.native import cache_folder, private_folder

# The variable that each compiler reads, and the name of its folder in the cache of specc.
CACHES: Mapping[str, str] = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def use_private_caches() -> None:
    """Sets the variables of `CACHES`, for this process and those that it starts. Folders that the user set are kept.

    Raises IntegrityError if a folder is a link, belongs to another user, or is writable by others.
    """
    for variable, name in CACHES.items():
        chosen = os.environ.get(variable)
        os.environ[variable] = str(private_folder(Path(chosen)) if chosen else cache_folder(name))
