"""Faults of the real steps, each of which `isthmus privacy audit` has to find."""

import contextlib
import dataclasses
import itertools
from unittest.mock import patch

import torch

from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_clients.training.steps import private_steps
from isthmus_privacy.dp import clipping, noisy_vector
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.gaussian import KEY_BYTES, GaussianDraws
from isthmus_privacy.dp_sgd import examples, gradients
from isthmus_server.budgets import server_noise
from isthmus_server.budgets.budget import PrivacyBudget

FIXED_KEY = bytes(KEY_BYTES)


def weaker_sum():
    """Half of the noise of a server that adds it."""
    deviation = NoisePlan.deviation.fget
    return patch.object(NoisePlan, "deviation", property(lambda plan: deviation(plan) / 2))


def weaker_shares():
    """Half of the noise of each device of a secure sum."""
    add = noisy_vector.add_noise
    return patch.object(
        noisy_vector, "add_noise", lambda out, sigma, source: add(out, sigma / 2, source)
    )


def missing_shares():
    """Three of four devices of a secure sum are counted, and add no noise."""
    add = noisy_vector.add_noise
    numbers = itertools.count()

    def add_seldom(out, sigma, source):
        if next(numbers) % 4 == 0:
            add(out, sigma, source)

    return patch.object(noisy_vector, "add_noise", add_seldom)


def repeated_noise():
    """A server that adds the same noise in each round."""
    return patch.object(
        server_noise, "fresh_noise", lambda size: GaussianDraws(FIXED_KEY, size).row(0)
    )


def partial_noise():
    """A server that adds noise to the first quarter of the elements."""
    fresh = server_noise.fresh_noise

    def first_quarter(size):
        noise = fresh(size)
        noise[size // 4 :] = 0
        return noise

    return patch.object(server_noise, "fresh_noise", first_quarter)


def round_without_noise():
    """A server that adds no noise in the first round."""
    fresh = server_noise.fresh_noise
    numbers = itertools.count()
    return patch.object(server_noise, "fresh_noise", lambda size: fresh(size) * (next(numbers) > 0))


def step_without_noise():
    """No noise in the first of the ten steps of each device."""
    add = private_steps.add_noise
    numbers = itertools.count()

    def add_later(total, deviation):
        if next(numbers) % 10:
            add(total, deviation)

    return patch.object(private_steps, "add_noise", add_later)


def weaker_steps():
    """Half of the noise of each step on a device."""
    add = private_steps.add_noise
    return patch.object(
        private_steps, "add_noise", lambda total, deviation: add(total, deviation / 2)
    )


def repeated_steps():
    """The same noise in each step on a device."""

    def add(total, deviation):
        total += GaussianDraws(FIXED_KEY, len(total)).row(0).mul_(deviation).to(total)

    return patch.object(private_steps, "add_noise", add)


def no_steps_noise():
    """No noise in the steps on a device."""
    return patch.object(private_steps, "add_noise", lambda total, deviation: None)


def long_updates():
    """Updates that are not clipped."""
    return patch.object(clipping, "clip_to_norm", lambda vector, bound: False)


def long_gradients():
    """Gradients that are not clipped."""
    clipped = gradients.clipped_sum
    return patch.object(gradients, "clipped_sum", lambda parts, clip: clipped(parts, 1e9))


def layers_clipped():
    """Gradients of which each layer is clipped to the bound of the whole."""
    clipped = gradients.clipped_sum

    def of_layers(parts, clip):
        return torch.cat([clipped([part], clip) for part in parts])

    return patch.object(gradients, "clipped_sum", of_layers)


def frequent_examples():
    """Examples that are in a step with three times the probability."""
    sample = examples.poisson_sample
    return patch.object(
        examples, "poisson_sample", lambda own, probability: sample(own, 3 * probability)
    )


def repeated_examples():
    """Examples that take part twice in each step that has them."""
    sample = examples.poisson_sample
    return patch.object(
        examples, "poisson_sample", lambda own, probability: 2 * sample(own, probability)
    )


def repeated_devices():
    """Devices that are asked again after the rounds that the noise was made for."""
    return patch.object(PrivacyBudget, "allows", lambda budget, device: True)


def charged_to_one():
    """A ledger that charges each round to the first device of all that were asked."""
    charge_of = PrivacyBudget._charge_of

    def of_first(budget, what, event, number, attempt, devices):
        return charge_of(budget, what, event, number, attempt, devices[:1])

    return patch.object(PrivacyBudget, "_charge_of", of_first)


def unlimited_devices():
    """Devices that train on after the budget of their examples is spent."""
    return patch.object(ExamplesAccount, "_check", lambda account, plan, run, charges: None)


def too_little_noise():
    """Noise that is made for twice the budget."""
    of = NoisePlan.of.__func__

    def planned(cls, privacy, rounds, measurements=0):
        weaker = privacy.model_copy(update={"epsilon": 2 * privacy.epsilon})
        plan = of(cls, weaker, rounds, measurements)
        return dataclasses.replace(plan, privacy=privacy)

    return patch.object(NoisePlan, "of", classmethod(planned))


@contextlib.contextmanager
def small_charges():
    """A ledger that charges each round as if it had four times the noise."""
    event = NoisePlan.event

    def charged(plan, run):
        of_round = event(plan, run)
        if run in ("", "audit"):  # asked by somebody who plans
            return of_round
        return dataclasses.replace(of_round, noise_multiplier=4 * of_round.noise_multiplier)

    with patch.object(NoisePlan, "event", charged):
        yield
