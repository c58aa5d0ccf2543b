"""One reader of JSON from outside: a value, or a short reason."""

import json

import pytest

from scalerl_jax.utils.reading import MAX_DEPTH, check_regular, parse_json, read_json


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("text", [nested(MAX_DEPTH), b"\xef\xbb\xbf{}", '"[[["', "1e5"])
def test_usual_json_is_read(text):
    plain = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    assert parse_json(text) == json.loads(plain)


def test_brackets_in_texts_nest_nothing():
    value = {"code": "[" * 500, "more": [[{}]] * 200}
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        (b"\xff\xfe", "not UTF-8"),
        (nested(MAX_DEPTH + 1), "deeper than 100"),
        ('{"a":' * 101 + "1" + "}" * 101, "deeper than 100"),
        (nested(10**6), "deeper than 100"),
        ("1" * 5000, "thousands of digits"),
    ],
)
def test_other_texts_are_a_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_only_regular_files_are_read(tmp_path):
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(ValueError, match="no regular file"):
            check_regular(type(tmp_path)(path))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json must hold a JSON object"):
        read_json(tmp_path / "list.json")
