"""Text and figures of participants: escaped, or refused, whatever they contain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.test_printable import ANY_TEXT

from isthmus.errors import UpdateError
from isthmus.transport.requests import failure
from isthmus.wire import link_pb2
from isthmus_server.storage.events import ParticipantProgress
from isthmus_server.transport.limits import negotiate
from isthmus_server.transport.sanitize import check_figures, reason_of

SENT = ANY_TEXT.filter(lambda text: text.encode("utf-8", "ignore").decode() == text)
"""What protobuf can carry: no surrogates."""


@given(SENT)
def test_a_reason_is_one_printable_line(text):
    reason = reason_of(failure(text))
    assert reason
    assert reason.isprintable()


@given(SENT)
def test_a_note_is_one_printable_line(text):
    assert ParticipantProgress.from_message("a", link_pb2.Progress(note=text)).note.isprintable()


@given(SENT)
def test_a_name_is_printable_or_refused(text):
    for hello in (link_pb2.Hello(name=text, instance="i"), link_pb2.Hello(name="n", instance=text)):
        hello.version_min = hello.version_max = 2
        hello.role = link_pb2.CLIENT
        version, sentence = negotiate(link_pb2.Envelope(hello=hello))
        assert bool(version) == (0 < len(text) <= 128 and text.isprintable())
        assert sentence.isprintable()


@given(SENT, st.sampled_from(["training", "evaluation", "profile"]))
def test_the_name_of_a_figure_is_printable_or_refused(text, where):
    trained = link_pb2.Trained(**{where: {text: 1.0}})
    if text.isprintable() and len(text) <= 100:
        check_figures(trained)
    else:
        with pytest.raises(UpdateError) as caught:
            check_figures(trained)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("where", ["training", "evaluation", "profile"])
def test_more_figures_than_a_log_can_keep_are_refused(where):
    figures = {f"figure {number}": 1.0 for number in range(4096)}
    trained = link_pb2.Trained(**{where: figures})
    check_figures(trained)
    trained.evaluation["one more"] = 1.0
    with pytest.raises(UpdateError, match="it reported 4097 figures, and the most are 4096; have"):
        check_figures(trained)


def test_figures_of_steps_are_few_and_finite():
    check_figures(link_pb2.Trained(step_figures=1000 * [{"step": 1, "loss": 2.0}]))
    with pytest.raises(UpdateError, match="it has figures of 1001 steps, and not 1000"):
        check_figures(link_pb2.Trained(step_figures=1001 * [{"step": 1}]))
    for figure in ("loss", "gradient_norm", "learning_rate", "units_per_second"):
        with pytest.raises(UpdateError, match="a figure of step 7 is not finite"):
            check_figures(link_pb2.Trained(step_figures=[{"step": 7, figure: float("nan")}]))


@pytest.mark.parametrize("figure", [1e308, -1e308, float("inf"), float("nan")])
def test_a_figure_that_would_make_a_mean_infinite_is_refused(figure):
    with pytest.raises(UpdateError, match="its time or one of its figures is"):
        check_figures(link_pb2.Trained(training={"loss": figure}))


@pytest.mark.parametrize("count", ["steps", "examples"])
def test_a_count_that_no_transcript_can_hold_is_refused(count):
    check_figures(link_pb2.Trained(**{count: 1 << 53}))
    with pytest.raises(UpdateError, match=f"^it reported 9007199254740993 {count}, and the most"):
        check_figures(link_pb2.Trained(**{count: (1 << 53) + 1}))
