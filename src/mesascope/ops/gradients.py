"""Attaching a closed-form gradient to a function, and keeping the user's settings out of ours."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable)


def broadcasting(function: Function) -> Function:
    """Numpy's broadcasting within, though a user may have forbidden it in code of their own."""

    @wraps(function)
    def inner(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return cast(Function, inner)


def with_closed_form(
    function: Function, forward: Callable, backward: Callable, *, static: tuple[int, ...] = ()
) -> Function:
    """`jax.custom_vjp`, keeping the function's type. `static` are the positions of non-array arguments."""
    wrapped = jax.custom_vjp(function, nondiff_argnums=static)
    wrapped.defvjp(forward, broadcasting(backward))  # traced when the forward pass is long over
    return cast(Function, wrapped)
