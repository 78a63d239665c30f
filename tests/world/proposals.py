"""Arguments for classes that the table does not know: guesses from the signature, tried until eager takes one.

    python tests/world/propose.py PACKAGE ... >> tests/world/table.txt

What eager's forward and backward took is data for the table; that the numbers make sense is for a reader to say.
"""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from published import class_named, imported, limit
from scenes import SCENES
from supervised import answer

TRIES, SECONDS, AT_ONCE = 3000, 4.0, 3.0
FAMILIES = ("4, 5", "4", "4, 4", "2, 3, 4", "2, 3, 4, 4", "1, 4, 6, 6", "5, 1", "2, 4, 3, 8", "2, 2, 3, 4, 4", "")
"""Shapes that the tensors of a guess have in common."""
NUMBERS = ("0.5", "2.0", "2", "4", "1")
SWITCHES = ("False", "True")
NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"^(dim|axis|d)$", ("-1", "1", "0")),
    (r"group|^pg$", ("group()",)),
    (r"device", ("torch.device('cpu')", "'cpu'")),
    (r"dtype", ("torch.float32", "torch.float64")),
    (r"reduction|^mode$|rounding|method", ("'mean'", "'sum'", "'nearest'", "'constant'", "'zero'")),
    (r"mask", ("mask({shape})", "None", "fixed(positive({shape}))")),
    (r"labels?$|targets?$|ind(ex|ices|s)?$|idx|ids?$|classes",
     ("integers(3, 4)", "integers(4, {shape})", "integers(2, 3, 4)", "fixed(normal({shape}))")),
    (r"shape|sizes?$", ("size({shape})", "4", "2")),
    (r"bits?|^n$|^k$|num|steps?$|levels?|order|degree|count|iters?|chunk|world|rank|stride|padding|kernel|dilation",
     ("4", "2", "1", "3", "8", "0")),
    (r"inplace|training|^is_|^use_|^return_|^with_|signed|symm|narrow|keep|reverse|causal|half|flag|enable|async|_only",
     SWITCHES),
    (r"preserve|log_|normalize|deterministic|soft$|hard$", SWITCHES),
    (r"alpha|beta|gamma|temp|tau|lamb|eps|rate|slope|thr|coef|factor|sigma|width|height|margin|momentum|lr|decay",
     ("0.5", "2.0", "positive()", "fixed(positive())", "positive({last})", "positive({shape})")),
    (r"prob|ratio|smooth|limit|const|scalar|maxval|minval|min_|max_|clip",
     ("0.5", "2.0", "positive()", "fixed(positive())", "positive({last})", "positive({shape})")),
    (r"scale|zero|step_?size|^s$|delta|^q[np]$|min|max|bound",
     ("positive()", "0.5", "1.0", "positive({last})", "positive({shape})", "fixed(positive())")),
    (r"^(fn|func|f|function|run_function|forward_fn|callback)$", ("name('torch.tanh')", "name('torch.sum')")),
    (r"^(module|layer|model|mod|net)$", ("call('torch.nn.Linear', 5, 5)",)),
    (r"weights?$|^w$", ("normal({last}, {last})", "normal({shape})", "normal({last})", "None")),
    (r"bias", ("normal({last})", "None", "False")),
)  # fmt: skip
TENSORS = ("normal({shape})", "positive({shape})", "uniform({shape})", "integers(4, {shape})", "definite(4, 4)")
OTHERS = ("0.5", "2", "False", "None", "True", "-1", "[normal({shape}), normal({shape})]")


def proposed(cls: Any) -> Iterator[str]:
    """Lists of arguments as text, the likeliest first."""
    parameters = parameters_of(cls)
    lists = [ordered(choices) for choices in (candidates(parameters, family) for family in FAMILIES)]
    for round_ in itertools.zip_longest(*lists):
        yield from filter(None, round_)


def parameters_of(cls: Any) -> list[inspect.Parameter]:
    signature = inspect.signature(cls.forward)
    old = cls.setup_context is torch.autograd.Function.setup_context
    return list(signature.parameters.values())[1 if old else 0 :]


def candidates(parameters: Sequence[inspect.Parameter], family: str) -> list[list[str]]:
    """For each parameter what it could be; one that takes any number of arguments gets two of them."""
    found: list[list[str]] = []
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.KEYWORD_ONLY):
            continue
        if p.kind is p.VAR_POSITIONAL:
            found += [[f"normal({family})"], [f"normal({family})", "0.5"]]
            continue
        found.append(_candidates(p, family))
    return found


def _candidates(p: inspect.Parameter, family: str) -> list[str]:
    last = family.rpartition(", ")[2] or "1"
    listed = [*_of_default(p), *_of_annotation(p), *_of_name(p.name), *TENSORS, *OTHERS]
    return list(dict.fromkeys(text.format(shape=family, last=last) for text in listed))


def _of_default(p: inspect.Parameter) -> tuple[str, ...]:
    plain = isinstance(p.default, int | float | str | bool | None)
    return (repr(p.default),) if p.default is not p.empty and plain else ()


def _of_annotation(p: inspect.Parameter) -> tuple[str, ...]:
    text = str(p.annotation)
    if "bool" in text:
        return SWITCHES
    if "Tensor" in text:
        return TENSORS[:1]
    if "float" in text:
        return NUMBERS
    return ("4", "2", "1", "-1") if "int" in text.lower() else ()


def _of_name(name: str) -> tuple[str, ...]:
    return next((texts for pattern, texts in NAMES if re.search(pattern, name.lower())), ())


def ordered(choices: list[list[str]]) -> Iterator[str]:
    """Every choice of one text each, in order of how far down the lists it goes."""
    for total in range(sum(len(c) - 1 for c in choices) + 1):
        for picked in _picks(choices, total):
            yield ", ".join(picked)


def _picks(choices: list[list[str]], total: int) -> Iterator[tuple[str, ...]]:
    if not choices:
        if total == 0:
            yield ()
        return
    for i in range(min(total, len(choices[0]) - 1) + 1):
        for rest in _picks(choices[1:], total - i):
            yield (choices[0][i], *rest)


# ------------------------------------------------------------------ trying
def worth(cls: Any, text: str) -> int:
    """2: eager's forward and backward take the arguments, and a gradient comes. 1: none comes. 0: they raise."""
    scene = SCENES["backward"]
    try:
        with limit(AT_ONCE):
            seen = scene.play(cls.apply, scene, text)
    except Exception:
        return 0
    gradients = [value for label, value in seen if label.startswith("gradient")]
    return 2 if any(isinstance(g, torch.Tensor) for g in gradients) else 1 if seen else 0


def first_that_works(cls: Any) -> tuple[str | None, int]:
    """The text and its worth; where no gradient comes, the first that a backward took."""
    until, second = time.process_time() + SECONDS, None
    for text in itertools.islice(proposed(cls), TRIES):
        if time.process_time() > until:
            break
        found = worth(cls, text)
        if found == 2:
            return text, 2
        if found == 1 and second is None:
            second = text
    return second, int(second is not None)


def proposals(asked: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The answer about one class."""
    why = imported(asked["module"], 120)
    cls = class_named(asked["module"], asked["class"])
    try:
        text, found = (None, 0) if cls is None else first_that_works(cls)
    except Exception as error:
        text, found, why = None, 0, repr(error)
    yield {"arguments": text, "worth": found, "why": why}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(proposals)
