"""What arrays are called in signatures, by the kind of number they hold; every floor takes these names from here.

Importing this imports numpy: where a module of the engine's side must do without it, import under `TYPE_CHECKING`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
