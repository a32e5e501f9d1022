"""Fixtures for all tests, and the rule that a test leaves no thread behind."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["HF_HUB_CACHE"] = os.devnull  # no models of whoever runs the tests
os.environ["MDI_PLACEMENT"] = "even"  # a test's cut must not depend on how fast the machine is at that moment

import sys  # noqa: E402

# The processes that tests start, and those of pytest itself, compile the project's modules once and not each again, also
# where the shell forbids bytecode: that costs a second of each start, and a minute of each process of pytest.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import gc  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The suite tries the same examples each time, so that it says the same each time; MDI_FUZZ=1 looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("new" if os.environ.get("MDI_FUZZ") else "same")

# A shell's background jobs ignore SIGINT, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where MDI_KERNELS names the instruction set of the kernels, as in `make numerical`, tests that name one themselves are
    left out, and those that compute in torch: they do the same without it."""
    if os.environ.get("MDI_KERNELS", "off") == "off":
        return
    from mdi.kernels.build import INSTRUCTION_SETS

    named = {one.name for one in INSTRUCTION_SETS} | {"torch"}

    def is_same(item: pytest.Item) -> bool:
        params: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        return params.get("force", params.get("name")) in named

    config.hook.pytest_deselected(items=[item for item in items if is_same(item)])
    items[:] = [item for item in items if not is_same(item)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage collection looks at what is to stay: modules and the collected tests live as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


DAEMONS_OF_LIBRARIES = ("tqdm", "pytest_timeout", "pytest-timeout", "Thread-tqdm", "InductorSubproc")


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of this process compute in torch, as where there is no compiler: for faults that a test puts into its stage."""
    from mdi.kernels import library

    monkeypatch.setattr(library, "load", lambda: None)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with so long a context, and no token that ends a text, that a run lasts until something ends it."""
    from tiny_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("ckpt") / "endless", with_end=False, block_size=65536)


@pytest.fixture(autouse=True, scope="session")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Models are looked for, and their use is marked, in no folder of whoever runs the tests."""
    os.environ["MDI_STORE"] = str(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [t for t in threading.enumerate() if t not in before and not _is_library_thread(t)]
        if not left:
            return
        left[0].join(0.2)
    raise AssertionError(f"threads left behind: {[t.name for t in left]}")


def _is_library_thread(thread: threading.Thread) -> bool:
    return any(name in thread.name or name in type(thread).__module__ for name in DAEMONS_OF_LIBRARIES)
