"""How errors become text."""

from w4pack.convert.errors import Refused


def test_a_terminal_is_not_told_what_to_do() -> None:
    err = Refused("bad \x1b[31mname\x07", where="a\x9bb", found="Grün ü 名 \tx", hint="two\nlines")
    assert str(err) == "bad \\x1b[31mname\\x07\n  where: a\\x9bb\n  found: Grün ü 名 \tx\n\nhint: two\nlines"
    assert err.to_json()["where"] == "a\x9bb"
