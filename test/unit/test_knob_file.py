# SPDX-License-Identifier: Apache-2.0
import tomllib
from dataclasses import dataclass

import pytest

from banyan import knob_file
from banyan.knob_file import KnobTable, line_of, read, template
from banyan.knobs import at_least, knob


@dataclass(frozen=True)
class Settings:
    rows: int = knob(3, "--t-rows", "g", "Rows.", metavar="N", parse=int, check=at_least(1))
    loud: bool = knob(True, "--t-quiet", "g", "Say nothing.", switches_to=False)
    place: str = knob("", "--t-place", "g", "Where.", metavar="DIR", const="here", unset="nowhere")
    colour: str = knob("red", "--t-colour", "g", "Which.", choices=("red", "blue"))
    paths: tuple = knob((), "--t-paths", "g", "All.", metavar="PATH", parse=lambda text: tuple(text.split(",")))
    share: float = knob(0.5, "--t-share", "g", "Part.", metavar="PART", parse=float)
    hidden: int = 7


TABLE = KnobTable("server", Settings, "--t-", lists=("url",))


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "banyan.toml"
        path.write_text(text)
        return path

    return write


def test_file_when_it_is_read_then_fields_as_the_flags_would_give_them(file):
    text = (
        '[server]\nrows = 4\nquiet = true\nplace = "x"\ncolour = "blue"\npaths = ["/a", "/b"]\nshare = 1\nurl = ["u"]\n'
    )
    taken = read(file(text), TABLE)
    assert taken == {
        "rows": 4,
        "loud": False,
        "place": "x",
        "colour": "blue",
        "paths": ("/a", "/b"),
        "share": 1.0,
        "url": ["u"],
    }
    assert isinstance(taken["share"], float)


def test_file_when_a_flag_stands_without_its_argument_then_true_says_so(file):
    assert read(file("[server]\nplace = true\nquiet = false\n"), TABLE) == {"place": "here", "loud": True}


def test_file_when_it_has_other_tables_then_they_are_not_read(file):
    assert read(file("[other]\nrows = 0\n"), TABLE) == {}


WRONG = {
    "rows = 0": "rows: at least 1",
    'rows = "many"': "rows: N, not 'many'",
    "rows = true": "rows: N, not true or false",
    'colour = "green"': "colour: one of red, blue, not 'green'",
    "quiet = 1": "quiet: true or false",
    "row = 1": "row: there is no such key: did you mean rows?",
    "zzz = 1": "zzz: there is no such key: use one of rows, quiet, place, colour, paths, share, url",
    "url = 'u'": "url: a list of text",
    "rows = { a = 1 }": "rows: N, not a table",
}


@pytest.mark.parametrize("line", WRONG)
def test_file_when_a_key_is_wrong_then_its_line_and_what_it_may_be(file, line):
    path = file(f"[router]\n{line}\n[server]\n# a comment\n{line}\n")
    with pytest.raises(ValueError) as raised:
        read(path, TABLE)
    assert str(raised.value).startswith(f"{path}:5: {WRONG[line]}")


def test_file_when_several_keys_are_wrong_then_a_line_for_each(file):
    with pytest.raises(ValueError) as raised:
        read(file("[server]\nrows = 0\nzzz = 1\n"), TABLE)
    assert [line.split(":")[1] for line in str(raised.value).splitlines()] == ["2", "3"]


@pytest.mark.parametrize(
    ("text", "said"), [("[server\n", "this is not TOML"), ("rows = 1\n", ":1: rows: it stands in no table")]
)
def test_file_when_it_has_no_tables_then_it_is_refused(file, text, said):
    with pytest.raises(ValueError, match=said):
        read(file(text), TABLE)


def test_file_when_it_is_missing_then_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml: No such file"):
        read(tmp_path / "none.toml", TABLE)


def test_tables_when_one_is_unknown_then_its_line_and_the_others(file):
    path = file("[server]\nrows = 1\n\n[servr]\n")
    with pytest.raises(ValueError, match=r":4: servr: there is no such table: use \[router\], \[server\]"):
        knob_file.check_tables(path, ["server", "router"])
    knob_file.check_tables(path, ["server", "servr"])


def test_line_when_a_key_is_written_with_underscores_or_quotes_then_it_is_found():
    assert line_of('[a]\n"rows" = 1\n', "a", "rows") == 2
    assert line_of("[b]\nrows = 1\n[a]\n", "a", "rows") == 1


def test_template_when_it_is_read_again_then_the_same_values(file):
    values = {"rows": 9, "loud": False, "paths": ("/a", 'b"c'), "share": float("inf"), "url": ["u"]}
    text = template(TABLE, values)
    assert read(file(text), TABLE) == {**values, "url": ["u"]}
    assert "# Rows." in text and '# colour = "red"' in text and "# One of red, blue." in text
    assert tomllib.loads(template(TABLE, {})) == {"server": {}}
