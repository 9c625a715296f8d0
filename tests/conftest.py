"""Strict arithmetic for every test: float64 available, no silent dtype promotion.

Most of the time goes into compiling, so programs are compiled with few optimizations, except in the modules that
say `OPTIMIZED = True`: those that measure rounding errors or run the programs that users run. On a GPU all are: kernels
are what is tested there.
"""

import gc
import signal

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A shell has what it starts in the background ignore Ctrl-C, and so would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def standard_promotion():
    """For what uses optax, which adds integers to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly(request):
    quickly = jax.default_backend() == "cpu" and not getattr(request.module, "OPTIMIZED", False)
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    # Every compiled program maps memory, and a process may have only so many mappings before XLA crashes.
    jax.clear_caches()
    gc.collect()
