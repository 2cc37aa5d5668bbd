"""What every test shares: threads, seeds, poisoned memory, and the markers that pick tests.

Memory that the package asks for uninitialised comes back full of NaN (integers: their largest value), so that a
result which reads what nobody wrote is never right by luck. Only calls made by the package's own files are changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

PACKAGE = "nemotron_mamba2"
SEED = 20240

# In CI the drawn examples are the same in every run; elsewhere they are new each time, so that more is seen.
hypothesis.settings.register_profile(
    "suite", deadline=None, max_examples=50, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    skip_slow = pytest.mark.skip(reason="slow: give --slow to run it")
    has_gpu = torch.cuda.is_available()
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(skip_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)


def pytest_configure(config: pytest.Config) -> None:
    # At the sizes that tests use, threads only wait for each other; the suite runs one process per core instead.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator with a fixed seed, new for each test."""
    return torch.Generator().manual_seed(SEED)


@pytest.fixture(autouse=True, scope="session")
def poison() -> Iterator[None]:
    """Fill what the package allocates uninitialised, by `torch.empty` and its kin."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def _poisoned(allocate):
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (caller == PACKAGE or caller.startswith(PACKAGE + ".")) and kwargs.get("out") is None:
            with torch.no_grad():
                _fill(tensor)
        return tensor

    return poisoned


def _fill(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max)
