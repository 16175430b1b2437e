"""How loops over requests are compiled, in the decision core and behind a cut, in place of many numpy calls.

With 64 requests a numpy call is nearly all overhead, and a record used to need several hundred. Machine code is kept
beside the source, else in the user's cache (or in NUMBA_CACHE_DIR), so that only the first start after an installation
compiles; where nothing can be written, others could write there too, or a user without a home has no cache, every start
does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba

CACHE_VARIABLE: Final = "NUMBA_CACHE_DIR"
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call and keep the machine code.

    It may use only functions and constants of its own file: numba looks for changes there and nowhere else.
    """
    return kept(function, error_model="numpy")


def kept(function: Function, **options: Any) -> Function:
    """Compile a function at its first call by numba's `options`, and keep the machine code where that can be done."""
    try:
        return cast(Function, numba.njit(cache=is_kept(function.__code__.co_filename), **options)(function))
    except RuntimeError:  # "no locator available": neither the package nor the user's cache can be written
        return cast(Function, numba.njit(**options)(function))


def is_kept(source: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the machine code of a source file has a place: beside it, or in a cache of this user's.

    numba looks for one in this order, and without a home takes a folder named ~ in whichever folder the process runs
    in: others may have written there, and what lies there is run.
    """
    named = environ.get(CACHE_VARIABLE, "")
    own = environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    places = [named, f"{os.path.dirname(source)}/__pycache__", own if os.path.isabs(own) else ""]
    return is_private(named) and any(_can_hold(place) for place in places if place)


def _can_hold(folder: str) -> bool:
    """Return whether files can be written into a folder, made if need be."""
    there = next(path for path in (Path(folder), *Path(folder).parents) if os.path.exists(path))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def is_private(folder: str) -> bool:
    """Return whether only this user can write into a folder of machine code; what lies there is run."""
    try:
        return not folder or not Path(folder).stat().st_mode & 0o022
    except FileNotFoundError:
        return True
    except OSError:  # a folder on the way is closed to us, or is none
        return False
