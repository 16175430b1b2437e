"""How loops over requests are compiled, in the decision core and behind a cut, in place of many numpy calls.

With 64 requests a numpy call is nearly all overhead, and a record used to need several hundred. Machine code is kept
beside the source, else in the user's cache (or in NUMBA_CACHE_DIR), so that only the first start after an installation
compiles; where nothing can be written, or others could write there too, every start does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba

CACHE_VARIABLE: Final = "NUMBA_CACHE_DIR"
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call and keep the machine code.

    It may use only functions and constants of its own file: numba looks for changes there and nowhere else.
    """
    is_kept = is_private(os.environ.get(CACHE_VARIABLE, ""))
    try:
        return cast(Function, numba.njit(cache=is_kept, error_model="numpy")(function))
    except RuntimeError:  # "no locator available": neither the package nor the user's cache can be written
        return cast(Function, numba.njit(error_model="numpy")(function))


def is_private(folder: str) -> bool:
    """Return whether only this user can write into a folder of machine code; what lies there is run."""
    return not folder or not Path(folder).exists() or not Path(folder).stat().st_mode & 0o022
