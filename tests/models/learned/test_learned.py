"""The learned policy: numpy says what torch says, order means nothing, and what is not whole is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from faser.engine_adapter.protocol import Prune, RequestEvent, RequestRow, StepRecord, StopRule
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.layout.observation import GLOBAL_FEATURES, REQUEST_FEATURES
from faser.env.spaces import Action, Capabilities
from faser.models.embedded.tensorfile import PendingTensor, Tensor, write
from faser.models.learned import learned
from faser.models.learned.advice import SPAN_DECISIONS
from faser.models.learned.learned import RELEASED, LearnedPolicy
from faser.models.learned.network import Manifest, Network, load_network, save_network, shapes
from faser.models.policies.policy import PolicyError
from faser.models.policies.price import PricePolicy
from faser.models.policies.token_values import VALUES, TokenValues
from faser.models.registry import make_policy

K_MAX, HIDDEN = 6, 32
CAPABILITIES = Capabilities(k_max=K_MAX)


def make_network(seed: int = 0, scale: float = 0.5) -> Network:
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (inputs, outputs) in shapes(HIDDEN).items():
        tensors[f"{name}.weight"] = (scale * random.standard_normal((inputs, outputs))).astype(np.float32)
        tensors[f"{name}.bias"] = (scale * random.standard_normal(outputs)).astype(np.float32)
    size = len(GLOBAL_FEATURES)
    return Network(Manifest(HIDDEN, K_MAX, "", {}, {}, (-1.0,) * size, (1.0,) * size), tensors)


def make_state(
    requests: int, steps: int = 30, handles: list[int] | None = None, *, tpot_ms: float | None = 25.0
) -> EngineState:
    """Return a state in which request i has i % (K_MAX + 1) drafts accepted, and tokens are wanted at a pace."""
    state = EngineState(CAPABILITIES)
    for counter in range(steps):
        arrivals = [] if counter else [
            RequestEvent("arrival", h, 0.0, 40, f"r{h}", tpot_ms=tpot_ms) for h in handles or range(1, requests + 1)
        ]  # fmt: skip
        rows = [
            RequestRow(h, 1 + K_MAX, K_MAX, K_MAX, K_MAX, 0, h % (K_MAX + 1), 1 + h % (K_MAX + 1), 50 + h, False)
            for h in handles or range(1, requests + 1)
        ]
        record = StepRecord(
            "b", counter, counter, 0.02 * counter, 0.02, 0.0, 0.0, 0.0, 0.005, 0.0, 0.0, requests, 0, 0, requests,
            K_MAX * requests, 0.1, None, None, 0, 0, 0, 0, arrivals, rows,
        )  # fmt: skip
        observe(state, record)
    return state


def test_numpy_says_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("stable_baselines3")
    from faser.models.training.torch_network import DeepSets, to_network

    torch.manual_seed(0)
    twin, random = DeepSets(HIDDEN), np.random.default_rng(1)
    with torch.no_grad():
        for values in twin.parameters():
            values.copy_(0.5 * torch.randn_like(values))
    network = to_network(twin, make_network().manifest)
    for live in (0, 1, 7, 64):
        requests = random.uniform(-1.0, 1.0, (1, 64, len(REQUEST_FEATURES))).astype(np.float32)
        requests[..., 0], requests[..., 1] = 1.0, 0.0
        requests[:, live:] = 0.0
        overall = random.uniform(-1.0, 1.0, (1, len(GLOBAL_FEATURES))).astype(np.float32)
        with torch.no_grad():
            expected = twin(torch.from_numpy(requests), torch.from_numpy(overall)).numpy()[0]
        np.testing.assert_allclose(network.forward(requests[0, :live], overall[0]), expected, atol=1e-5)


def test_the_order_of_requests_means_nothing() -> None:
    network, random = make_network(), np.random.default_rng(2)
    requests = random.uniform(-1.0, 1.0, (20, len(REQUEST_FEATURES))).astype(np.float32)
    overall = random.uniform(-1.0, 1.0, len(GLOBAL_FEATURES)).astype(np.float32)
    shuffled = network.forward(requests[random.permutation(20)], overall)
    np.testing.assert_allclose(shuffled, network.forward(requests, overall), atol=1e-5)


def test_each_handle_keeps_its_length_whatever_the_order_of_appearance() -> None:
    handles = [9, 2, 14, 5, 11, 3]
    found = []
    for order in (handles, handles[::-1]):
        state, policy = make_state(6, handles=order), LearnedPolicy(make_network(), CAPABILITIES)
        found.append(dict(zip(state.handles().tolist(), policy.act(state).lengths.tolist(), strict=True)))
    assert found[0] == found[1]


@pytest.mark.parametrize("tpot_ms", [None, 25.0])
def test_without_objectives_nobody_is_asked(tpot_ms: float | None) -> None:
    """Of any network, then: the answer is price's to the bit, its reason included."""
    loud, price = LearnedPolicy(make_network(scale=3.0), CAPABILITIES), PricePolicy(CAPABILITIES)
    states = [make_state(6, tpot_ms=tpot_ms) for _ in range(2)]
    for _ in range(2 * SPAN_DECISIONS):
        own, plain = loud.act(states[0]), price.act(states[1])
        assert (own.reason == plain.reason) is (tpot_ms is None)
        if tpot_ms is None:
            assert own.lengths.tobytes() == plain.lengths.tobytes()
            assert msgspec.structs.replace(own, lengths=None) == msgspec.structs.replace(plain, lengths=None)


@pytest.mark.parametrize("requests", [0, 1, 1000])
def test_an_empty_and_a_crowded_engine_get_lengths_that_can_be_had(requests: int) -> None:
    state = make_state(requests, steps=3)
    action = LearnedPolicy(make_network(scale=3.0), CAPABILITIES).act(state)
    assert action.lengths.shape == (requests,)
    assert ((action.lengths >= 0) & (action.lengths <= K_MAX)).all()
    assert 0 <= action.default_length <= K_MAX
    assert action.reason


def test_an_observation_that_is_no_number_goes_to_price_and_is_counted() -> None:
    policy, state = LearnedPolicy(make_network(), CAPABILITIES), make_state(4)
    for _ in range(SPAN_DECISIONS):
        assert "learned: urgency" in policy.act(state).reason
    state.load.kv_usage = float("nan")
    action = policy.act(state)
    assert "NaN: price decides" in action.reason
    assert policy.unreadable == 1


def test_a_world_unlike_training_goes_to_price_and_is_counted() -> None:
    network = make_network()
    size = len(GLOBAL_FEATURES)
    narrow = Network(replace(network.manifest, low=(0.98,) * size, high=(1.0,) * size), network.tensors)
    policy = LearnedPolicy(narrow, CAPABILITIES)
    assert "unlike training: price decides" in policy.act(make_state(4)).reason
    assert policy.strange == 1


def test_all_that_price_chose_survives_the_handing_over() -> None:
    state = make_state(4)
    stop = StopRule([1.0] * K_MAX, [0.0] * K_MAX, [0.5] * K_MAX, [0.5] * K_MAX)
    whole = Action(np.array([1, 2, 3, 4]), 2, 0.25, split=1, frontier=3, prune=Prune(5, 0.5), stop=stop, reason="paid")

    class Price:
        def act(self, state: EngineState) -> Action:
            return whole

        def follow(self, values: TokenValues) -> None:
            assert values == VALUES

    policy = LearnedPolicy(make_network(), CAPABILITIES)
    policy._price = Price()  # type: ignore[assignment]
    state.load.kv_usage = float("nan")
    action = policy.act(state)
    assert action.reason == "the observation holds NaN: price decides; paid"
    for name in ("lengths", "default_length", "price", "split", "frontier", "prune", "stop"):
        assert getattr(action, name) is getattr(whole, name), name
    assert policy.handed_over == 1


def test_a_path_in_the_home_of_nobody_is_refused_in_one_line() -> None:
    with pytest.raises(PolicyError, match=r"^policy 'learned:~nobody-at-all/x.json': no such home; expected [^\n]+$"):
        make_policy("learned:~nobody-at-all/x.json", CAPABILITIES)


# --- the files ---


def test_what_is_saved_is_loaded_by_its_name(tmp_path: Path) -> None:
    network = make_network()
    save_network(network, tmp_path, "policy")
    again = load_network(tmp_path / "policy.json")
    assert again.manifest == replace(network.manifest, sha256=again.manifest.sha256)
    assert all((again.tensors[name] == values).all() for name, values in network.tensors.items())
    spec = f"learned:{tmp_path / 'policy.json'}"
    assert make_policy(spec, CAPABILITIES).name == spec


def rewrite(folder: Path, name: str, value: object) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def poison(folder: Path) -> None:
    network = make_network()
    network.tensors["head.bias"][0] = np.nan
    save_network(network, folder, "policy")


def shorten(folder: Path) -> None:
    tensors = make_network().tensors
    values = tensors["head.bias"]
    path = folder / "policy.safetensors"
    write(path, [PendingTensor("head.bias", "F32", values.shape, lambda: Tensor("F32", values))])
    from faser.models.embedded.cache import sha256_of

    rewrite(folder, "sha256", sha256_of(path))


@pytest.mark.parametrize(
    ("harm", "hint"),
    [
        (lambda folder: rewrite(folder, "observation_version", 0), "observation_version is 0"),
        (lambda folder: rewrite(folder, "manifest_version", 99), "manifest_version is 99"),
        (lambda folder: rewrite(folder, "global_features", ["load"]), "global_features"),
        (lambda folder: rewrite(folder, "hidden", 16), "expected"),
        (lambda folder: rewrite(folder, "hidden", True), "hidden True"),
        (lambda folder: rewrite(folder, "head", "price"), "head is price, this version has values; train again"),
        (lambda folder: rewrite(folder, "low", [0.0]), "low and high"),
        (lambda folder: rewrite(folder, "sha256", "0" * 64), "sha256"),
        (lambda folder: (folder / "policy.json").write_text("[]"), "JSON object"),
        (lambda folder: (folder / "policy.json").write_text("{"), "JSON manifest"),
        (lambda folder: (folder / "policy.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "policy.safetensors").unlink(), "weights"),
        (lambda folder: (folder / "policy.safetensors").write_bytes(b"PK\x03\x04 a zip"), "sha256"),
        (shorten, "encode_1.weight is nothing"),
        (poison, "NaN or infinity"),
    ],
)
def test_files_that_are_not_whole_or_of_another_layout_are_refused(
    harm: Callable[[Path], object], hint: str, tmp_path: Path
) -> None:
    save_network(make_network(), tmp_path, "policy")
    harm(tmp_path)
    with pytest.raises(PolicyError) as caught:
        make_policy(f"learned:{tmp_path / 'policy.json'}", CAPABILITIES)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_runtime_needs_numpy_alone() -> None:
    code = (
        "import sys; import faser.models.learned.learned;"
        "print([m for m in ('torch', 'gymnasium', 'stable_baselines3', 'sklearn', 'pickle5') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(not RELEASED.exists(), reason="no policy released")
def test_the_released_policy_is_saved_as_it_was_loaded(tmp_path: Path) -> None:
    save_network(load_network(RELEASED), tmp_path, "policy")
    for name in ("policy.json", "policy.safetensors"):
        assert (tmp_path / name).read_bytes() == (RELEASED.parent / name).read_bytes()


@pytest.mark.skipif(not RELEASED.exists(), reason="no policy released")
def test_the_released_policy_is_whole_and_acts() -> None:
    policy = make_policy("learned", CAPABILITIES)
    assert learned.RELEASED.with_suffix(".card.json").exists() or load_network(RELEASED).manifest.training
    for requests in (2, 8, 48):  # an engine with room for 256
        assert policy.act(make_state(requests)).reason.startswith("learned: urgency"), requests
