"""Settings of config.json that a model class takes when it is made, and stumbles over when it runs."""

from transformers import PreTrainedModel

from w4pack.convert.errors import Refused, W4PackError

TAKEN = "num_experts_per_tok"


def refuse(model: PreTrainedModel) -> None:
    """Look at the settings of a model, on ``meta``, before its experts are replaced.

    Raises:
        Refused: lists all that do not run.
    """
    config = model.config.get_text_config()
    problems: list[W4PackError] = []
    if not getattr(config, "return_dict", True):
        problems.append(_setting("return_dict", "true: the classes read each other's results by name", False))
    taken, count = getattr(config, TAKEN, None), _experts(model)
    if count and taken is not None and not (type(taken) is int and 1 <= taken <= count):
        problems.append(_setting(TAKEN, f"1 to {count}, the number of experts", taken))
    if problems:
        raise Refused.together(problems)


def _experts(model: PreTrainedModel) -> int:
    """Return how many experts the smallest layer of experts has; 0: there is none."""
    stacks = [module for name, module in model.named_modules() if name.endswith(".experts")]
    return min((stack.gate_up_proj.shape[0] for stack in stacks if hasattr(stack, "gate_up_proj")), default=0)


def _setting(name: str, expected: str, found: object) -> Refused:
    what, where = "the model class does not run with this setting", f"config.json: {name}"
    return Refused(what, code="setting", where=where, expected=expected, found=repr(found)[:40])
