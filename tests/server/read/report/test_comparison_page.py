"""The page with the curves of a comparison."""

import re

from isthmus_server.read.pages.comparison_page import Curve, comparison_page

VALUES = [1, 2, 4, "weighted", "projected", *(f"<{number}>" for number in range(9))]


def curve(rate, seed, *accuracies, key="federated.local_epochs"):
    rounds = {number: {"accuracy": value} for number, value in enumerate(accuracies, 1)}
    end = {"accuracy": accuracies[-1]} if accuracies else {}
    number = VALUES.index(rate)
    return Curve(number, f"{key}={rate}", seed, {key: rate}, rounds, end)


def labels(page):
    return re.findall(r"<circle[^>]*><title>([^<]*)</title>", page)


def test_each_variant_has_a_line_with_the_mean_of_its_seeds():
    page = comparison_page(
        "digits", [curve(1, 1, 0.2, 0.4), curve(1, 2, 0.4, 0.6), curve(2, 1, 0.5, 0.7)], now=0.0
    )
    assert "federated.local_epochs=1, round 1: 0.3" in labels(page)
    assert "federated.local_epochs=1, round 2: 0.5" in labels(page)
    assert "federated.local_epochs=2, round 2: 0.7" in labels(page)
    assert 'aria-label="accuracy against rounds: 2 lines"' in page


def test_a_round_that_one_seed_has_not_measured_is_left_out():
    page = comparison_page("digits", [curve(1, 1, 0.2, 0.4), curve(1, 2, 0.4)], now=0.0)
    assert "federated.local_epochs=1, round 1: 0.3" in labels(page)
    assert not any("round 2" in label for label in labels(page))


def test_the_ends_are_drawn_against_a_key_that_is_a_number():
    page = comparison_page(
        "digits", [curve(4, 1, 0.5), curve(1, 1, 0.2), curve(1, 2, 0.4)], now=0.0
    )
    assert "accuracy against federated.local_epochs" in page
    assert "federated.local_epochs=1: 0.3, the mean" in labels(page)
    assert "federated.local_epochs=1, seed 2: 0.4" in labels(page)


def test_words_are_not_an_axis():
    curves = [curve(word, 1, 0.5, key="strategy.merge") for word in ("weighted", "projected")]
    page = comparison_page("digits", curves, now=0.0)
    assert "Delivered models" not in page


def test_a_ninth_variant_is_dashed_and_text_is_escaped():
    curves = [curve(rate, 1, 0.5, 0.6) for rate in VALUES]
    page = comparison_page("<b>", curves, now=0.0)
    assert '<polyline class="series0 again"' in page
    assert "<b>" not in page
    assert "&lt;8&gt;" in page


def test_runs_without_any_measurement_have_a_page():
    assert "One seed." in comparison_page("digits", [curve(1, 1)], now=0.0)


def test_the_ends_are_those_of_the_delivered_models_and_not_of_the_last_rounds():
    rounds = {1: {"accuracy": 0.9}, 2: {"accuracy": 0.4}}
    curves = [
        Curve(number, f"lr={number}", 1, {"lr": number}, rounds, {"accuracy": 0.9})
        for number in range(2)
    ]
    page = comparison_page("digits", curves, now=0.0)
    assert "<h2>Delivered models</h2>" in page
    assert "lr=1, seed 1: 0.9" in labels(page)
    assert "lr=1, seed 1: 0.4" not in labels(page)


def test_variants_that_read_alike_have_a_line_each():
    curves = [
        Curve(number, "x=1", 1, {"x": value}, {1: {"accuracy": value}}, {})
        for number, value in enumerate([1, 1.0])
    ]
    page = comparison_page("digits", curves, now=0.0)
    assert 'aria-label="accuracy against rounds: 2 lines"' in page
