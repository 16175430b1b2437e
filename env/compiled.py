"""How the estimates of the decision core are compiled: one loop over the requests in place of many numpy calls.

With 64 requests a numpy call is nearly all overhead, and a record used to need several hundred. Machine code is kept
beside the source (or in NUMBA_CACHE_DIR), so that only the first start after an installation compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call and keep the machine code.

    It may use only functions and constants of its own file: numba looks for changes there and nowhere else.
    """
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))
