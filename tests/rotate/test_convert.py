"""`convert --rotate`: stock transformers loads the output, with the source's logits but for one rounding."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rotate import tiny

from runner import Run, run
from w4pack.convert.api import convert as convert_api
from w4pack.convert.api import verify
from w4pack.convert.errors import Refused, UsageError, W4PackError
from w4pack.convert.jobs.running import Running
from w4pack.convert.rotate.rotation import make_rotation

# One rounding of every weight, half a unit in the last place each, random in sign: the logits of these models
# moved by 0.2 to 1.7 units of float16 (2^-10) and 0.2 to 1.4 of bfloat16 (2^-7) when it was measured.
ROUNDING = {torch.float16: 3 * 2.0**-10, torch.bfloat16: 3 * 2.0**-7}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


def source(place: Path, name: str, dtype: torch.dtype = torch.float16) -> Path:
    folder = place / f"{name}-{str(dtype).removeprefix('torch.')}"
    return folder if folder.exists() else tiny.save(name, folder, dtype)


def rotated(src: Path, out: Path, **options: Any) -> Path:
    convert_api(src, out, to="dense", **{"rotate": "offline", **options})
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def tree(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(tiny.CONFIGS))
def test_stock_transformers_gives_the_sources_logits(
    place: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    src = source(place, name, dtype)
    out = rotated(src, tmp_path / "out", verify_after=True)
    wanted = tiny.logits(tiny.load(src, torch.float32))
    found = tiny.logits(tiny.load(out, torch.float32))
    assert tiny.relative(found, wanted) < ROUNDING[dtype]
    before, after = tensors(src), tensors(out)
    assert {t.dtype for t in after.values()} == {t.dtype for t in before.values()}
    assert any(not torch.equal(after[n], before[n]) for n in before)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert ("lm_head.weight" in after) is (config.get("tie_word_embeddings") is False or "gemma" not in name)


def test_float32_keeps_the_logits_to_float32(place: Path, tmp_path: Path) -> None:
    src = source(place, "llama", torch.float32)
    out = rotated(src, tmp_path / "out")
    found, wanted = (tiny.logits(tiny.load(f, torch.float32)) for f in (out, src))
    assert tiny.relative(found, wanted) < 5e-6


def test_one_dtype_for_everything(place: Path, tmp_path: Path) -> None:
    out = rotated(source(place, "qwen3", torch.bfloat16), tmp_path / "out", dtype="float16")
    made = tensors(out)
    assert {t.dtype for t in made.values()} == {torch.float16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    kept = "model.layers.0.self_attn.q_norm.weight"
    assert torch.equal(made[kept], tensors(source(place, "qwen3", torch.bfloat16))[kept].half())
    assert verify(out, against=source(place, "qwen3", torch.bfloat16))["ok"]


def test_the_manifest_records_every_rotation(place: Path, tmp_path: Path) -> None:
    out = rotated(source(place, "llama-tied"), tmp_path / "out", seed=9)
    value = json.loads((out / "w4pack.json").read_text())
    assert value["options"] == {"to": "dense", "rotate": "offline", "seed": 9}
    assert value["lossless"] is False
    record = value["rotation"]
    assert (record["mode"], record["seed"], record["online"], record["left_out"]) == ("offline", 9, [], [])
    assert record["added"] == {"lm_head.weight": "model.embed_tokens.weight"}
    r1 = make_rotation("r1", 48, seed=9)
    assert r1 is not None
    assert record["rotations"][0] == {
        "kind": "r1",
        "layer": None,
        "n": 48,
        "block": 48,
        "factors": [[12, "paley1"], [4, "sylvester"]],
        "signs": r1.signs,
        "digest": r1.digest,
    }
    assert [(r["kind"], r["layer"]) for r in record["rotations"][1:]] == [("r2", 0), ("r2", 1)]
    assert value["tensors"]["lm_head.weight"]["shape"] == [128, 48]


def test_partial_rotations_say_why(place: Path, tmp_path: Path) -> None:
    out = rotated(source(place, "gemma2"), tmp_path / "out")
    record = json.loads((out / "w4pack.json").read_text())["rotation"]
    ((left),) = record["left_out"]
    assert left["site"] == "r1"
    assert "model.layers.0.post_attention_layernorm.weight" in left["reason"]
    made, plain = tensors(out), tensors(source(place, "gemma2"))
    moved = {n.split(".", 3)[-1] for n in made if not torch.equal(made[n], plain[n])}
    assert moved == {"self_attn.v_proj.weight", "self_attn.o_proj.weight"}


def test_bytes_do_not_depend_on_threads_shards_apart(place: Path, tmp_path: Path) -> None:
    src = source(place, "mixtral")
    one = tensors(rotated(src, tmp_path / "one", running=Running(threads=1)))
    two = tensors(rotated(src, tmp_path / "two", running=Running(threads=2), max_shard_size=50_000))
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 3
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_nested_copies_of_the_key_are_untied_too(tmp_path: Path) -> None:
    src = tiny.save("llama-tied", tmp_path / "src", torch.float16)
    config = json.loads((src / "config.json").read_text())
    config["text_config"] = {"tie_word_embeddings": True, "kept": 1}
    (src / "config.json").write_text(json.dumps(config))
    with tiny.opened(src) as checkpoint:
        changes = tiny.planned(checkpoint).config_changes
    assert changes["text_config"] == {"tie_word_embeddings": False, "kept": 1}


def test_a_tied_head_that_is_stored_as_well(place: Path, tmp_path: Path) -> None:
    """The same bytes: it is the table. Other bytes: nobody can say which of the two the model is."""
    src = source(place, "llama-tied")
    for name, factor in (("same", 1.0), ("other", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        made = tensors(src)
        made["lm_head.weight"] = made["model.embed_tokens.weight"].clone() * factor
        safetensors.torch.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_bytes((src / "config.json").read_bytes())
    out, plain = rotated(tmp_path / "same", tmp_path / "out"), rotated(src, tmp_path / "plain")
    assert all(torch.equal(t, tensors(plain)[n]) for n, t in tensors(out).items())
    with pytest.raises(Refused) as caught:
        rotated(tmp_path / "other", tmp_path / "never")
    assert (caught.value.code, caught.value.where) == ("tied-differs", "model.safetensors, lm_head.weight")
    assert not (tmp_path / "never").exists()


# ---- the gate, verify, resume ----


def test_a_fold_that_is_skipped_stops_the_job(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.rotate.folding import Folding
    from w4pack.convert.rotate.steps import Step, whole

    def skipping(self: Folding, norm: str | None, r1: Any) -> list[Step]:
        return [whole(1, r1)]

    monkeypatch.setattr(Folding, "_read_steps", skipping)
    with pytest.raises(W4PackError) as caught:
        rotated(source(place, "llama"), tmp_path / "out")
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("rotation-differs", 1, "model.layers.0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_verify_finds_a_changed_value(place: Path, tmp_path: Path, name: str) -> None:
    """The manifest's hashes are made right again: only the source can say that the value is wrong."""
    src = source(place, "llama")
    out = rotated(src, tmp_path / "out")
    assert verify(out, against=src)["ok"]
    file = out / "model.safetensors"
    with tiny.opened(out) as checkpoint:
        info = checkpoint.tensors[name]
    data = bytearray(file.read_bytes())
    data[info.offset + 5] ^= 1
    file.write_bytes(data)
    value = json.loads((out / "w4pack.json").read_text())
    changed = bytes(data[info.offset : info.offset + info.nbytes])
    value["tensors"][name]["sha256"] = hashlib.sha256(changed).hexdigest()
    (out / "w4pack.json").write_text(json.dumps(value))
    found = verify(out, against=src)
    assert [(f["tensor"], f["kind"]) for f in found["failures"]] == [(name, "weights")]
    assert verify(out)["ok"]


def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from w4pack.convert.jobs import rotated as module

    src, small = source(place, "llama"), {"max_shard_size": 20_000}
    want = tree(rotated(src, tmp_path / "want", **small))
    write, done = module.write, []

    def dying(model: Any, out: Any, target: Any, report: Any) -> None:
        if len(done) == 9:
            raise KeyboardInterrupt
        done.append(target.name)
        write(model, out, target, report)

    monkeypatch.setattr(module, "write", dying)
    monkeypatch.setattr("w4pack.convert.jobs.execute.FLUSH_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        rotated(src, tmp_path / "out", **small)
    assert not (tmp_path / "out").exists()
    again: list[str] = []

    def counting(model: Any, out: Any, target: Any, report: Any) -> None:
        again.append(target.name)
        write(model, out, target, report)

    monkeypatch.setattr(module, "write", counting)
    rotated(src, tmp_path / "out", running=Running(resume=True), **small)
    assert tree(tmp_path / "out") == want
    assert 0 < len(again) < 35 - 5


def test_another_seed_is_another_job(place: Path, tmp_path: Path) -> None:
    src = source(place, "llama")
    first, second = (rotated(src, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    a, b = tensors(first), tensors(second)
    assert not torch.equal(a["model.embed_tokens.weight"], b["model.embed_tokens.weight"])
    digests = {json.loads((f / "w4pack.json").read_text())["plan"] for f in (first, second)}
    assert len(digests) == 2


# ---- refusals and usage ----


def test_online_transforms_have_no_place_in_an_ordinary_checkpoint(place: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        rotated(source(place, "llama"), tmp_path / "out", rotate="full")
    assert (caught.value.code, caught.value.found) == (
        "online-transforms",
        "transforms (R3, across heads, R4)",
    )


def test_a_packed_source_is_refused(tmp_path: Path) -> None:
    import builders as b

    config = b.llama_config(
        hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
    )
    b.write(tmp_path / "src", b.model(1, config, group=64), b.gptq, b.gptq_config(group=64))
    with pytest.raises(Refused) as caught:
        rotated(tmp_path / "src", tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == ("already-quantized", 3)
    assert caught.value.found is not None and caught.value.found.startswith("gptq")


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"rotate": "offline", "to": "gptq"}, "--rotate"),
        ({"rotate": "all"}, "--rotate"),
        ({"rotate": "offline", "tp": 2}, "--tp"),
        ({"rotate": "none", "tp": 2}, "--tp"),
        ({"rotate": "full", "tp": 0}, "--tp"),
        ({"rotate": "none", "seed": 1}, "--seed"),
        ({"rotate": "offline", "seed": -1}, "--seed"),
        ({"rotate": "offline", "pad_for_tp": 2}, "--pad-for-tp"),
        ({"rotate": "offline", "ignore_key": ("rotation",)}, "--ignore-key"),
        ({"rotate": "offline", "zero_reading": "word"}, "--zero-reading"),
    ],
)
def test_options_that_could_do_nothing(
    place: Path, tmp_path: Path, options: dict[str, Any], where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        convert_api(source(place, "llama"), tmp_path / "out", **{"to": "dense", **options})
    assert caught.value.where == where


def command(*args: str | Path) -> Run:
    return run("convert", *(str(a) for a in args))


def test_the_command_says_what_is_rotated(place: Path, tmp_path: Path) -> None:
    src, out = source(place, "llama-tied"), tmp_path / "out"
    made = command(src, out, "--to", "dense", "--rotate", "offline", "--dry-run")
    assert made.code == 0
    assert "rotated   R1 48 = 12 x 4, the whole model\n          R2 16 = 16, 2 layers\n" in made.out
    assert "config    tie_word_embeddings: False\n" in made.out
    assert "12,288 bytes more" in made.err
    assert not out.exists()


def test_the_gate_is_an_event(place: Path, tmp_path: Path) -> None:
    made = command(source(place, "llama"), tmp_path / "out", "--to", "dense", "--rotate", "offline", "--json")
    assert made.code == 0
    (event,) = [e for e in made.events if e["event"] == "gate"]
    assert (event["layers"], event["tokens"], event["near_ties"]) == (2, 128, 0)
    assert 0 < event["worst"] < 5e-6
    assert made.plan["plan"]["rotation"]["mode"] == "offline"


def test_an_unknown_reader_exits_with_3(tmp_path: Path) -> None:
    src = tiny.save("llama", tmp_path / "src", torch.float16)
    made = tensors(src) | {"model.layers.0.adapter.weight": torch.ones(48, 48)}
    safetensors.torch.save_file(made, src / "model.safetensors", metadata={"format": "pt"})
    found = command(src, tmp_path / "out", "--to", "dense", "--rotate", "offline", "--json")
    assert found.code == 3
    assert found.error["where"] == "model.safetensors, model.layers.0.adapter.weight"


def test_the_card_says_what_was_done(place: Path, tmp_path: Path) -> None:
    card = (rotated(source(place, "gemma2"), tmp_path / "out", seed=3) / "README.md").read_text()
    assert "w4pack convert SRC OUT --to dense --rotate offline --seed 3" in card
    assert "Rotated: Hadamard rotations" in card
    assert "- rotated: R2 16 = 16, 2 layers" in card
    assert "- rotated: no R1: `model.layers.0.post_attention_layernorm.weight` is a gain" in card
    assert "Dequantized" not in card
