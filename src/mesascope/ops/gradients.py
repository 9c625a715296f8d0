"""Attaching a closed-form gradient to a function."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable)


def with_closed_form(
    function: Function, forward: Callable, backward: Callable, *, static: tuple[int, ...] = ()
) -> Function:
    """`jax.custom_vjp`, keeping the function's type. `static` are the positions of non-array arguments."""
    wrapped = jax.custom_vjp(function, nondiff_argnums=static)
    wrapped.defvjp(forward, backward)
    return cast(Function, wrapped)
