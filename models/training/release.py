"""Put a trained policy in the place of the released one: what `learned` loads without a path.

Called by `faser policy release`. Weights and manifest are checked as the daemon checks them, and the manifest takes on
what an evaluation of that policy found: nothing is released without its figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..policies.network import Network, load_network, save_network
from ..policies.policy import PolicyError

NAME: Final = "policy"
FIGURES: Final = ("goodput", "ci", "envelope_ratio_min", "envelope_ratio_mean", "gap_closed")


def release(manifest: Path, evaluation: dict[str, Any], folder: Path) -> Path:
    """Write the policy and its figures into `folder`; return the new manifest.

    :param evaluation: the object that `faser evaluate --json` ends with, of policies with `learned:MANIFEST` among them
    :raises PolicyError: for a policy that the daemon would refuse, or an evaluation without it
    """
    network = load_network(manifest)
    released = Network(replace(network.manifest, results=_results(evaluation, str(manifest))), network.tensors)
    save_network(released, folder, NAME)
    return folder / f"{NAME}.json"


def _results(evaluation: dict[str, Any], manifest: str) -> dict[str, object]:
    name = f"learned:{manifest}"
    policies = evaluation.get("policies", {})
    if name not in policies:
        seen = ", ".join(policies) or "no policy"
        raise PolicyError(f"the evaluation has {seen}; expected {name} among them: faser evaluate --policies '{name}'")
    found = policies[name]
    return {key: evaluation.get(key) for key in ("worlds", "seeds")} | {
        key: value for key, value in found.items() if key in FIGURES or key.startswith("over_price")
    }
