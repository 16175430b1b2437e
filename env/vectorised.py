"""How the simulator's kernel is compiled, so that its loops over the slots become vector instructions.

Three habits of its files make them so (measure with env/simulator/speed.py): a loop is in a function of its own that
is given columns, which share no element; it loads what it may need before it chooses, because a choice between
numbers is no branch; and arrays of which views are taken have no owner, whose references would be counted.
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
        if hasattr(self.state.flags, "noalias"):  # numba's own, for parfors (0.65); without it loops are only slower
            self.state.flags.noalias = True
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


def apart(function: Function) -> Function:
    """Compile a part of the kernel whose arguments lie apart: what it writes through one it sees through no other.

    tests/env/test_kernel.py looks for the same column given twice. Not cached by itself: numba would not notice a
    change in what it calls.
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
    """Do nothing: numba keeps what is used here until here."""
    return len(owners)
