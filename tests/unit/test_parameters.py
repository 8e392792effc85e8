"""Errors of the Python API name the parameters that stand for the options of the command line."""

import pickle
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import w4pack.convert
from w4pack import cli
from w4pack.convert import api, parameters
from w4pack.convert.errors import Refused, UsageError, W4PackError
from w4pack.convert.jobs.running import Running
from w4pack.convert.opening import Where
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantize_options import QuantizeOptions

# Options that only a terminal has, and those of functions beside.
OF_TERMINALS = {"--json", "--quiet", "--verbose", "--debug", "--dry-run", "--push-to", "--private"}


def raised(**choices: Any) -> W4PackError:
    with pytest.raises(W4PackError) as caught:
        w4pack.convert.convert("src", "out", **choices)
    return caught.value


def test_every_option_of_convert_has_a_name_in_python() -> None:
    names = parameters.spellings(api.convert)
    told = {
        option: parameters._spelling(option, names)
        for param in cli.root.commands["convert"].params
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("--") and option not in OF_TERMINALS
    }
    assert None not in told.values(), told
    assert {option: told[option] for option in ("--to", "--fold-act-order", "--verify", "--asym")} == {
        "--to": "to=...",
        "--fold-act-order": "fold_act_order=...",
        "--verify": "verify_after=...",
        "--asym": "quantize=QuantizeOptions(sym=False)",
    }
    assert told["--quantize"] == "quantize=QuantizeOptions(method=...)"
    assert told["--resume"] == "running=Running(resume=...)"
    assert told["--revision"] == "where=Where(revision=...)"


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"to": "x"}, "`--to` is `to=...`"),
        ({"dtype": "float16"}, "`--dtype` is `dtype=...`, `--to` is `to=...`"),
        ({"quantize": QuantizeOptions(bpw=3)}, "`--bpw` is `quantize=QuantizeOptions(bpw=...)`"),
        (
            {"quantize": QuantizeOptions(sym=False, act_bits=8)},
            "`--act-bits` is `quantize=QuantizeOptions(act_bits=...)`, `--sym` is "
            "`quantize=QuantizeOptions(sym=...)`, `--asym` is `quantize=QuantizeOptions(sym=False)`",
        ),
    ],
    ids=str,
)
def test_an_error_of_the_api_names_both(choices: dict[str, Any], named: str) -> None:
    err = raised(**choices)
    assert err.in_python == named
    assert str(err).endswith(f"\n\nin Python: {named}")
    assert "in_python" not in err.to_json()
    with pytest.raises(UsageError) as plain:
        ConvertOptions(**choices).check()
    assert str(err).startswith(f"{plain.value}\n") and "in Python" not in str(plain.value)


def test_what_is_in_the_way_names_the_fields_of_running(tmp_path: Path) -> None:
    source = checkpoints.lay_out("gptqmodel-w4g32-asym-desc-qwen2", tmp_path / "source")
    w4pack.convert.convert(source, tmp_path / "out")
    with pytest.raises(W4PackError) as caught:
        w4pack.convert.convert(source, tmp_path / "out", running=Running(), where=Where())
    assert caught.value.in_python == "`--overwrite` is `running=Running(overwrite=...)`"


def test_commands_that_can_be_pasted_stay_as_they_are() -> None:
    @parameters.in_python
    def failing(to: str = "") -> None:
        raise Refused("not here", where="a file", hint="`w4pack convert SRC OUT --to dense` makes one")

    with pytest.raises(Refused) as caught:
        failing()
    assert caught.value.in_python is None and str(caught.value).endswith("makes one")


def test_a_function_is_one_whenever_it_is_asked_for() -> None:
    assert w4pack.convert.convert is w4pack.convert.convert
    assert w4pack.convert.convert.__wrapped__ is api.convert


def test_functions_go_to_other_processes() -> None:
    for name in w4pack.convert.__all__:
        function = getattr(w4pack.convert, name)
        assert pickle.loads(pickle.dumps(function)) is function
