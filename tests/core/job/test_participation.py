"""Keys of a job that say when and how often devices are invited."""

import pytest

from isthmus.errors import JobError
from isthmus.job.section import Hours


def test_hours_of_another_form_are_refused():
    with pytest.raises(JobError, match="are not of the form 22:00-06:00"):
        Hours.parse("10-12")
    assert Hours.parse("sat,sun 10:00-12:00").days == ("sat", "sun")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("federated.selection=''", "federated.selection=''"),
        ("federated.selection_settings={a=1}", "selection_settings has no effect on selection='un"),
        ("federated.participation={hours=3}", "federated.participation.rounds is missing"),
        ("federated.participation.rounds=0", "federated.participation.rounds=0"),
        ("federated.hours=[{opens='22:00', closes='06:00'}]", "federated.hours.0.devices is miss"),
        ("federated.hours=[{devices='a', opens='25:00', closes='06:00'}]", "hours.0.opens='25:00'"),
        ("federated.utility.exploration=2", "federated.utility.exploration=2"),
        ("federated.utility.slowness=0", "utility has no effect on selection='uniform'; set sel"),
        ("federated.utility.pace=2", "unknown key federated.utility.pace"),
    ],
)
def test_a_wrong_key_is_refused_by_name(make_job, override, sentence):
    with pytest.raises(JobError) as caught:
        make_job(override)
    assert sentence in str(caught.value)
