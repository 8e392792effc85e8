"""The model card of a conversion (stub until the card is there)."""

from typing import Any


def card_of(source: Any, plan: Any, origin: Any, errors: Any) -> str | None:
    return None
