"""The interpreter switch, before anything imports triton, and the marks."""

import os
from pathlib import Path

import pytest
import torch

from k3lab.kda.runtime import interpret_without_gpu

interpret_without_gpu()
HAS_GPU = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA or ROCm device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device is visible"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: natively on a GPU if there is one, else under the interpreter on the CPU."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="module")
def one_thread():
    """For tiny operators: threads only cost, and a CPU sums in one order with one of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiling_env(tmp_path: Path) -> dict[str, str]:
    """An environment for a subprocess that compiles kernels: no interpreter, a cache of its own."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
