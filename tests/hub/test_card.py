"""The model card: what it carries, what it says, and that equal conversions give equal bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from w4pack.convert.hub.card import CardInfo, front_matter, model_card, record_proof, with_proof
from w4pack.convert.hub.cardtext import LOADING, TITLES
from w4pack.convert.planning.targets import TARGETS

SOURCE = """---
license: other
license_name: llama3
license_link: https://example.org/LICENSE
language:
- en
- no
pipeline_tag: text-generation
base_model: meta/Base
tags: [chat, GPTQ, 4-bit, "base_model:quantized:meta/Base"]
widget: [{text: hello}]
---
# Someone's card

secret local path /home/someone
"""
INFO = CardInfo(
    target="marlin",
    version="1.2.3",
    lossless=True,
    source_format="gptq",
    schemes=(("4 bit g128 sym", 220), ("8 bit g32 sym", 4)),
    source_id="ORG/Model-GPTQ",
    source_revision="a" * 40,
    source_card=SOURCE,
    changes=(("trivial order dropped", 224),),
    command="w4pack convert ORG/Model-GPTQ OUT --to marlin",
)


def front(card: str) -> dict[str, Any]:
    """Read the metadata as the Hub does: between the first two lines of dashes."""
    assert card.startswith("---\n")
    value = yaml.safe_load(card.split("\n---\n", 1)[0].removeprefix("---\n"))
    assert isinstance(value, dict)
    return value


def test_the_metadata_carries_the_licence_and_names_the_source() -> None:
    assert front(model_card(INFO)) == {
        "license": "other",
        "license_name": "llama3",
        "license_link": "https://example.org/LICENSE",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "base_model": "ORG/Model-GPTQ",
        "base_model_relation": "quantized",
        "library_name": "w4pack",
        "tags": ["w4pack", "marlin", "4-bit", "8-bit", "chat"],
    }


def test_the_client_reads_the_same_metadata() -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(model_card(INFO))
    assert (card.data.license, card.data.base_model) == ("other", "ORG/Model-GPTQ")
    assert card.data.to_dict()["base_model_relation"] == "quantized"


def test_a_folder_names_the_base_model_of_its_card() -> None:
    card = model_card(replace(INFO, source_id=None, source_revision=None, target="gptq"))
    assert front(card)["base_model"] == "meta/Base"
    assert front(card)["library_name"] == "transformers"
    assert "base_model" not in front(model_card(replace(INFO, source_id=None, source_card=None)))


def test_what_was_done_is_said() -> None:
    card = model_card(INFO)
    for said in ("w4pack 1.2.3", "ORG/Model-GPTQ", "Lossless", "220 linears: 4 bit g128 sym", "a" * 40):
        assert said in card
    assert "/home/someone" not in card


def test_a_lossy_conversion_lists_the_layers_with_their_errors() -> None:
    errors = {f"model.layers.{i}.mlp.down_proj": 0.01 * (i + 1) for i in range(30)}
    card = model_card(replace(INFO, lossless=False, errors=errors, left={"lm_head": "8 of 100 rows are odd"}))
    assert "Not lossless" in card and "Lossless:" not in card
    assert card.index("`model.layers.29.mlp.down_proj` | 3.000e-01") < card.index(
        "`model.layers.28.mlp.down_proj`"
    )
    assert "and 10 more" in card
    assert "| `lm_head` | 8 of 100 rows are odd |" in card


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_says_how_it_is_loaded(target: str) -> None:
    card = model_card(replace(INFO, target=target))
    assert LOADING[target] in card
    assert TITLES[target] in card
    assert ("vllm serve" in card) == (target not in ("marlin", "marlin-legacy"))


def test_equal_values_give_equal_bytes() -> None:
    errors = {"b": 0.5, "a": 0.5}
    one, two = (model_card(replace(INFO, errors=dict(e))) for e in (errors.items(), reversed(errors.items())))
    assert one == two


@pytest.mark.parametrize(
    "card",
    [
        "",
        "# no metadata",
        "---\nlicense: [\n---\n",
        "---\n- a\n- b\n---\n",
        "---\nlicense: mit",
        "---\n" + "[" * 5000 + "\n---\n",
        "---\n!!python/object/apply:os.system ['true']\n---\n",
        "---\nlicense: {a: 1}\ntags: 3\nlanguage: 1.5\n---\n",
        "---\nlicense: 2024-01-01\n---\n",
        "---\n\tlicense: mit\n---\n",
        "---\n" + "a: b\n" * 100_000 + "---\n",
    ],
)
def test_a_broken_or_hostile_card_carries_nothing(card: str) -> None:
    assert front_matter(card) == {}
    assert "license" not in front(model_card(replace(INFO, source_card=card)))


def test_the_nearest_good_cards_are_read() -> None:
    assert front_matter("---\nlicense: mit\n---") == {"license": "mit"}
    assert front_matter("\ufeff---\r\nlicense: mit\r\n---\r\ntext") == {"license": "mit"}
    assert front_matter("---\nlicense: mit\nlanguage: no\n---\n") == {"license": "mit", "language": "no"}
    assert front_matter("---\nlicense: mit\n---\ntext\n---\nlicense: x\n---\n") == {"license": "mit"}


def test_text_of_the_source_cannot_leave_its_value() -> None:
    evil = '---\nlicense: "mit\\n---\\n# injected"\n---\n'
    assert front(model_card(replace(INFO, source_card=evil)))["license"] == "mit\n---\n# injected"
    assert "\n---\n# injected" not in model_card(replace(INFO, source_card=evil))


def test_a_verification_is_written_once_and_a_comparison_stays() -> None:
    card = model_card(INFO)
    hashed = with_proof(card, 10, 0)
    assert "Verified: 10 tensors" in hashed and "Not verified" not in hashed
    compared = with_proof(hashed, 10, 8)
    assert "8 of them were compared with the source" in compared
    assert compared.count("Verified:") == 1
    assert with_proof(compared, 10, 0) == compared
    assert with_proof(hashed, 10, 0) == hashed
    assert with_proof("# another card\n", 10, 8) == "# another card\n"


def test_a_verification_reaches_the_file(tmp_path: Path) -> None:
    assert not record_proof(tmp_path, 1, 1)
    (tmp_path / "README.md").write_text(model_card(INFO))
    assert record_proof(tmp_path, 10, 8)
    assert (tmp_path / "README.md").read_text() == with_proof(model_card(INFO), 10, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]
    assert not record_proof(tmp_path, 10, 8)
