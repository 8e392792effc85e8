"""`check`, the loader and `eval` judge ``online`` records alike; `inspect` says what they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import w4pack  # noqa: E402
from runtime import quarot_models as models  # noqa: E402
from w4pack import cli  # noqa: E402
from w4pack.convert import check, convert, evaluate, inspect  # noqa: E402
from w4pack.convert.dialects.online import Hadamard, Online, Settings  # noqa: E402
from w4pack.convert.errors import Refused, UsageError, W4PackError  # noqa: E402
from w4pack.convert.planning import limits  # noqa: E402
from w4pack.convert.planning.quantize_options import QuantizeOptions  # noqa: E402
from w4pack.convert.source.online_places import Linear  # noqa: E402
from w4pack.convert.source.online_rules import without_kernel  # noqa: E402
from w4pack.kernels.quarot import int_ops, int_tiles  # noqa: E402
from w4pack.kernels.quarot.transform import Transform  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SPLIT = "w4pack.online-split"
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.artifact("llama", tmp_path_factory.mktemp("llama"), **SMALL)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 4)
    return path


def edited(out: Path, place: Path, change: Change, kind: str, site: str | None) -> Path:
    """Copy an artifact, and change its records of a kind (and site)."""
    shutil.copytree(out, place / "copy")

    def one(record: dict[str, Any]) -> dict[str, Any]:
        meant = record["kind"] == kind and site in (None, record.get("site"))
        return change(dict(record)) if meant else record

    models.edit_online(place / "copy", lambda records: [one(record) for record in records])
    return place / "copy"


def order(size: int) -> Change:
    return lambda r: {**r, "order": size, "block": size, "factors": [[size, "sylvester"]]}


# kind, site, change, whether numbers would be others (`eval` refuses too) or only a kernel is missing
CASES: dict[str, tuple[str, str | None, Change, bool]] = {
    "nothing": ("hadamard", None, dict, False),
    "width of R3": ("hadamard", "qk", order(128), True),
    "width across heads": ("hadamard", "attn_out", order(4), True),
    "width of R4": ("hadamard", "mlp_mid", order(128), True),
    "a stream that is transformed": (
        "hadamard",
        "attn_out",
        lambda r: {**order(128)(r), "site": "residual_read"},
        True,
    ),
    "a construction": (
        "hadamard",
        "mlp_mid",
        lambda r: {**r, "factors": [[12, "williamson"], [16, "sylvester"]]},
        True,
    ),
    "no construction": (
        "hadamard",
        "mlp_mid",
        lambda r: {**r, "factors": [[12, "magic"], [16, "sylvester"]]},
        True,
    ),
    "group of the cache": ("kv_quant", None, lambda r: {**r, "group": 32}, True),
    "a guide that is not there": ("kv_quant", None, lambda r: {**r, "guide": True}, True),
    "a guide that is no guide": ("kv_quant", None, lambda r: {**r, "guide": 4}, True),
    "bits without ratio": ("act_quant", "mlp_in", lambda r: {**r, "clip": {"8": 1.0}}, True),
    "other bits at a site": (
        "act_quant",
        "attn_in",
        lambda r: {**r, "bits": 8, "clip": {"8": 1.0}},
        False,
    ),
    "bits that no other site has": (
        "act_quant",
        "attn_in",
        lambda r: {**r, "bits": 4, "clip": {"4": 0.9}},
        False,
    ),
    "unknown bits": ("act_quant", "attn_in", lambda r: {**r, "bits": 5}, True),
    "unknown kind": ("kv_quant", None, lambda r: {**r, "kind": "kv_rotate"}, True),
    "unknown key": ("hadamard", "qk", lambda r: {**r, "seed": 1}, True),
}


def refusal(run: Callable[[], Any]) -> W4PackError | None:
    try:
        run()
    except W4PackError as err:
        return err
    return None


@pytest.mark.parametrize("case", CASES)
def test_check_says_what_loading_and_eval_do(case: str, out: Path, text: Path, tmp_path: Path) -> None:
    kind, site, change, both = CASES[case]
    folder = edited(out, tmp_path, change, kind, site)
    found: list[list[dict[str, Any]]] = []
    asked = refusal(lambda: found.append(check(folder, engines=["w4pack"])))
    loaded = refusal(lambda: w4pack.load(folder))
    taken = asked is None and found[0][0]["ok"]
    assert taken is (loaded is None)
    measured = refusal(lambda: evaluate(folder, text, windows=1, seqlen=16))
    assert (measured is not None) is both
    if found and not taken:
        (result,) = found[0][0]["results"]
        wheres = [(b["rule"], b["layer"], b["found"]) for b in result["blockers"]]
        problems = (loaded.problems or (loaded,)) if loaded else ()
        assert wheres == [("w4pack.online", p.where, p.found) for p in problems]


def unrun(folder: Path, text: Path, **how: Any) -> list[dict[str, Any]]:
    """What `eval` warns of but what belongs to the text."""
    told = evaluate(folder, text, windows=1, seqlen=16, **how)["warnings"]
    return [w for w in told if w["code"] not in ("calibration-overlap", "windows-long")]


def test_a_head_size_without_kernel_is_said_before_it_is_loaded(tmp_path: Path, text: Path) -> None:
    plain = models.source("llama", tmp_path / "source", **SMALL, head_dim=72)
    options = QuantizeOptions(method="rtn", group_size=-1, kv_bits=4)
    report = convert(plain, tmp_path / "out", quantize=options)
    (warning,) = (w for w in report.warnings if w.code == "head-size")
    assert (warning.where, warning.found) == ("config.json: head_dim", "72")
    assert warning.hint is not None and "--kv-bits 16" in warning.hint
    (answer,) = check(tmp_path / "out", engines=["w4pack"])
    (blocker,) = answer["results"][0]["blockers"]
    assert "--kv-bits 16" in blocker["cure"]
    loaded = refusal(lambda: w4pack.load(tmp_path / "out"))
    assert loaded is not None and (loaded.where, loaded.found) == (blocker["layer"], blocker["found"])
    assert loaded.hint == "load with kv_bits=16"
    words = ["generate", str(tmp_path / "out"), "abc", "--device", "cpu", "--json"]
    assert json.loads(CliRunner().invoke(cli.root, words).stdout)["hint"] == "--kv-bits 16"
    assert refusal(lambda: w4pack.load(tmp_path / "out", kv_bits=16)) is None
    (told,) = unrun(tmp_path / "out", text)  # measured all the same, with a word of it
    assert (told["code"], told["where"], told["found"]) == (loaded.code, loaded.where, loaded.found)
    assert "nothing runs what is measured; --kv-bits 16" in told["text"]
    assert unrun(tmp_path / "out", text, kv_bits=16) == []
    assert unrun(plain, text, against=tmp_path / "out") == [told]


ODD: dict[str, tuple[dict[str, int], Any, list[str]]] = {
    "R4": ({"intermediate_size": 172}, "full", ["mlp.down_proj"]),
    "mlp_mid": ({"intermediate_size": 172}, "none", ["mlp.down_proj"]),
    "the stream": ({"hidden_size": 100}, "none", ["self_attn.q_proj", "mlp.gate_proj"]),
}
FOUR = QuantizeOptions(method="rtn", group_size=-1, act_bits=4, kv_bits=16)


@pytest.mark.parametrize("case", ODD)
def test_a_width_without_kernel_is_refused_by_convert_and_as_it_is_loaded(
    case: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, rotate, linears = ODD[case]
    plain = models.source("llama", tmp_path / "source", **{**SMALL, **sizes})
    names = [f"model.layers.0.{name}" for name in linears]
    error = refusal(lambda: convert(plain, tmp_path / "no", quantize=FOUR, rotate=rotate))
    assert isinstance(error, Refused) and error.code == "online-width" and error.exit_code == 3
    assert [p.where for p in error.problems or (error,)] == names
    assert error.expected == "a multiple of 8 input features" and error.hint is not None
    assert ("--rotate offline" in error.hint) is (rotate == "full") and "--act-bits 16" in error.hint
    assert not (tmp_path / "no").exists()
    monkeypatch.setattr(limits, "_refuse_unrun", lambda planned: None)  # as an earlier version would make it
    report = convert(plain, tmp_path / "out", quantize=FOUR, rotate=rotate)
    assert [w.where for w in report.warnings if w.code == "online-width"] == names
    (answer,) = check(tmp_path / "out", engines=["w4pack"])
    assert [blocker["layer"] for blocker in answer["results"][0]["blockers"]] == names
    loaded = refusal(lambda: w4pack.load(tmp_path / "out"))
    assert isinstance(loaded, Refused)
    ways = [str(problem.hint) for problem in loaded.problems or (loaded,)]
    assert all(("--act-bits" in way) is (rotate == "full") for way in ways)  # else a parameter of `load`
    assert [p.where for p in loaded.problems or (loaded,)] == names and loaded.expected == error.expected
    wide = refusal(lambda: w4pack.load(tmp_path / "out", act_bits=16))
    assert (wide is not None) is (rotate == "full")
    assert [(w["code"], w["where"]) for w in unrun(tmp_path / "out", text)] == [
        (error.code, n) for n in names
    ]
    assert bool(unrun(tmp_path / "out", text, act_bits=16)) is (rotate == "full")


@pytest.mark.parametrize(("width", "refused"), [(131_008, False), (131_016, True)])
def test_rows_too_wide_for_sums_of_codes_are_refused_before_anything_is_made(
    width: int, refused: bool, tmp_path: Path
) -> None:
    """131,008 rows are 2047 tiles; one more, padded, is where int32 sums of 8-bit codes may overflow."""
    sizes = {**SMALL, "hidden_size": 8, "intermediate_size": width, "num_hidden_layers": 1}
    plain = models.source("llama", tmp_path / "source", **sizes)
    words = ["convert", str(plain), str(tmp_path / "out"), "--quantize", "rtn", "--group-size", "-1"]
    done = CliRunner().invoke(cli.root, [*words, "--act-bits", "8", "--dry-run", "--json"])
    last = json.loads(done.stdout.splitlines()[-1])
    if not refused:
        assert (done.exit_code, last["event"]) == (0, "done"), done.output
        return
    assert (done.exit_code, last["code"], last["found"]) == (3, "online-width", str(width))
    assert last["where"] == "model.layers.0.mlp.down_proj" and last["hint"] == "--act-bits 16"
    assert last["expected"] == "at most 131008 input features"
    with pytest.raises(UsageError, match="too large for int32 sums"):  # what the product itself says
        int_product(131_072)
    weights_alone = CliRunner().invoke(cli.root, [*words, "--dry-run", "--json"])
    assert weights_alone.exit_code == 0, weights_alone.output


def int_product(k: int) -> Any:
    """Multiply one row of codes with a weight of k rows."""
    codes, scales = torch.zeros(1, k, dtype=torch.int8), torch.ones(1)
    weight, weight_scales = torch.zeros(k // 16, 128, dtype=torch.int32), torch.ones(1, 64).half()
    order = int_tiles.int_order(None, 4, -1, 8)
    return int_ops.int_gemm(codes, scales, weight, weight_scales, None, 4, 8, -1, order, k, torch.float16)


def test_a_transform_of_more_than_the_largest_order_has_no_kernel() -> None:
    for order, told in ((1 << 20, []), (1 << 21, ["at most 1048576 input features"])):
        records = Online((Hadamard("mlp_mid", order, ((order, "sylvester"),), order),))
        at = mock.Mock(sites={"down": "mlp_mid"}, linears={"down": Linear(order)}, head_sizes={64})
        found = list(without_kernel(records, Settings(16, 16), at))
        assert [p.expected for p in found] == told
        key = f"{order}:{order}-sylvester"
        assert (refusal(lambda key=key: Transform.of(key)) is not None) is bool(told)  # type: ignore[misc]


# Options -> site of the first expert that is refused, or None.
EXPERTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "4-bit activations": ({"act_bits": 4}, "w1"),
    "4-bit cache": ({"kv_bits": 4}, None),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_in_16_bit_are_not_run_behind_quantizers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, leaf = EXPERTS[case]
    plain = models.source("mixtral", tmp_path / "source", num_hidden_layers=1)
    options = QuantizeOptions(method="rtn", group_size=64, **more)
    ignore = ("re:.*experts.*",)
    error = refusal(lambda: convert(plain, tmp_path / "first", quantize=options, ignore=ignore))
    assert (error is not None) is (leaf is not None)
    monkeypatch.setattr(limits, "_refuse_unrun", lambda planned: None)
    convert(plain, tmp_path / "out", quantize=options, ignore=ignore)
    loaded = refusal(lambda: w4pack.load(tmp_path / "out"))
    (answer,) = check(tmp_path / "out", engines=["w4pack"])
    assert answer["ok"] is (loaded is None) is (leaf is None)
    if error is not None and loaded is not None:
        assert (error.code, error.exit_code, error.hint) == ("online-experts", 3, "--act-bits 16")
        assert str(error.where).endswith(f"experts.0.{leaf}")
        said = json.dumps(loaded.to_json()).replace("load with act_bits=16", "--act-bits 16")
        assert loaded.hint == "load with act_bits=16" and json.loads(said) == error.to_json()
        assert refusal(lambda: w4pack.load(tmp_path / "out", act_bits=16)) is None


def test_experts_of_several_schemes_are_refused_where_something_runs_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = models.source("mixtral", tmp_path / "source", num_hidden_layers=1)
    mixed = ("re:.*experts.0.*=8",)
    options = QuantizeOptions(method="rtn", group_size=64, act_bits=4, module_bits=mixed)
    error = refusal(lambda: convert(plain, tmp_path / "no", quantize=options))
    assert error is not None and (error.code, error.exit_code) == ("online-experts", 3)
    assert str(error.where).endswith("experts.*.w1") and "4 bit g64 sym" in str(error.found)
    convert(plain, tmp_path / "weights", quantize=replace(options, act_bits=16))
    assert refusal(lambda: w4pack.load(tmp_path / "weights")) is None
    monkeypatch.setattr(limits, "_refuse_unrun", lambda planned: None)
    convert(plain, tmp_path / "out", quantize=options)
    assert refusal(lambda: w4pack.load(tmp_path / "out")) is not None


@pytest.mark.parametrize("found", ["no such tensor", "[3, 1, 64]"])
def test_the_way_on_of_a_guide_is_a_sentence(found: str, out: Path, tmp_path: Path) -> None:
    folder = edited(out, tmp_path, lambda r: {**r, "guide": True}, "kv_quant", None)
    if found != "no such tensor":
        (file,) = folder.glob("*.safetensors")
        tensors = safetensors.torch.load_file(file)
        names = [n.replace("o_proj.weight", "k_guide") for n in tensors if n.endswith("o_proj.weight")]
        tensors |= {name: torch.zeros(3, 1, 64) for name in names}
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    said = CliRunner().invoke(cli.root, ["check", str(folder), "--engine", "w4pack"])
    assert said.exit_code == 3
    assert found in said.stdout and "k_guide [2, 1, 64]" in said.stdout
    assert "way on: the artifact was changed, or is another model's" in said.stdout


def test_zero_points_are_seen_in_every_layer(out: Path, tmp_path: Path) -> None:
    """Records of activations beside weights that no integer product takes."""
    plain = models.source("llama", tmp_path / "source", **SMALL)
    options = QuantizeOptions(method="rtn", group_size=64, sym=False, kv_bits=4)
    convert(plain, tmp_path / "out", quantize=options)
    assert check(tmp_path / "out", engines=["w4pack"])[0]["ok"]
    acts = [r for r in _records(out) if r["kind"] == "act_quant"]
    models.edit_online(tmp_path / "out", lambda records: [*records, *acts])
    (blocker,) = check(tmp_path / "out", engines=["w4pack"])[0]["results"][0]["blockers"]
    loaded = refusal(lambda: w4pack.load(tmp_path / "out"))
    assert loaded is not None and loaded.code == "artifact-online-changed"  # whatever does not fit behind it
    assert (blocker["expected"], blocker["found"]) == (loaded.expected, loaded.found)
    (tmp_path / "out" / "w4pack.json").unlink()
    (answer,) = check(tmp_path / "out", engines=["w4pack"])
    (result,) = answer["results"]
    loaded = refusal(lambda: w4pack.load(tmp_path / "out"))
    assert loaded is not None and len(loaded.problems) == len(result["blockers"]) == 14
    assert {b["found"] for b in result["blockers"]} == {"zero points"}


def test_ranks_do_not_share_a_transform(out: Path) -> None:
    (answer,) = check(out, engines=["w4pack"], tp=[2])
    found = {b["layer"]: b["found"] for b in answer["results"][0]["blockers"] if b["rule"] == SPLIT}
    where = "config.json: quantization_config.online: "
    assert found == {f"{where}attn_out": "blocks of 2", f"{where}mlp_mid": "blocks of 192"}


# ---- inspect ---------------------------------------------------------------------------------------


def _records(folder: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((folder / "config.json").read_text())["quantization_config"][
        "online"
    ]
    return records


def test_inspect_shows_every_record(out: Path) -> None:
    online = inspect(out)["online"]
    shown = [
        *({"kind": "hadamard", "signs": None, **h} for h in online["transforms"]),
        *({"kind": "act_quant", "symmetric": True, **a} for a in online["activations"]),
        {"kind": "kv_quant", **online["cache"]},
    ]
    assert shown == _records(out)
    assert (online["act_bits"], online["kv_bits"]) == (4, 4)
    assert online["act_bits_allowed"] == online["kv_bits_allowed"] == [4, 8, 16]


def test_inspect_says_it_in_words(out: Path, tmp_path: Path) -> None:
    def said(folder: Path) -> list[str]:
        done = CliRunner().invoke(cli.root, ["inspect", str(folder)])
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        return lines[lines.index(next(x for x in lines if x.startswith("online"))) : -1]

    assert said(out) == [
        "online    transform R3 on q and k: 64",
        "          transform across heads: 2",
        "          transform R4 before down: 192 = 12 paley1 x 16",
        "          activations 4 bit (or 8, 16), cache 4 bit (or 8, 16)",
        "          clip ratios at 4 bit: attn_in 0.9, attn_out 0.85, mlp_in 0.95, mlp_mid 0.8, k 0.95, v 0.9",
        "          clip ratios at 8 bit: attn_in 1, attn_out 1, mlp_in 1, mlp_mid 1, k 1, v 1",
    ]
    folder = edited(out, tmp_path, lambda r: {**r, "bits": 4, "clip": {"4": 0.9}}, "act_quant", None)
    assert "          activations 4 bit (or 16), cache 4 bit (or 8, 16)" in said(folder)


def test_inspect_of_what_has_no_records_says_none(tmp_path: Path, out: Path) -> None:
    shutil.copytree(out, tmp_path / "copy")
    models.edit_online(tmp_path / "copy", lambda records: [])
    assert inspect(tmp_path / "copy")["online"] is None


def test_inspect_of_unknown_records_names_them(tmp_path: Path, out: Path) -> None:
    folder = edited(out, tmp_path, lambda r: {**r, "kind": "kv_rotate"}, "kv_quant", None)
    with pytest.raises(Refused) as caught:
        inspect(folder)
    assert (caught.value.code, caught.value.where) == ("artifact-unknown", "config.json: online.7.kind")
