import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.errors import JobError
from isthmus.job import Job, job_schema, load_job, parse_job, read_job, with_changes
from isthmus.job.federated import MAX_SECURE_COHORT
from isthmus.job.section import FREE, MAX_REAL, MIN_REAL, Section, sentences
from isthmus.job.tables import JobTables

FINITE = st.floats(-MAX_REAL, MAX_REAL).filter(lambda value: not 0 < abs(value) < MIN_REAL)
EXTREME = [1e308, -1e308, 5e-324, -5e-324, 1e-39, math.inf, -math.inf, math.nan]
SMALLEST = 'name = "digits"\n[task]\nsource = "task.py:Digits"\n'


def test_the_smallest_job_has_a_name_and_a_task():
    job = parse_job(SMALLEST)
    assert (job.name, job.task.source, job.rounds) == ("digits", "task.py:Digits", 10)


def test_a_job_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SMALLEST, encoding="utf-8-sig")
    assert load_job(path) == parse_job(SMALLEST)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sed=1", "job: unknown key sed; did you mean seed?"),
        ("federated.zzz=0.1", "job: unknown key federated.zzz; known here: "),
        (
            "federated.epsilon=1",
            "job: unknown key federated.epsilon; write federated.privacy.epsilon or "
            "datacenter.privacy.epsilon or privacy.epsilon",
        ),
        ("federated.attempts=1", "job: unknown key federated.attempts; write attempts w"),
        ("cohort=4", "job: unknown key cohort; write federated.cohort"),
        (
            "task.rounds=4",
            "job: unknown key task.rounds; write rounds or federated.participation.rounds",
        ),
        ("federated.cohrt=1", "job: unknown key federated.cohrt; did you mean cohort?"),
        (
            "time.zzz=1",
            "job: unknown key time.zzz; known here: join_seconds, cohort_seconds, round_seconds, "
            "least_rate, secure_step_seconds, secure_upload_seconds, lease_seconds",
        ),
        (
            "strategy.server_optimizer.nam='Adam'",
            "job: unknown key strategy.server_optimizer.nam; did you mean name?",
        ),
        (
            "strategy.schedule=[{regime='hybrid', rounds=1, zzz=1}]",
            "job: unknown key strategy.schedule.0.zzz",
        ),
        ("rounds=1099511627776", "job: rounds: must be at most 2147483647, and is 1099511627776"),
        ("rounds=0", "job: rounds=0: input should be greater than or equal to 1"),
        ("seed=-1", "job: seed=-1: input should be greater than or equal to 0"),
        ("seed=4294967296", "job: seed=4294967296: input should be less than 4294967296"),
        ("budget=0", "job: budget=0: input should be greater than 0"),
        ("budget=inf", "job: budget=inf: input should be a finite number"),
        ("prices.client_update=nan", "job: prices.client_update=nan: input should be"),
        ("time.secure_step_seconds=0", "job: time.secure_step_seconds=0: input should be greater"),
        ("time.join_seconds=inf", "job: time.join_seconds=inf: input should be a finite number"),
        (
            "federated.cohort=many",
            "job: federated.cohort='many': input should be a valid integer",
        ),
        ("federated=3", "job: federated=3: must be a table"),
        (
            "datacenter.zero_stage=4",
            "job: datacenter.zero_stage=4: input should be less than or equal to 3",
        ),
        (
            "datacenter.optimizer_on_load=forget",
            "job: datacenter.optimizer_on_load='forget': input should be 'reset' or 'keep'",
        ),
        ("name=../escape", "job: name='../escape': string should match pattern"),
        (
            "strategy.target_metric={name='loss'}",
            "job: strategy.target_metric: set at_least for a metric that rises or at_most for one "
            "that falls, and not both",
        ),
        (
            "strategy.schedule=[{regime='edge', rounds=1}]",
            "job: strategy.schedule.0.regime='edge': input should be 'datacenter', 'federated'",
        ),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence(override, sentence):
    with pytest.raises(JobError) as caught:
        parse_job(SMALLEST, [override])
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["federated.cohort=8", "federated.quorum=9"],
            "job: federated: quorum=9 is above cohort=8; lower one or raise the other",
        ),
        (
            ["federated.groups={minimum=9}"],
            "job: federated: groups.minimum=9 is above cohort=8, so that no group could be summed; "
            "lower one or raise the other",
        ),
        (
            ["federated.groups={}", "federated.cohort=20", "federated.secure_aggregation=false"],
            "job: federated: groups needs secure_aggregation = true, mode = 'rounds' and no "
            "flower; remove groups, or change these",
        ),
        (
            ["federated.groups={}", "federated.cohort=20", "federated.mode=buffered"],
            "job: federated: groups needs secure_aggregation = true, mode = 'rounds' and no "
            "flower; remove groups, or change these",
        ),
        (
            ["federated.compression={}", "federated.secure_aggregation=false"],
            "job: federated: compression needs secure_aggregation = true, mode = 'rounds' and no "
            "flower; remove compression, or change these",
        ),
        (
            ["federated.compression={}", "federated.groups={}", "federated.cohort=20"],
            "job: federated: compression keeps one remainder on each device, which belongs to the "
            "sum of all devices, and groups sums them by group; remove one of them",
        ),
        (
            ["datacenter.compression={}"],
            "job: datacenter.compression is for rounds in which several datacenters train and no "
            "devices do, and strategy.policy='alternate' may have others; set it to "
            '"datacenter", or remove the compression',
        ),
        (
            ["datacenter.compression.keep=0", "strategy.policy=datacenter"],
            "job: datacenter.compression.keep=0: input should be greater than or equal to 1",
        ),
        (
            ["federated.local_epochs=1", "federated.local_steps=1"],
            "job: federated: set local_epochs or local_steps, not both",
        ),
        (
            ["strategy.policy=schedule"],
            "job: strategy: policy='schedule' needs at least one phase in strategy.schedule",
        ),
        (
            ["strategy.objective=time"],
            "job: strategy: objective='time' needs a target_metric, such as "
            '{ name = "accuracy", at_least = 0.9 }',
        ),
        (
            ["time.lease_seconds=60", "time.round_seconds=60"],
            "job: time: lease_seconds=60 must be below round_seconds=60, or a lost participant "
            "is never detected within its round",
        ),
    ],
)
def test_conflicting_values_are_named_together(overrides, sentence):
    with pytest.raises(JobError) as caught:
        parse_job(SMALLEST, overrides)
    assert str(caught.value) == sentence


def test_all_errors_are_reported_at_once():
    with pytest.raises(JobError, match=r"rounds=0: .*; unknown key sed; did you mean seed\?"):
        parse_job(SMALLEST, ["rounds=0", "sed=1"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "job: name is missing"),
        ('name = "a"\n[task]', "job: task.source is missing"),
    ],
)
def test_keys_without_a_default_are_required(text, sentence):
    with pytest.raises(JobError) as caught:
        parse_job(text)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rounds=3", "rounds", 3),
        ("rounds = 3", "rounds", 3),
        ("name=other", "name", "other"),
        ("name='other'", "name", "other"),
        ("task.source=a.py:B", "task.source", "a.py:B"),
        ("strategy.datacenter_weight=0.5", "strategy.datacenter_weight", 0.5),
        ("task.settings.deep.deeper=[1, 2]", "task.settings", {"deep": {"deeper": [1, 2]}}),
        (
            "strategy.server_optimizer.options={lr=0.1}",
            "strategy.server_optimizer.options",
            {"lr": 0.1},
        ),
    ],
)
def test_set_takes_toml_values_and_bare_words(override, key, value):
    found = parse_job(SMALLEST, [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("override", ["rounds", "=3", "", "federated..cohort=3", ".rounds=3"])
def test_set_without_a_key_and_a_value_is_refused(override):
    with pytest.raises(JobError, match=r"--set .* is not of the form key\.sub=value"):
        parse_job(SMALLEST, [override])


def test_set_cannot_descend_into_a_value():
    with pytest.raises(JobError, match="'source' is a value, not a table"):
        parse_job(SMALLEST, ["task.source.deeper=1"])


def test_the_last_set_wins_over_the_first_and_over_the_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("rounds = 1\n" + SMALLEST)
    assert load_job(path).rounds == 1
    assert load_job(path, ["rounds=2", "rounds=3"]).rounds == 3


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("rounds = 0\n" + SMALLEST)
    with pytest.raises(JobError, match=rf"^{path}: rounds=0"):
        load_job(path)
    path.write_text("rounds = = 0")
    with pytest.raises(JobError, match=rf"^{path} is not valid TOML: .*line 1"):
        load_job(path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(JobError, match=rf"^{path} cannot be read: "):
        load_job(path)


def test_a_job_file_that_is_missing_or_a_folder_is_one_sentence(tmp_path):
    with pytest.raises(JobError, match=r"^there is no job file .*nowhere\.toml$"):
        load_job(tmp_path / "nowhere.toml")
    with pytest.raises(
        JobError, match=rf"^{tmp_path} is a directory; .*, and it has no \.toml file$"
    ):
        load_job(tmp_path)
    (tmp_path / "mine.toml").write_text(SMALLEST)
    advice = f"name the job file in it, such as {tmp_path / 'mine.toml'}"
    with pytest.raises(JobError, match=rf"^{tmp_path} is a directory; {advice}$"):
        load_job(tmp_path)


PLAIN = "federated.secure_aggregation=false"


@pytest.mark.parametrize(("cohort", "needed"), [(1, 1), (2, 2), (4, 3), (8, 6), (10, 8)])
def test_the_quorum_is_three_quarters_of_the_cohort_unless_set(cohort, needed):
    job = parse_job(SMALLEST, [f"federated.cohort={cohort}", PLAIN])
    assert job.federated.needed == needed


def test_a_configured_quorum_replaces_the_default():
    job = parse_job(SMALLEST, ["federated.cohort=8", "federated.quorum=2", PLAIN])
    assert job.federated.needed == 2


@pytest.mark.parametrize(("cohort", "quorum", "least"), [(3, 2, 3), (8, 4, 5), (100, 56, 57)])
def test_a_secure_sum_needs_a_sufficient_quorum(cohort, quorum, least):
    settings = [f"federated.cohort={cohort}", f"federated.quorum={quorum}"]
    with pytest.raises(JobError, match=f"needs a quorum of at least {least} with cohort={cohort}"):
        parse_job(SMALLEST, settings)
    assert parse_job(SMALLEST, [settings[0], f"federated.quorum={least}"])


def test_a_cohort_that_is_too_small_for_a_secure_sum_is_to_be_raised():
    with pytest.raises(JobError, match="at least 3 with cohort=2, not 2; raise cohort, or set"):
        parse_job(SMALLEST, ["federated.cohort=2"])


@pytest.mark.parametrize("table", ["privacy", "federated.privacy", "datacenter.privacy"])
def test_a_table_that_a_job_may_lack_knows_its_keys(table):
    with pytest.raises(JobError, match=f"unknown key {table}.epsilom; did you mean epsilon"):
        parse_job(SMALLEST, [f"{table}.epsilom=4"])


def test_a_sentence_that_says_where_does_not_say_it_twice():
    settings = [f"datacenter.privacy.{key}" for key in ("epsilon=4", "delta=0.1", "examples=100")]
    parallel = ["datacenter.data_parallel=1", "datacenter.zero_stage=0"]
    with pytest.raises(JobError, match=r"^job: datacenter\.privacy: delta=0\.1 is not below"):
        parse_job(SMALLEST, [*settings, *parallel])


def test_a_secure_cohort_that_no_message_holds_is_refused_when_the_job_is_loaded():
    limit = MAX_SECURE_COHORT
    refused = f"federated: cohort={limit + 1} is above {limit}, the most devices of a secure sum; "
    with pytest.raises(JobError, match=refused):
        parse_job(SMALLEST, [f"federated.cohort={limit + 1}"])
    secure = parse_job(SMALLEST, [f"federated.cohort={limit}"]).federated
    with pytest.raises(JobError, match=f"cohort={limit + 1} is above {limit}"):  # of a policy
        secure.for_cohort(limit + 1)
    assert parse_job(SMALLEST, [f"federated.cohort={limit + 1}", PLAIN])


@pytest.mark.parametrize(
    ("invited", "exact", "expected"),
    [
        (39, False, (30, 24)),  # the same part of the cohort as the job's quorum
        (13, False, (10, 10)),  # the minimum
        (12, False, None),  # 9 would be summed
        (12, True, (12, 10)),
    ],
)
def test_a_group_has_a_quorum_of_its_own(invited, exact, expected):
    settings = ("federated.cohort=100", "federated.quorum=80", "federated.over_selection=1.3")
    job = parse_job(SMALLEST, [*settings, "federated.groups={minimum=10}"])
    part = job.federated.for_group(invited, exact=exact)
    assert (None if part is None else (part.cohort, part.needed)) == expected


def test_with_changes_does_not_modify_the_original():
    job = parse_job(SMALLEST, ["budget=5"])
    other = with_changes(job, {"strategy.policy": "federated", "seed": 7, "budget": None})
    assert (other.strategy.policy, other.seed, other.budget) == ("federated", 7, None)
    assert (job.strategy.policy, job.seed, job.budget) == ("alternate", 0, 5)


def test_with_changes_validates():
    job = parse_job(SMALLEST)
    with pytest.raises(JobError, match=r"^federated: quorum=99 is above cohort=8"):
        with_changes(job, {"federated.quorum": 99})


def test_a_job_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse_job(SMALLEST).rounds = 3


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.integers() | FINITE | st.text() | st.booleans() | st.none(),
    )
)
def test_a_participant_reads_the_job_that_the_server_validated(settings):
    job = with_changes(parse_job(SMALLEST), {"task.settings": settings})
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert Job.model_validate(json.loads(json.dumps(job.model_dump(mode="json")))) == job


def sections(kind):
    yield kind
    for inner in kind.__subclasses__():
        yield from sections(inner)


@pytest.mark.parametrize(
    ("section", "field"),
    [(kind, name) for kind in sections(Section) for name in kind.model_fields],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_field_has_a_description(section, field):
    kind = getattr(section.model_fields[field].annotation, "__name__", "")
    if issubclass(section, JobTables) and kind.endswith("Section"):
        assert section.model_fields[field].annotation.__doc__
    else:
        assert section.model_fields[field].description


def test_the_schema_contains_the_descriptions():
    cohort = job_schema()["$defs"]["FederatedSection"]["properties"]["cohort"]
    assert cohort["description"] == "Number of updates in each round."


def test_a_flower_strategy_and_secure_aggregation_exclude_each_other(make_job):
    strategy = 'federated.flower.strategy={name="Krum"}'
    assert make_job(strategy).federated.flower.strategy.name == "Krum"
    with pytest.raises(JobError) as refused:
        make_job(strategy, "federated.secure_aggregation=true")
    assert str(refused.value) == (
        "job: federated: flower.strategy.name='Krum' works on single updates, and with "
        "secure_aggregation the server learns only their sum; set secure_aggregation = false if "
        "it may see each of them, or remove the strategy"
    )


def test_settings_without_effect_on_an_app_are_refused(make_job):
    app = 'federated.flower.app="app.py:app"'
    assert make_job(app).federated.flower.strategy.name == "FedAvg"
    with pytest.raises(JobError, match=r"local_steps has no effect on flower.app='app.py:app'"):
        make_job(app, "federated.local_steps=3")


def test_an_app_cannot_be_combined_with_gradient_transfer(make_job):
    app = 'federated.flower.app="app.py:app"'
    with pytest.raises(JobError) as refused:
        make_job(app, "strategy.merge=transfer")
    assert str(refused.value) == (
        'job: strategy.merge="transfer" has devices add the datacenter\'s gradient to their steps, '
        "and federated.flower.app='app.py:app' makes its own steps; use \"weighted\" or "
        '"projected"'
    )


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name":' * 100_000, f'"{"x" * 10**6}"'])
def test_an_invalid_job_is_reported_in_one_bounded_sentence(text):
    with pytest.raises(
        JobError, match=r"^this version of Isthmus cannot read the job, .*: '.{50,100}\.\.\.: "
    ) as caught:
        read_job(text)
    assert len(str(caught.value)) < 300


def test_an_evaluation_on_more_devices_than_there_are_is_refused():
    keys = ["federated.clients=40", "federated.cohort=10", "evaluation.devices=60"]
    with pytest.raises(JobError, match=r"at least 45 of them .* and there are 40; lower it"):
        parse_job(SMALLEST, keys)
    assert parse_job(SMALLEST, [*keys, "simulation.clients=45"]).evaluation.devices == 60
    assert parse_job(SMALLEST, [*keys, "federated.clients=0"]).evaluation.devices == 60


def test_a_table_and_a_key_in_it_can_be_changed_together():
    changes = {"task.settings": (table := {"lr": 0.1}), "task.settings.hidden": 4}
    job = with_changes(parse_job(SMALLEST), changes)
    assert job.task.settings == {"lr": 0.1, "hidden": 4}
    assert table == {"lr": 0.1}  # other jobs are made from it


def tables(section, known):
    """The classes of a table and of all tables in it."""
    known.add(section)
    for field in section.model_fields.values():
        for kind in parts_of(field.annotation) - known:
            if isinstance(kind, type) and issubclass(kind, Section):
                tables(kind, known)
    return known


def parts_of(annotation):
    return {annotation}.union(*(parts_of(each) for each in get_args(annotation)))


def fields_of(kind):
    """The fields of all tables that may have a number of a kind; not those of free tables."""
    return [
        (table, name)
        for table in sorted(tables(Job, set()), key=lambda table: table.__name__)
        for name, field in table.model_fields.items()
        if kind in parts_of(field.annotation) and FREE not in field.metadata
    ]


WHOLE_NUMBERS = fields_of(int)
REAL_NUMBERS = fields_of(float)


@pytest.mark.parametrize(
    ("section", "name"),
    WHOLE_NUMBERS,
    ids=lambda each: getattr(each, "__name__", each),
)
def test_every_whole_number_has_a_bound_that_messages_and_tables_hold(section, name):
    """Rounds of 2^40 once made the list of all jobs fail for everybody."""
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(ValidationError) as refused:
            section.model_validate({name: value})
        assert name in {error["loc"][0] for error in refused.value.errors()}


@pytest.mark.parametrize(
    ("section", "name"), REAL_NUMBERS, ids=lambda each: getattr(each, "__name__", each)
)
@given(value=st.one_of(st.sampled_from(EXTREME), st.floats(min_value=1.1 * MAX_REAL)))
def test_every_real_number_has_bounds(section, name, value):
    """A price of 1e308 was accepted, and the cost of a run was infinite."""
    with pytest.raises(ValidationError) as refused:
        section.model_validate({name: value})
    said = [each for each in sentences(refused.value, section) if name in each]
    assert len(said) == 1
    assert "must be" in said[0] or "should be" in said[0] or "not in the range" in said[0]


@pytest.mark.parametrize(
    "override",
    ["federated.participation.hours=1e10", "time.round_seconds=1e10", "seconds=2e9"],
)
def test_no_duration_is_longer_than_clocks_hold(override):
    with pytest.raises(JobError, match=r"must be at most 1e\+09, and is (1e\+10|2e\+09)"):
        parse_job(SMALLEST, ["federated.participation.rounds=1", override])


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            {"task": {"source": "sm\0ll.py:Small"}},
            r"no control characters, and is 'sm\\x",
        ),
        ({"task": {"data": "a\nb"}}, "must have no control characters"),
        ({"task": {"data": "a/" * 1025}}, "must have at most 2048 characters, and has 2050"),
        ({"model": {"start": "a" * 300}}, "has a part of 300 bytes, and no name of a file has"),
        ({"strategy": {"policy": "ä" * 128 + ":C"}}, "has a part of 258 bytes, and no name"),
    ],
)
def test_text_that_is_no_name_of_a_file_is_refused(override, why):
    """Where it is looked for, on another machine, it would be an error of the operating system."""
    tables = {"name": "n", "task": {"source": "t.py:T"}}
    for table, values in override.items():
        tables[table] = {**tables.get(table, {}), **values}
    with pytest.raises(ValidationError, match=why):
        Job.model_validate(tables)
    assert Job.model_validate(
        {"name": "n", "task": {"source": "t.py:T", "data": "Messungen/Zürich 2026"}}
    )
