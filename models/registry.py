"""Names to policies: the parser of --policy."""

from __future__ import annotations

from collections.abc import Callable

from ..env.spaces import Capabilities
from .policies.policy import Policy, PolicyError

POLICIES = {
    "off": "no speculation",
    "fixed:K": "K draft tokens for every request, e.g. fixed:3",
    "table:ROWS": "draft tokens by requests in the batch, e.g. table:1-4=3,5-16=1,17-=0",
    "turns:K": "K draft tokens, and each split of the engine's device in turn: to see what they take",
    "price": "each request drafts until its next token stops paying for its row, by history and drafter confidence",
    "price:even": "the same without objectives: a token is worth the same whoever's it is",
    "price:values:SETTINGS": "the same with other values of tokens, e.g. price:values:urgency=20,reserve=3",
    "price:history": "the same without the drafter's confidence",
    "price:drafter": "the same without drafts copied from a request's own text",
    "price:pace=LIMITS": "price within milliseconds per token by vLLM's priority, e.g. price:pace=0:40,1:400",
    "learned": "trained in simulation, see models/weights/policy.json; learned:PATH takes another manifest",
    "POLICY+stages:CHOICE": "beside it where a pipeline is cut: a number of stages, turns:STEPS or measured",
    "goodput": "rival: as vLLM's adaptive verification, tokens ranked by survival over the cost of verifying",
    "smartspec": "rival: one length by goodput under a moving acceptance rate (SmartSpec)",
    "adaspec": "rival: rounds and threshold by goodput for the batch; adaspec:MS within a time per token (AdaSpec)",
    "hybrid:K": "rival: a copy of what followed the same words before, else K draft tokens (vLLM's pull request 24344)",
    "arctic:K": "rival: a copy if it promises K tokens, else K draft tokens (Arctic Inference)",
    "adaserve": "rival: first the drafts that requests need for their objectives, then price's (AdaServe)",
    "urgent:K": "rival: K draft tokens for who needs more than a token a step to be in time, none for others",
    "behind:K": "rival: K draft tokens for who is behind its objective, none for others (least slack first)",
    "ema": "rival: a tier by the running mean of accepted tokens (SGLang's adaptive mode)",
    "bandit": "rival: UCB over lengths, for each octave of batch sizes (BanditSpec, Nightjar)",
    "gplcb": "rival: a Gaussian process' lower bound on seconds per token (the FASER paper); needs the extra train",
}


def handed_over(policy: Policy | None) -> int:
    """Return how many observations a policy left to another one to decide on; most policies decide on all."""
    return int(getattr(policy, "handed_over", 0))


def make_policy(spec: str, capabilities: Capabilities) -> Policy:
    """Return the policy that `spec` names; raise PolicyError with the possible names otherwise."""
    from .policies.baselines import FixedLength, LengthTable, Off, SplitTurns
    from .policies.price import PricePolicy
    from .policies.profiling import ProfilingPolicy
    from .policies.token_values import TokenValues

    inner, has_stages, choice = spec.strip().partition("+stages:")
    if has_stages:
        from .stages.staged_policy import with_stages

        return with_stages(make_policy(inner, capabilities), choice, capabilities)
    name, _, argument = spec.strip().partition(":")
    if name == "off" and not argument:
        return Off()
    if name == "fixed" and argument:
        return FixedLength.parse(argument, capabilities)
    if name == "table" and argument:
        return LengthTable.parse(argument, capabilities)
    if name == "turns" and argument:
        return SplitTurns.parse(argument, capabilities)
    if name == "price" and argument in ("", "history", "drafter"):
        return PricePolicy(capabilities, use_confidence=argument != "history", use_copies=argument != "drafter")
    if name == "price" and argument == "even":
        return PricePolicy(capabilities, values=None)
    if name == "price" and argument.startswith("values:"):
        return PricePolicy(capabilities, values=TokenValues.parse(argument.removeprefix("values:")))
    if name == "price" and argument.startswith("pace="):
        from .rivals.pace import Pace, PacedPolicy

        limits = argument.removeprefix("pace=")
        return PacedPolicy(PricePolicy(capabilities, values=None), Pace.parse(limits), limits)
    if name == "learned":
        from .learned.learned import LearnedPolicy

        return LearnedPolicy.parse(argument, capabilities)
    if rival := _rival(name, argument, capabilities):
        return rival
    if name == "survey":  # not among POLICIES: it serves `faser profile`, no operator
        return ProfilingPolicy.parse(argument or "0", capabilities)
    if name == "force":  # nor is this one, which serves `faser demo --tour`
        from .forced.forced_policy import ForcedPolicy

        return ForcedPolicy.parse(argument, capabilities)
    raise PolicyError(f"unknown policy {spec!r}: possible are {', '.join(POLICIES)}")


def _rival(name: str, argument: str, capabilities: Capabilities) -> Policy | None:
    from .rivals.bandit import Bandit
    from .rivals.ema import AcceptanceEma
    from .rivals.goodput import AdaptiveVerification, AdaSpec, SmartSpec

    if name in ("hybrid", "arctic") and argument:
        from .rivals.hybrid import CopiesFirst

        return CopiesFirst.parse(name, argument, capabilities)
    if name in ("urgent", "behind") and argument:
        from .rivals.by_objective import ForSome

        return ForSome.parse(name, argument, capabilities)
    if name == "adaspec":
        return AdaSpec.parse(argument, capabilities)
    if argument:
        return None
    if name == "adaserve":
        from .policies.price import PricePolicy
        from .rivals.adaserve import AdaServe

        return AdaServe(PricePolicy(capabilities, values=None))
    if name == "gplcb":
        from .rivals.gp_lcb import GaussianProcessBound

        return GaussianProcessBound(capabilities)
    makers: dict[str, Callable[[Capabilities], Policy]] = {
        "goodput": AdaptiveVerification, "smartspec": SmartSpec, "ema": AcceptanceEma, "bandit": Bandit,
    }  # fmt: skip
    return makers[name](capabilities) if name in makers else None
