"""The reference page of the engine rules, made from the rows."""

from w4pack.convert.engines.rules import ENGINES
from w4pack.convert.engines.table import Engine, Rule

_HEAD = """# Engine rules

Made from the rows in `convert/engines/`; do not edit. `w4pack check PATH --engine E --tp 1,2,4,8`
applies them.

| verdict | meaning | exit of `check` |
|---|---|---|
| refuses | the engine stops with an error | 3 |
| wrong | the engine loads the model and computes something else, mostly without a message | 3 |
| slow | a slower kernel, or one that only some GPUs have | 0 |
| note | runs; a rounding or a cost worth a line | 0 |

"Seen" is `run` for what was seen in the running engine on a CPU (see [engines](../engines.md)), `read` for
what was read from the code of that version.
"""


def render_markdown() -> str:
    """Return the page ``docs/reference/engine-rules.md``."""
    return _HEAD + "".join(_section(engine) for engine in ENGINES.values())


def _section(engine: Engine) -> str:
    head = "| rule | verdict | for | looks at | what happens | way round | seen |\n" + "|---" * 7 + "|\n"
    text = f"\n## {engine.name} {engine.version}\n\n{head}" + "".join(map(_row, engine.rules))
    if engine.artifact:
        text += f"\n### {engine.name} with w4pack installed: artifacts\n\n{head}"
        text += "".join(map(_row, engine.artifact))
    return text


def _row(rule: Rule) -> str:
    methods = ", ".join(rule.methods) or "all"
    seen = "run" if rule.run else "read"
    cells = (f"`{rule.id}`", rule.verdict, methods, rule.looks_at, rule.why, rule.cure, seen)
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |\n"
