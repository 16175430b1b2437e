"""The lease as a two-party protocol, model-checked: controllers that live and die, a link that loses, doubles, delays
and re-orders what they say. Never an expired action set in force, never two owners at once, epochs only ever rise; and
whoever heard last whom the engine obeyed is obeyed next, however its own clock stands.
"""

from __future__ import annotations

import copy
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from faser.controller.decision.session import epoch_above
from faser.engine_adapter.protocol import ActionSet, Release
from faser.engine_adapter.steering.lease import Lease

BOOT, OTHER = "boot", "another-boot"
K_MAX, MAX_STEPS, MAX_S = 6, 32, 1.0


class LeaseProtocol(RuleBasedStateMachine):
    """One engine, any number of controller lives (epochs), one hostile link."""

    wire = Bundle("wire")

    def __init__(self) -> None:
        super().__init__()
        self.lease = Lease(BOOT, K_MAX, MAX_STEPS, MAX_S)
        self.step, self.now_s = 0, 100.0
        self.epochs: dict[int, int] = {}  # epoch of a controller life -> last sequence
        self.told = [0]  # what the engine's hellos said, in order
        self.granted: ActionSet | None = None  # as it was sent
        self.granted_at = (0, 0.0)
        self.owners: list[tuple[int, int]] = []  # every grant, in order

    # -- controllers ----------------------------------------------------------------------------------------------

    @rule(age_days=st.integers(0, 400), hello=st.sampled_from([-1] * 4 + [-2, -3]))
    def take_over(self, age_days: int, hello: int) -> None:
        """Begin a life on a host that booted so long ago, with a hello that may have been on the way for long."""
        self.told.append(self.lease.epoch)
        clock_ns = age_days * 86_400 * 10**9 + random.Random(len(self.told)).randrange(1, 10**9)
        epoch = epoch_above(clock_ns, self.told[max(hello, -len(self.told))])
        assert epoch not in self.epochs, "two lives at one epoch"
        self.epochs[epoch] = 0
        if hello == -1:
            self._is_obeyed(epoch)

    def _is_obeyed(self, epoch: int) -> None:
        """See that an order of this epoch is taken, unless another one holds."""
        action = ActionSet(BOOT, epoch, 0, self.step, self.now_s, 1, [1], [1])
        is_held = self.lease.in_force(self.step, self.now_s) is not None
        assert copy.deepcopy(self.lease).offer(action, self.step, self.now_s) == ("owned" if is_held else None)

    @rule(target=wire, steps=st.integers(0, 100), seconds=st.floats(0.0, 3.0),
          length=st.integers(0, 64), mode=st.sampled_from(["active"] * 6 + ["canary", "advisory", "off"]),
          boot=st.sampled_from([BOOT] * 8 + [OTHER]), pick=st.randoms(use_true_random=False))  # fmt: skip
    def decide(self, steps, seconds, length, mode, boot, pick) -> ActionSet:  # type: ignore[no-untyped-def]
        if not self.epochs:
            self.epochs[1] = 0
        epoch = pick.choice(sorted(self.epochs))
        self.epochs[epoch] += 1
        return ActionSet(
            boot, epoch, self.epochs[epoch], self.step + steps, self.now_s + seconds, length, [1], [length], mode=mode
        )

    @rule(target=wire, pick=st.randoms(use_true_random=False))
    def give_back(self, pick) -> Release:  # type: ignore[no-untyped-def]
        return Release(BOOT, pick.choice(sorted(self.epochs)) if self.epochs else 1)

    # -- the link -------------------------------------------------------------------------------------------------

    @rule(message=consumes(wire))
    def lose(self, message: ActionSet | Release) -> None:
        pass

    @rule(message=consumes(wire))
    def deliver(self, message: ActionSet | Release) -> None:
        self._arrive(message)

    @rule(message=wire)
    def deliver_and_keep_for_later(self, message: ActionSet | Release) -> None:
        self._arrive(message)

    # -- the engine -----------------------------------------------------------------------------------------------

    @rule(steps=st.sampled_from([1, 2, 20, 33]), seconds=st.sampled_from([0.0, 0.01, 0.3, 1.5]))
    def run(self, steps: int, seconds: float) -> None:
        self.step += steps
        self.now_s += seconds

    def _arrive(self, message: ActionSet | Release) -> None:
        before = self.lease.in_force(self.step, self.now_s)
        if isinstance(message, Release):
            is_owner = bool(self.owners) and message.epoch == self.owners[-1][0]
            assert self.lease.release(message) == is_owner
            if is_owner:
                self.granted = None
            return
        sent = copy.deepcopy(message)
        if self.lease.offer(copy.deepcopy(message), self.step, self.now_s) is not None:
            assert self.lease.in_force(self.step, self.now_s) is before  # a refusal changes nothing
            return
        assert sent.boot_id == BOOT
        assert sent.mode in ("active", "canary")
        assert sent.valid_until_step >= self.step
        assert sent.valid_until_s >= self.now_s
        if before is not None:
            assert before.epoch == sent.epoch, "taken from its owner while it held"
        if self.owners:
            assert (sent.epoch, sent.sequence) > self.owners[-1]
            assert sent.epoch >= self.owners[-1][0]
        self.owners.append((sent.epoch, sent.sequence))
        self.granted, self.granted_at = sent, (self.step, self.now_s)

    @invariant()
    def what_is_in_force_was_granted_last_has_not_expired_and_fits(self) -> None:
        action = self.lease.in_force(self.step, self.now_s)
        granted = self.granted
        is_due = granted is not None and (
            self.step <= min(granted.valid_until_step, self.granted_at[0] + MAX_STEPS)
            and self.now_s <= min(granted.valid_until_s, self.granted_at[1] + MAX_S)
        )
        if action is None:
            assert not is_due, "given up before its time"
            return
        assert granted is not None
        assert is_due, "expired, and still in force"
        assert (action.epoch, action.sequence) == (granted.epoch, granted.sequence) == self.owners[-1]
        assert max([action.default_length, *action.lengths]) <= K_MAX


LeaseProtocol.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)
TestLeaseProtocol = LeaseProtocol.TestCase
