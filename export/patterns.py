"""How configs name Linears: exact names, `re:` expressions, class names, and lists made short.

compressed-tensors, GPTQ and AWQ configs all say which modules are packed, each in its own notation
(see ct_config.py, gptq_config.py, awq.py). What they share is here: what an entry means, and how
the names of one scheme become few entries.
"""

import re
from collections.abc import Collection, Sequence

from compress.models.family import FAMILIES

LINEAR = "Linear"
EMBEDDING = "Embedding"
_EMBEDDINGS = frozenset(family.embedding for family in FAMILIES.values())
_HEADS = frozenset(family.head for family in FAMILIES.values())

# Serving engines stack these into one matrix and look that one's name up in the config.
_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def is_embedding(module_name: str) -> bool:
    """Whether `module_name` is the token embedding, which the class name `Linear` does not mean."""
    return module_name in _EMBEDDINGS


def is_head(module_name: str) -> bool:
    """Whether `module_name` is the output head."""
    return module_name in _HEADS


def matches(module_name: str, pattern: str) -> bool:
    """Whether the compressed-tensors entry `pattern` means the module `module_name`.

    An expression matches from the start of the name, not necessarily to its end.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module_name) is not None
    return pattern in (module_name, EMBEDDING if is_embedding(module_name) else LINEAR)


def check_expressions(patterns: Sequence[str]) -> None:
    """Raise ValueError for the first of `patterns` that is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"quantization_config: bad expression {pattern!r} ({error})") from None


def compact(names: Collection[str], others: Collection[str]) -> list[str]:
    """Entries that mean every one of `names` and none of `others`: names, or `re:` expressions.

    Names that differ in numbers only (one Linear of every block) become one expression, unless one
    of `others` differs from them in numbers only as well.
    """
    taken = {_template(name) for name in others}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_template(name), []).append(name)
    entries = []
    for template, members in groups.items():
        if template in taken or len(members) == 1:
            entries += members
        else:
            entries.append(f"re:^{template}$")
    return entries


def with_stacked(entry: str) -> str:
    """The entry (see `compact`) as an expression, which the name of the stacked matrix matches too.

    `model.layers.0.mlp.up_proj` -> `^model\\.layers\\.0\\.mlp\\.(up_proj|gate_up_proj)$`
    """
    is_expression = entry.startswith("re:")
    expression = entry.removeprefix("re:") if is_expression else f"^{re.escape(entry)}$"
    head, dot, leaf = expression.removesuffix("$").rpartition(r"\.")
    stacked = _STACKED.get(leaf)
    return f"{head}{dot}({leaf}|{stacked})$" if stacked else expression


def _template(name: str) -> str:
    """`name` as an expression in which every number of its own is any number."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
