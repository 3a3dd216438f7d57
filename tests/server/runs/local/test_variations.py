"""The values of `--vary`."""

import datetime

import pytest

from isthmus.errors import JobError
from isthmus_server.runs.local.variations import combinations, parse_variation, value_text


@pytest.mark.parametrize("keys", [("task.settings", "task.settings.lr"), ("a.b.c", "a")])
def test_a_table_is_not_varied_together_with_a_key_in_it(keys):
    with pytest.raises(JobError, match=r"^--vary \S+ replaces all of the table that has \S+; vary"):
        combinations([(key, [1, 2]) for key in keys])


def test_keys_that_begin_alike_are_varied_together():
    assert len(combinations([("task.a", [1, 2]), ("task.ab", [1, 2])])) == 4


@pytest.mark.parametrize(
    ("listed", "values"),
    [
        ('"a,b",c', ["a,b", "c"]),
        ("word,1,true", ["word", 1, True]),
        ("[1,2],[3]", [[1, 2], [3]]),
        ('{a="}",b=[1,2]},x', [{"a": "}", "b": [1, 2]}, "x"]),
        (r'"a\",b",c', ['a",b', "c"]),
        ("'a\\',c", ["a\\", "c"]),
        ("it's,f1[a,b]", ["it's", "f1[a,b]"]),
        ('"",1', ["", 1]),
        ("1, 1.0, -2e3, inf", [1, 1.0, -2000.0, float("inf")]),
        ('1,"1"', [1, "1"]),
        ('2024-01-01,"2024-01-01"', [datetime.date(2024, 1, 1), "2024-01-01"]),
    ],
)
def test_each_value_is_toml_or_a_bare_word(listed, values):
    found = parse_variation(f"task.settings.x={listed}")[1]
    assert found == values
    assert list(map(type, found)) == list(map(type, values))
    assert len(set(map(value_text, values))) == len(values)


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        (".1,.2", r"has '\.1', which is no TOML value; put a text in quotes$"),
        ("1,0.1.2", r"has '0\.1\.2', which is no TOML value"),
        ("-x", r"has '-x', which is no TOML value"),
        (",1", r'has an empty value; an empty text is ""$'),
        ("1,,2", "has an empty value"),
        ("1,", "has an empty value"),
        ("[1,2", "has a quote or a bracket that is not closed$"),
        ('"a,b', "has a quote or a bracket that is not closed$"),
        ("[1 2]", r"has '\[1 2\]', which is no TOML value"),
    ],
)
def test_mistyped_values_are_refused(listed, sentence):
    with pytest.raises(JobError, match=f"^--vary 'x=.*' {sentence}"):
        parse_variation(f"x={listed}")


@pytest.mark.parametrize("text", ["1", "a b", "", " a", '"a"', "a,b", "it's", "3d", "true", "[1]"])
def test_a_text_is_shown_as_it_can_be_given(text):
    assert parse_variation(f"x={value_text(text)}") == ("x", [text])
