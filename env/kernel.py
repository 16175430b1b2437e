"""How the simulator's kernel is compiled, so that its loops over the slots become vector instructions.

Three habits of its files make them so, each worth a fifth of a step's time or more (benchmark: env/bench.py):
a loop is in a function of its own that is given columns, which share no element; it loads what it may need before it
chooses, because a choice between numbers is no branch; and nothing counts references to views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import cgutils
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

Function = TypeVar("Function", bound=Callable[..., Any])


class _NoAlias(CompilerBase):  # type: ignore[misc]
    """numba's own passes, with the promise that no two arguments of a function share an element."""

    def define_pipelines(self) -> list[Any]:
        self.state.flags.noalias = True
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


def compiled(function: Function) -> Function:
    """Compile a part of the kernel, whose arguments share no element unless it only reads them.

    Not cached by itself: numba would not notice a change in what it calls.
    """
    compile_ = numba.njit(nogil=True, error_model="numpy", pipeline_class=_NoAlias)
    return cast(Function, compile_(function))


@intrinsic  # type: ignore[untyped-decorator]
def borrowed(_context: Any, array: Any) -> Any:
    """Return the array without its owner, who must outlive it: see `hold`.

    Of views of owned arrays numba counts the references, with atomic instructions, and a step makes hundreds of views.
    """

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        view = make_array(array)(context, builder, arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        return view._getvalue()

    return array(array), code


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def row(array: Any, index: int) -> Any:
    """Return one engine's part of an array that the caller's caller owns."""
    return borrowed(array)[index]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def hold(owners: Any) -> int:
    """Do nothing: what is used here has lived until here."""
    return len(owners)
