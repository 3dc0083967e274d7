"""A submission that the tests of all files share. A test changes only a copy of it."""

from collections.abc import Iterator

import pytest
from submissions import Submission, new_submission


@pytest.fixture(scope="session")
def submission(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submission]:
    created = new_submission(tmp_path_factory.mktemp("submission"))
    yield created
    created.torch.close()
