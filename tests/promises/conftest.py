"""The fixture `trials` of tests in two tiers; it records the results of `make soak`."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tiers import Trials, done_today, record

PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def trials(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Trials]:
    promise, numbers = request.param
    test = f"{request.node.path.name}::{request.node.originalname}"
    if request.node.get_closest_marker("soak") is None:
        yield numbers
        return
    if done_today(test, numbers):
        pytest.skip("passed today with as many trials")
    began = time.monotonic()
    yield numbers
    line = record(promise, test, numbers, time.monotonic() - began, request.node.stash.get(PASSED, False))
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{line}")
