"""The commands of a launch script that start a training, with the variables in them resolved.

Assignments are followed in their order; nothing is run. What only running could tell (the output of a
command, a loop, a condition, an argument of the script) stays as it is written, and is named.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_megatron.migrate.shell_words import (
    ARITHMETIC,
    COMMAND,
    LITERAL,
    PLACEHOLDER,
    VARIABLE,
    Part,
    ShellText,
    Token,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_EXPRESSION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9#?@*])(?:\[[@*]\])?(?:(:?[-+])(.*))?\Z", re.DOTALL)
_BLANKS = " \t\n"
_OPENING = ("if", "for", "while", "until", "case", "select")
_CLOSING = ("fi", "done", "esac")
_PROGRAMS = ("mindspeed-train",)
_YOURS = re.compile(r"your [\w ./-]+\Z")
UNSET = "is set nowhere in this script"
"""What is said of a variable that only the environment could hold."""
ARGUMENT = "is an argument of the script"
"""What is said of an argument."""


@dataclass(frozen=True)
class Launch:
    """A command that starts a training.

    Attributes:
        line: the line where it begins.
        launcher: the words before the program: torchrun or python, with options.
        program: the script, or ``mindspeed-train``.
        flags: the words behind it.
        exports: variables of the environment, by name, that the script sets before.
        unresolved: a sentence for each word that only running could tell.
        expressions: what stands in words for the shell, as it is written there.
        unset: those of them whose variable is set nowhere in the script.
        left_out: a sentence for each word that is nothing, since its variable is set nowhere.
    """

    line: int
    launcher: tuple[str, ...]
    program: str
    flags: tuple[str, ...]
    exports: tuple[tuple[str, str], ...] = ()
    unresolved: tuple[str, ...] = ()
    expressions: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def reason_for(self, expression: str) -> str:
        """Return why an expression that stands for no word is none."""
        return ARGUMENT if expression in ("$@", "$*") else UNSET


@dataclass
class _Values:
    """Values of the script's variables: their words, or why they are not known."""

    words: dict[str, list[str]] = field(default_factory=dict)
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)


def launches_of(text: str) -> list[Launch]:
    """Return the commands of a script that start a training, in their order."""
    return list(_Script(text).launches())


class _Script:
    """One reading of a script."""

    def __init__(self, text: str) -> None:
        self._tokens = list(ShellText(text).tokens())
        self._values = _Values()
        self._blocks: list[str] = []
        self._unresolved: list[str] = []
        self._left_out: list[str] = []
        self._expressions: dict[str, bool] = {}

    def launches(self) -> Iterator[Launch]:
        """Follow the script."""
        for command in self._commands():
            first = command[0].plain
            if first in ("then", "else", "elif", "do", "{", "!"):
                command = command[1:]
                first = command[0].plain if command else ""
            if not command:
                continue
            if first in _OPENING or (len(command) == 1 and first.endswith("()")) or first == "function":
                self._blocks.append(first if first in _OPENING else "function")
                continue
            if first in (*_CLOSING, "}"):
                self._blocks = self._blocks[:-1]
                continue
            launch = self._follow(command)
            if launch is not None:
                yield launch

    def _commands(self) -> Iterator[list[Token]]:
        """Yield the words of each command; what a redirection or a pipe leads to is left out."""
        words: list[Token] = []
        skipping = in_array = False
        for token in self._tokens:
            if in_array:
                in_array = token.operator != ")"
                words += [token] if token.parts else []
                if not in_array:
                    words.append(Token(token.line, operator=")"))
                continue
            if token.parts:
                words += [] if skipping else [token]
            elif token.operator == "(" and words and words[-1].plain.endswith("="):
                in_array = True
            elif token.operator == "(" and words:
                # The brackets of a function's name.
                words[-1] = Token(words[-1].line, (Part(LITERAL, words[-1].plain + "()"),))
            elif token.operator in ("<", ">", ">>", "|", "&>", "2>&1", "<<"):
                skipping = True
            elif token.operator != ")":
                if words:
                    yield words
                words, skipping = [], False
        if words:
            yield words

    def _follow(self, command: Sequence[Token]) -> Launch | None:
        words = list(command)
        exports = bool(words) and words[0].plain in ("export", "declare", "local", "readonly")
        if exports:
            words = words[1:]
        while words and (found := self._assignment(words)) is not None:
            name, adds, value = found
            used = words[: value + 1] if words[value].operator == ")" else words[:1]
            self._assign(name, adds, used, exports or len(words) > len(used))
            words = words[len(used) :]
        if exports or not words:
            return None
        return self._launch(words)

    def _assignment(self, words: Sequence[Token]) -> tuple[str, bool, int] | None:
        """Return name, whether it adds, and the place of an array's end; None for another word."""
        head = words[0].parts[0] if words[0].parts else None
        match = _ASSIGNMENT.match(head.text) if head is not None and head.kind == LITERAL else None
        if match is None or head is None or head.quoted:
            return None
        alone = len(words[0].parts) == 1 and match.end() == len(head.text)
        end = next((at for at, word in enumerate(words) if word.operator == ")"), 0) if alone else 0
        return match.group(1), bool(match.group(2)), end

    def _assign(self, name: str, adds: bool, words: Sequence[Token], exported: bool) -> None:
        before, self._unresolved = self._unresolved, []
        if words[-1].operator == ")":
            value = [each for word in words[1:-1] for each in self._expanded(word.parts)]
        else:
            head = words[0].parts[0].text
            rest = head[head.index("=") + 1 :]
            value = ["".join(self._text(part) for part in (Part(LITERAL, rest), *words[0].parts[1:]))]
        reasons, self._unresolved = self._unresolved, before
        values = self._values
        if self._blocks:
            block = self._blocks[-1]
            values.unknown[name] = (f"line {words[0].line} sets it inside of `{block}`",)
            values.words.pop(name, None)
            return
        known = values.words.get(name, [])
        values.words[name] = (
            ([*known, *value] if words[-1].operator == ")" else _added(known, value)) if adds else value
        )
        values.unknown.pop(name, None)
        if reasons:
            values.unknown[name] = tuple(dict.fromkeys(reasons))
        if exported and len(values.words[name]) == 1:
            values.exported[name] = values.words[name][0]

    def _launch(self, words: Sequence[Token]) -> Launch | None:
        line, self._unresolved = words[0].line, []
        expanded = [each for word in words for each in self._expanded(word.parts)]
        place = next((at for at, word in enumerate(expanded) if _starts(expanded, at, word)), None)
        if place is None:
            return None
        unresolved = list(dict.fromkeys(self._unresolved))
        if self._blocks:
            block = "a loop" if self._blocks[-1] in ("for", "while", "until") else f"`{self._blocks[-1]}`"
            unresolved.append(f"line {line}: whether and how often it starts, running {block} alone tells")
        behind = place + 1
        program = expanded[place]
        if program == "-m":
            program, behind = expanded[place + 1], place + 2
        return Launch(
            line,
            tuple(expanded[:place]),
            program,
            tuple(expanded[behind:]),
            tuple(self._values.exported.items()),
            tuple(unresolved),
            tuple(self._expressions),
            tuple(text for text, unset in self._expressions.items() if unset),
            tuple(dict.fromkeys(self._left_out)),
        )

    def _expanded(self, parts: Sequence[Part]) -> list[str]:
        """Return the words that one word becomes: unquoted variables are cut at blanks."""
        found, open_word = [], ""
        started = False
        for part in parts:
            if part.kind == VARIABLE and re.search(r"\[[@*]\]\Z", part.text.split(":")[0]):
                pieces = self._value(part)
                pieces = pieces if part.quoted else [each for piece in pieces for each in piece.split()]
            elif part.kind == VARIABLE and not part.quoted and self._other_word(part) is not None:
                pieces = self._value(part)
            else:
                text = self._text(part)
                cut = part.kind == VARIABLE and not part.quoted
                pieces = text.split() if cut else [text]
                if cut and text and text[0] in _BLANKS and started:
                    found.append(open_word)
                    open_word, started = "", False
            for number, piece in enumerate(pieces):
                if number:
                    found.append(open_word)
                    open_word = ""
                open_word += piece
                started = True
        return [*found, open_word] if started and (open_word or any(part.quoted for part in parts)) else found

    def _text(self, part: Part) -> str:
        """Return the text of a part, or as it is written where it cannot be known."""
        if part.kind == LITERAL:
            return part.text
        if part.kind == PLACEHOLDER:
            self._unresolved.append(f"{part.text} is a placeholder; write the value")
            return part.text
        if part.kind == COMMAND:
            self._unresolved.append(f"{part.text} has to be run; write the value")
            return self._for_the_shell(part.text)
        if part.kind == ARITHMETIC:
            found = _sum(part.text, lambda name: " ".join(self._value(Part(VARIABLE, name))))
            if found is None:
                self._unresolved.append(f"$(({part.text})) cannot be computed; write the value")
                return self._for_the_shell(f"$(({part.text}))")
            return found
        return " ".join(self._value(part))

    def _for_the_shell(self, text: str, unset: bool = False) -> str:
        """Return what stays in a word as it is written, and remember it."""
        self._expressions[text] = unset
        return text

    def _other_word(self, part: Part) -> str | None:
        """Return the word of ``${NAME:-word}`` or ``${NAME:+word}`` where the shell takes it, else None."""
        match = _EXPRESSION.match(part.text)
        if match is None or match.group(2) is None or match.group(1) in self._values.unknown:
            return None
        name, operator, word = match.groups()
        words = self._values.words.get(name)
        # With a colon an empty value counts as none.
        there = words is not None and ((words not in ([], [""])) if operator[0] == ":" else True)
        return word if there == (operator[-1] == "+") else None

    def _value(self, part: Part) -> list[str]:
        match = _EXPRESSION.match(part.text)
        if match is None:
            self._unresolved.append(f"${{{part.text}}} is more than a variable; write the value")
            return [self._for_the_shell(f"${{{part.text}}}")]
        other = self._other_word(part)
        if other is not None:
            found = [each for token in ShellText(other).tokens() for each in self._expanded(token.parts)]
            return [" ".join(found)] if part.quoted else found
        name, operator = match.group(1), match.group(2)
        values = self._values
        if name in values.unknown:
            self._unresolved += [f"${name}: {reason}" for reason in values.unknown[name]]
            return values.words.get(name) or [self._for_the_shell(f"${name}")]
        if operator is not None and operator[-1] == "+":
            if name not in values.words:
                self._left_out.append(f"${{{part.text}}}: ${name} {UNSET}")
            return []
        if name in values.words:
            words = values.words[name]
            if len(words) == 1 and _YOURS.match(words[0]):
                self._unresolved.append(f"${name}: {words[0]!r} is a placeholder; write the value")
                return [self._for_the_shell(f"${name}")]
            return words
        argument = name.isdigit() or name in "@*"
        reason = ARGUMENT if argument else UNSET
        self._unresolved.append(f"${name} {reason}; write the value")
        return [self._for_the_shell(f"${name}", unset=not name.isdigit())]


def _added(before: list[str], value: list[str]) -> list[str]:
    return [(before[0] if before else "") + value[0], *before[1:]]


def _starts(words: Sequence[str], at: int, word: str) -> bool:
    """Return whether a word names the program of a training."""
    if word in _PROGRAMS:
        return True
    starter = words[0].rpartition("/")[2]
    if not starter.startswith(("python", "torchrun", "srun", "msrun", "deepspeed", "nohup")):
        return False
    if word == "-m" and words[at + 1 : at + 2] == ["mindspeed_core.train"]:
        return True
    return at > 0 and word.endswith(".py") and not word.startswith("-")


def _sum(text: str, value_of: Callable[[str], str]) -> str | None:
    """Compute whole numbers with + - * / %; None for anything else."""
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text.strip())

    def compute(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return compute(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(value_of(node.id))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -compute(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = compute(node.left), compute(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return int(left / right)
            if isinstance(node.op, ast.Mod):
                return left % right
        raise ValueError(text)

    try:
        return str(compute(ast.parse(plain, mode="eval")))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
