"""Short names that stay distinguishable: names of kernels without C++ noise, and texts that fit a column's width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|long|long long|short|char|bool)\)(?=[-\w])")
_NAMESPACES = re.compile(r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::)+(?=\w)")
_INSTANCE = re.compile(r"::[\[{]lambda\([^\[\]{}]*?\)(?: \(instance |#)(\d+)\)?[\]}]")
"""A lambda and its number in its function."""
_INNERMOST = re.compile(r"\((?!anonymous namespace)[^()\[\]{}]*\)|\[[^()\[\]{}]*\]|\{[^()\[\]{}]*\}")
"""Parameters of a function and the signature of a lambda, without others inside."""
_CALL_OPERATOR = re.compile(r"::(?:operator *|lambda\d*)?(?: *const)?(?=::|[,>#]|$)")
_RETURNS = re.compile(r"(?<=[<, ])void (?=\w)")
_PLAIN_ARGUMENT = re.compile(
    r"-?\d+[uUlL]*|true|false|(?:const )?(?:unsigned |signed )?(?:int|long|long long|short|char|bool|float|double|void)"
    r"(?: const)?[ *&]*|(?:__)?(?:nv_|hip_)?(?:half2?|bfloat16|bfloat162|bfloat16_t|half_t|tfloat32_t)|Half|BFloat16"
    r"|u?int\d+_t|(?:Tensor(?:List|Iterator)|OffsetCalculator|TrivialOffset|LoadWith|StoreWith|OpaqueType|array\b).*"
)
"""Template arguments that say on which numbers a kernel works, and not what it does."""
_LABEL = re.compile(r"(\s*)(.*?)((?: x\d+)?)", re.DOTALL)
"""A line's label: indentation, path, and number of folded blocks."""


def kernel_names(names: Iterable[str]) -> dict[str, str]:
    """Short names of kernels by their full names; different kernels have different names.

    Return type, parameters, namespaces and casts go; lambdas and template arguments that are numbers or types go too,
    unless two of the kernels differ by nothing else.
    """
    chosen: dict[str, str] = {}
    left = list(dict.fromkeys(names))
    for lambdas, arguments in ((False, False), (True, False), (False, True), (True, True)):
        short = {name: _kernel(name, lambdas, arguments) for name in left}
        users: dict[str, int] = {}
        for text in short.values():
            users[text] = users.get(text, 0) + 1
        taken = set(chosen.values())
        chosen |= {name: text for name, text in short.items() if users[text] == 1 and text not in taken}
        left = [name for name in left if name not in chosen]
    return chosen | {name: name for name in left}


def _kernel(name: str, lambdas: bool, arguments: bool) -> str:
    """A kernel's short name, with or without numbers of lambdas and plain template arguments."""
    text = name.removeprefix("void ").replace("(anonymous namespace)", "<unnamed>")
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and index:
            text = text[:index]
            break
    text = _CAST.sub("", _NAMESPACES.sub("", text))
    text = _INSTANCE.sub(r"#\1" if lambdas else "", text)
    while (reduced := _INNERMOST.sub("", text)) != text:
        text = reduced
    text = _RETURNS.sub("", _CALL_OPERATOR.sub("", text))
    return text if arguments else _without_plain_arguments(text)


def _without_plain_arguments(text: str) -> str:
    """A name without the template arguments that are numbers and types."""
    open_index, end = text.find("<"), text.rfind(">")
    if open_index < 0 or end < open_index:
        return text
    arguments = [_without_plain_arguments(argument.strip()) for argument in _split(text[open_index + 1 : end])]
    telling = [argument for argument in arguments if argument and not _PLAIN_ARGUMENT.fullmatch(argument)]
    if len(telling) == 1 and (wrapped := re.fullmatch(r"\w+<(.*[^>])>+", telling[0])) and "," not in wrapped.group(1):
        telling = [wrapped.group(1)]  # of a wrapper of one function, such as BinaryFunctor<AddFunctor>, the function
    return (
        f"{text[:open_index]}<{', '.join(telling)}>{text[end + 1 :]}"
        if telling
        else text[:open_index] + text[end + 1 :]
    )


def _split(arguments: str) -> Iterator[str]:
    """Template arguments one by one."""
    depth, start = 0, 0
    for index, letter in enumerate(arguments):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            yield arguments[start:index]
            start = index + 1
    yield arguments[start:]


def fit(texts: Sequence[str], width: int, paths: bool = False) -> list[str]:
    """Texts cut to a width so that different texts stay different, if the width allows it.

    Args:
        texts: The cells of one column.
        width: Width in cells.
        paths: The texts are layer paths, whose leading parts go first. Other texts lose their middle, and what they
            have in common with those that they would be confused with.
    """
    short = {text: _path(text, width) if paths else _middle(text, width) for text in texts}
    differences: dict[str, set[int]] = {text: set() for text in short}
    for _ in range(8):
        users: dict[str, list[str]] = {}
        for text, cut in short.items():
            users.setdefault(cut, []).append(text)
        for group in users.values():
            if len(group) > 1:
                length = _common_length(group)
                for text in group:
                    differences[text].add(length)
                    short[text] = _with_differences(text, sorted(differences[text]), width)
        if len(users) == len(short):
            break
    return [short[text] for text in texts]


def _with_differences(text: str, places: Sequence[int], width: int) -> str:
    """The beginning of a text, and what follows each place where another text differs from it."""
    stem = re.match(r"\s*[\w.]*", text[: places[0]]).group()[: max(width // 3, 1)]  # type: ignore[union-attr]
    if len(places) == 1:
        return _middle(f"{stem}…{text[places[0] :]}", width)
    stem = stem[: max(width // 4, 1)]
    room = (width - len(stem)) // len(places) - 1
    ends = [*places[1:], len(text)]
    return stem + "".join(f"…{_fitting(text[start:end], room)}" for start, end in zip(places, ends, strict=True))


def _common_length(texts: Sequence[str]) -> int:
    """Number of letters that texts have in common at their beginning."""
    first, last = min(texts), max(texts)
    length = next(
        (index for index, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first)
    )
    while length and any(text[length : length + 1].isdigit() for text in texts):  # the difference begins with a letter
        length -= 1
    return length


def _middle(text: str, width: int) -> str:
    """A text without its middle; a number is never cut, but omitted."""
    if cell_len(text) <= width:
        return text
    indent = text[: len(text) - len(text.lstrip())]
    text, width = text.lstrip().rstrip(">"), max(width - len(indent), 1)
    tail = _fitting(text, width // 3, from_end=True) if width > 8 else ""
    if text[: -len(tail) or None][-1:].isalnum():
        tail = tail.lstrip("0123456789")
    start = _fitting(text, width - 1 - cell_len(tail))
    return f"{indent}{start}…{tail}"


def _fitting(text: str, width: int, from_end: bool = False) -> str:
    """The beginning or end of a text that fits and cuts no number."""
    letters = text[::-1] if from_end else text
    count = width
    while count and cell_len(letters[:count]) > width:
        count -= 1
    if letters[:count][-1:].isdigit() and letters[count : count + 1].isdigit():
        count = len(letters[:count].rstrip("0123456789.,"))
    return letters[:count][::-1] if from_end else letters[:count]


def _path(path: str, width: int) -> str:
    """A layer's path without leading parts, because its end distinguishes layers."""
    if cell_len(path) <= width:
        return path
    indent, name, count = _LABEL.fullmatch(path).groups()  # type: ignore[union-attr]  # it matches every text
    room = width - len(indent) - len(count)
    parts = name.split(".")
    for first in range(1, len(parts)):
        text = f"….{'.'.join(parts[first:])}"
        if cell_len(text) <= room:
            return f"{indent}{text}{count}"
    return f"{indent}{_middle(parts[-1], room)}{count}"
