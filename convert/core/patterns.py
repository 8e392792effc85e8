"""Patterns that a checkpoint's author wrote, applied to module names without trusting them.

A config may hold a pattern that does not compile, or one for which a backtracking matcher needs years. So a
pattern is first parsed here; one that is cheap goes to ``re``, any other is run as a set of states, in time
linear in the name. What lies outside of the subset (back references, look-behind, flags, other engines'
syntax) is *unreadable*: there is no matcher, and the caller says so. Nothing hangs, nothing raises.

Subset, with the meaning ``re`` gives it: literals, ``.``, escapes, classes, groups, ``|``, ``* + ? {m,n}``,
their lazy forms (laziness does not change whether a name matches), ``^ $``, and lookahead.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

Matcher = Callable[[str], bool]

MAX_LENGTH = 20_000  # characters of a pattern; alternations over many layers stay far below
MAX_STATES = 20_000
MAX_DEPTH = 40  # nested groups
NAME_LENGTH = 100  # a long module name, to judge what backtracking would cost
CHEAP = 20_000  # steps for one name: up to here ``re`` is trusted with a pattern


@lru_cache(maxsize=1024)
def matcher(pattern: str) -> Matcher | None:
    """Return a predicate that means ``re.match(pattern, name)``, or None for an unreadable pattern."""
    if len(pattern) > MAX_LENGTH:
        return None
    try:
        tree = _Parser(pattern).whole()
        if _cost(tree) <= CHEAP:
            compiled = re.compile(pattern)
            return lambda name: compiled.match(name) is not None
        return _Automaton(tree).matches
    except (_UnreadableError, re.error, OverflowError, RecursionError):
        return None


@lru_cache(maxsize=1024)
def searcher(pattern: str) -> Matcher | None:
    """Return a predicate that means ``re.search(pattern, name)``, or None for an unreadable pattern."""
    if matcher(pattern) is None:  # alone first: a stray bracket must not find its partner in what is added
        return None
    return matcher(f"[\\s\\S]*?(?:{pattern})")


class _UnreadableError(Exception):
    """The pattern is outside of the subset."""


# ---- the tree -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Char:
    """One character: a literal, an escape or a class, as written."""

    text: str


@dataclass(frozen=True, slots=True)
class _Seq:
    items: "tuple[_Node, ...]"


@dataclass(frozen=True, slots=True)
class _Alt:
    options: "tuple[_Node, ...]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: "_Node"
    least: int
    most: int | None  # None: any number


@dataclass(frozen=True, slots=True)
class _Edge:
    """``^`` or ``$``."""

    start: bool


@dataclass(frozen=True, slots=True)
class _Look:
    item: "_Node"
    wanted: bool


_Node = _Char | _Seq | _Alt | _Repeat | _Edge | _Look
_COUNT = re.compile(r"\{(\d{0,4})(?:(,)(\d{0,4}))?\}")
_GROUP = re.compile(r"\?(?::|=|!|P<[A-Za-z_]\w*>)")
_CLASS_SETS = ("--", "&&", "~~", "||", "[")  # reserved by ``re`` for set operations


class _Parser:
    """Reads a pattern from left to right; ``at`` is the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def whole(self) -> _Node:
        tree = self._alternation()
        if self.at != len(self.pattern):
            raise _UnreadableError
        return tree

    def _next(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _alternation(self) -> _Node:
        options = [self._sequence()]
        while self._next() == "|":
            self.at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Alt(tuple(options))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            items.append(self._repeated(self._atom()))
        return _Seq(tuple(items))

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char in "*+?{":
            raise _UnreadableError
        self.at += 1
        return _Edge(start=char == "^") if char in "^$" else _Char(re.escape(char) if char != "." else char)

    def _group(self) -> _Node:
        self.at += 1
        self.depth += 1
        kind = ""
        if self._next() == "?":
            found = _GROUP.match(self.pattern, self.at)
            if found is None:
                raise _UnreadableError
            kind = found[0]
            self.at = found.end()
        inner = self._alternation()
        if self._next() != ")" or self.depth > MAX_DEPTH:
            raise _UnreadableError
        self.at += 1
        self.depth -= 1
        return _Look(inner, kind == "?=") if kind in ("?=", "?!") else inner

    def _escape(self) -> _Char:
        char = self.pattern[self.at + 1 : self.at + 2]
        if not char or (char.isalnum() and char not in "dDwWsS") or not char.isascii():
            raise _UnreadableError
        self.at += 2
        return _Char("\\" + char)

    def _class(self) -> _Char:
        start = self.at
        self.at += 2 if self.pattern[self.at + 1 : self.at + 2] == "^" else 1
        first = self.at
        while self._next() != "]" or self.at == first:
            if self._next() == "\\":
                self._escape()
            elif self._next() == "" or any(self.pattern.startswith(x, self.at) for x in _CLASS_SETS):
                raise _UnreadableError
            else:
                self.at += 1
        self.at += 1
        return _Char(self.pattern[start : self.at])

    def _repeated(self, item: _Node) -> _Node:
        char = self._next()
        least: int
        most: int | None
        if char in ("*", "+", "?"):
            least, most = int(char == "+"), (1 if char == "?" else None)
            self.at += 1
        elif char == "{":
            found = _COUNT.match(self.pattern, self.at)
            if found is None or (not found[1] and not found[3]):
                raise _UnreadableError
            least = int(found[1] or 0)
            most = (int(found[3]) if found[3] else None) if found[2] else least
            self.at = found.end()
        else:
            return item
        if isinstance(item, _Edge | _Look) or (most is not None and most < least):
            raise _UnreadableError
        if self._next() == "?":
            self.at += 1
        if self._next() in ("*", "+", "?", "{") and self._next():
            raise _UnreadableError
        return _Repeat(item, least, most)


def _cost(node: _Node, *, inside: bool = False) -> int:
    """Estimate the steps a backtracking matcher needs for one name at worst; over CHEAP if it may explode."""
    if isinstance(node, _Repeat):
        if inside or node.most == 0:
            return CHEAP + 1
        ways = NAME_LENGTH if node.most is None else max(1, node.most - node.least + 1)
        return min(CHEAP + 1, ways * _cost(node.item, inside=True))
    if isinstance(node, _Alt):
        literal = [_literal(option) for option in node.options]
        if inside or None in literal or len(set(literal)) < len(literal):
            return CHEAP + 1
        return len({len(text) for text in literal if text is not None})
    if isinstance(node, _Look):
        return _cost(node.item, inside=inside)
    total = 1
    for item in node.items if isinstance(node, _Seq) else ():
        total = min(CHEAP + 1, total * _cost(item, inside=inside))
    return total


def _literal(node: _Node) -> str | None:
    """Return the text a node stands for if it is plain text."""
    if isinstance(node, _Seq) and all(isinstance(item, _Char) for item in node.items):
        texts = [item.text for item in node.items if isinstance(item, _Char)]
        plain = all(len(text) == 1 or (text[0] == "\\" and not text[1].isalnum()) for text in texts)
        return "".join(texts) if plain and "." not in texts else None
    return None


# ---- the automaton ------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """A state: consumes a character (``accepts``), checks the place (``edge``, ``look``), or just forks."""

    out: list[int]
    accepts: Matcher | None = None
    edge: bool | None = None
    look: "tuple[_Automaton, bool] | None" = None


@dataclass(slots=True)
class _Automaton:
    """All ways through a pattern at once: the set of states after each character."""

    tree: _Node
    states: list[_State] = field(default_factory=list)
    start: int = 0
    looks: bool = False
    steps: dict[tuple[frozenset[int], str], frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add(_State([]))  # state 0: the whole pattern has matched
        self.start = self._build(self.tree, 0)

    def matches(self, name: str) -> bool:
        """Return True if the pattern matches at the start of ``name``."""
        return self._from(name, 0)

    def _from(self, name: str, at: int) -> bool:
        now = self._closure([self.start], name, at)
        while now:
            if 0 in now:
                return True
            if at == len(name):
                return False
            now = self._step(now, name, at)
            at += 1
        return False

    def _step(self, now: frozenset[int], name: str, at: int) -> frozenset[int]:
        near_end = at + 2 >= len(name)  # ``$`` also matches before a last line feed
        key = (now, name[at])
        if not near_end and not self.looks and key in self.steps:
            return self.steps[key]
        out: list[int] = []
        for number in now:
            accepts = self.states[number].accepts
            if accepts is not None and accepts(name[at]):
                out += self.states[number].out
        after = self._closure(out, name, at + 1)
        if not near_end and not self.looks and len(self.steps) < MAX_STATES:
            self.steps[key] = after
        return after

    def _closure(self, numbers: Iterable[int], name: str, at: int) -> frozenset[int]:
        """Follow every move that needs no character."""
        seen: set[int] = set()
        todo = list(numbers)
        while todo:
            number = todo.pop()
            state = self.states[number]
            if number in seen or not self._passes(state, name, at):
                continue
            seen.add(number)
            if state.accepts is None:
                todo += state.out
        return frozenset(seen)

    @staticmethod
    def _passes(state: _State, name: str, at: int) -> bool:
        if state.edge is not None:
            return at == 0 if state.edge else name[at:] in ("", "\n")
        return state.look is None or state.look[0]._from(name, at) == state.look[1]

    def _add(self, state: _State) -> int:
        if len(self.states) >= MAX_STATES:
            raise _UnreadableError
        self.states.append(state)
        return len(self.states) - 1

    def _build(self, node: _Node, after: int) -> int:
        """Add the states of ``node``; they lead to ``after``. Returns the first one."""
        if isinstance(node, _Char):
            char = re.compile(node.text)
            return self._add(_State([after], accepts=lambda text: char.match(text) is not None))
        if isinstance(node, _Edge):
            return self._add(_State([after], edge=node.start))
        if isinstance(node, _Look):
            self.looks = True
            return self._add(_State([after], look=(_Automaton(node.item), node.wanted)))
        if isinstance(node, _Alt):
            return self._add(_State([self._build(option, after) for option in node.options]))
        if isinstance(node, _Repeat):
            return self._build_repeat(node, after)
        for item in reversed(node.items):
            after = self._build(item, after)
        return after

    def _build_repeat(self, node: _Repeat, after: int) -> int:
        first = after
        if node.most is None:
            first = self._add(_State([after]))
            self.states[first].out.append(self._build(node.item, first))
        for _ in range((node.most or node.least) - node.least):
            first = self._add(_State([self._build(node.item, first), after]))
        for _ in range(node.least):
            first = self._build(node.item, first)
        return first
