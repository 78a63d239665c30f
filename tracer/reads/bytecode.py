"""The byte code of functions, without what only the interpreter cares for; taken apart once for each code object."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence

NOISE = {"CACHE", "PRECALL", "PUSH_NULL", "RESUME", "NOP", "COPY_FREE_VARS", "EXTENDED_ARG", "NOT_TAKEN"}
ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_NOT_LEFT = {"SEND", "JUMP_BACKWARD_NO_INTERRUPT"}  # within a generator


@functools.lru_cache(maxsize=4096)
def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions that do something."""
    return tuple(i for i in dis.get_instructions(code) if i.opname not in NOISE)


@functools.lru_cache(maxsize=4096)
def telling_instructions(code: types.CodeType) -> tuple[tuple[int, int, dis.Instruction], ...]:
    """Of the instructions, those that name something, store, or ask for identity: their number and line, and they."""
    telling, line = [], code.co_firstlineno
    for at, instruction in enumerate(instructions_of(code)):
        line = line_of(instruction) or line
        if isinstance(instruction.argval, str) or instruction.opname.startswith(_TELLING):
            telling.append((at, line, instruction))
    return tuple(telling)


_TELLING = ("STORE_", "DELETE_", "IMPORT_", "LOAD_FAST", "IS_OP", "CONTAINS_OP", "POP_TOP")


@functools.lru_cache(maxsize=4096)
def operand_before(code: types.CodeType, offset: int) -> int:
    """Where the instructions begin that compute what is topmost on the stack there: `i + 1` of `a[i + 1] = b`.

    The offset itself where a jump is among them.
    """
    executed = [i for i in dis.get_instructions(code) if i.offset < offset]
    depth = 0
    for instruction in reversed(executed):
        if instruction.opcode in _JUMPS:
            break
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth == 1:
            return int(instruction.offset)
    return offset


def line_of(instruction: dis.Instruction) -> int | None:
    """The line of the source, where it is known."""
    return instruction.positions.lineno if instruction.positions else None


def straight_count(instructions: Sequence[dis.Instruction]) -> int:
    """The number of first instructions that run at every call, if the function is called at all."""
    jumps = (n for n, i in enumerate(instructions) if i.opcode in _JUMPS and i.opname not in _NOT_LEFT)
    return next(jumps, len(instructions))
