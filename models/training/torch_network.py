"""The network in torch and stable-baselines3's policy around it: for training alone, never imported by the daemon.

Padded batches of requests with a mask.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from ..learned.network import LAYERS, OUTPUTS, Manifest, Network, shapes

FIRST_LOG_STD = -1.2


class DeepSets(nn.Module):
    """The twin of network.Network; as a critic it has one output, a value."""

    def __init__(self, hidden: int, *, is_critic: bool = False) -> None:
        super().__init__()
        sizes = shapes(hidden)
        if is_critic:
            sizes["head"] = (2 * hidden, 1)
        self.layers = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
        nn.init.orthogonal_(self.layers["head"].weight, 1.0 if is_critic else 0.01)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers["head"].bias)  # type: ignore[arg-type]

    def silence(self) -> None:
        """Have all outputs be 0, whatever goes in, until they are learnt."""
        nn.init.zeros_(self.layers["head"].weight)  # type: ignore[arg-type]

    def forward(self, requests: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
        """Return (batch, outputs) from (batch, slots, features), (batch, features)."""
        layers = self.layers
        mask = live(requests).unsqueeze(-1)
        encoded = torch.tanh(layers["encode_2"](torch.tanh(layers["encode_1"](requests))))
        count = mask.sum(dim=1).clamp(min=1.0)
        mean = (encoded * mask).sum(dim=1) / count
        most = torch.where(mask > 0, encoded, torch.full_like(encoded, -1.0)).amax(dim=1)
        most = torch.where(mask.sum(dim=1) > 0, most, torch.zeros_like(most))
        trunk = torch.cat([mean, most, overall], dim=-1)
        trunk = torch.tanh(layers["trunk_2"](torch.tanh(layers["trunk_1"](trunk))))
        result: torch.Tensor = layers["head"](trunk)
        return result


def live(requests: torch.Tensor) -> torch.Tensor:
    """Return (batch, slots) 1 for rows that hold a request: it is decoding or its prompt is being computed."""
    return (requests[..., 0] + requests[..., 1] > 0.5).to(requests.dtype)


class SetPolicy(ActorCriticPolicy):
    """Actor and critic of their own; outputs are the means of Gaussians."""

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], lr_schedule: Schedule,
        hidden: int = 32, **arguments: Any,
    ) -> None:  # fmt: skip
        self.hidden = hidden
        super().__init__(observation_space, action_space, lr_schedule, net_arch=[], **arguments)

    def _build(self, lr_schedule: Schedule) -> None:
        self.actor = DeepSets(self.hidden)
        self.critic = DeepSets(self.hidden, is_critic=True)
        self.log_std = nn.Parameter(torch.full((len(OUTPUTS),), FIRST_LOG_STD))
        make: Any = self.optimizer_class
        self.optimizer = make(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions, values and log probabilities."""
        output = self.actor(obs["requests"], obs["globals"])
        actions = self._chosen(output, deterministic)
        return actions, self.predict_values(obs), self._log_prob(output, actions)

    def evaluate_actions(
        self, obs: Any, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return values, log probabilities and entropy of these actions."""
        output = self.actor(obs["requests"], obs["globals"])
        entropy = (0.5 + 0.5 * math.log(2.0 * math.pi) + self.log_std).sum().expand(len(output))
        return self.predict_values(obs), self._log_prob(output, actions), entropy

    def predict_values(self, obs: Any) -> torch.Tensor:
        """Return (batch, 1)."""
        values: torch.Tensor = self.critic(obs["requests"], obs["globals"])
        return values

    def _predict(self, observation: Any, deterministic: bool = False) -> torch.Tensor:
        return self._chosen(self.actor(observation["requests"], observation["globals"]), deterministic)

    def _chosen(self, output: torch.Tensor, deterministic: bool) -> torch.Tensor:
        return output if deterministic else output + self.log_std.exp() * torch.randn_like(output)

    def _log_prob(self, output: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        off = (actions - output) / self.log_std.exp()
        each: torch.Tensor = -0.5 * off.square() - self.log_std - 0.5 * math.log(2.0 * math.pi)
        return each.sum(dim=-1)


def to_network(actor: DeepSets, manifest: Manifest) -> Network:
    """Return the numpy twin."""
    tensors = {}
    for name in LAYERS:
        layer = actor.layers[name]
        assert isinstance(layer, nn.Linear)
        tensors[f"{name}.weight"] = np.ascontiguousarray(layer.weight.detach().numpy().T, np.float32)
        tensors[f"{name}.bias"] = layer.bias.detach().numpy().astype(np.float32)
    return Network(manifest, tensors)
