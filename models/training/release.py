"""Put a trained policy in the place of the released one: what `learned` loads without a path.

Called by `faser policy release`. Weights and manifest are checked as the daemon checks them, and the manifest takes on
what an evaluation of that policy found: nothing is released without its figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..learned.network import Network, load_network, save_network
from ..policies.policy import PolicyError

NAME: Final = "policy"


def release(manifest: Path, evaluation: dict[str, Any], folder: Path) -> Path:
    """Write the policy and its figures into `folder`; return the new manifest.

    :param evaluation: what `faser evaluate --objectives -o FILE` writes, with `learned:MANIFEST` among the policies
    :raises PolicyError: for a policy that the daemon would refuse, or an evaluation without it
    """
    network = load_network(manifest)
    released = Network(replace(network.manifest, results=_results(evaluation, str(manifest))), network.tensors)
    save_network(released, folder, NAME)
    return folder / f"{NAME}.json"


def _results(evaluation: dict[str, Any], manifest: str) -> dict[str, object]:
    name = f"learned:{manifest}"
    standing, worlds = evaluation.get("standing"), evaluation.get("worlds")
    if not isinstance(standing, dict) or not isinstance(worlds, list) or not isinstance(standing.get(name), dict):
        seen = ", ".join(map(str, standing)) if isinstance(standing, dict) else "no policy with objectives"
        raise PolicyError(
            f"the evaluation has {seen}; expected {name} among them: "
            f"faser evaluate --objectives --policies 'price {name}'"
        )
    return {"worlds": len(worlds), "seeds": evaluation.get("seeds"), **standing[name]}
