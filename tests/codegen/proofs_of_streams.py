"""Texts of kernels that stream: several products, loops along one axis with computed ends, whole blocks without masks.

Written by hand, so that proofs are tried on texts that no emitter decides. Rows [M], stream [N], head size [D].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from fusegrad.codegen import Buffer, Kernel, Kernels, Pointer, Ref, Scalar
from fusegrad.ir import Graph, Size, TensorType


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


M, N, D, Z, HEADS, STEP, SPAN = map(symbol, ("m", "n", "d", "z", "heads", "step", "span"))
ROWS, COLS = 128, 64
FEW = 2**31 - 2**17
"""Sizes below it may be rounded up to a block in 32 bits."""
FIT = (M < FEW, N < FEW, Z < FEW)
SHORT = sympy.Le(D, 128)


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class Stream:
    """One kernel: its body, the tensors by name, sizes that are passed, and under which guards."""

    body: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    scalars: Mapping[str, Size]
    grid: Size
    guards: tuple[Any, ...] = FIT
    constants: Mapping[str, int] = field(default_factory=dict)

    def replaced(self, old: str, new: str) -> Stream:
        assert old in self.body, old
        return replace(self, body=self.body.replace(old, new))

    @property
    def source(self) -> str:
        names = [f"{n}_ptr" for n in (*self.inputs, *self.outputs)]
        arguments = ", ".join((*names, *self.scalars, *(f"{c}: tl.constexpr" for c in self.all_constants)))
        return f"@triton.jit\ndef k({arguments}):\n" + indented(self.body)

    @property
    def all_constants(self) -> dict[str, int]:
        return {"BLOCK_M": ROWS, "BLOCK_N": COLS, **self.constants}

    def kernels(self) -> tuple[Graph, Kernels]:
        """A graph of the inputs alone: results lie in buffers between kernels."""
        graph = Graph("stream")
        for name, t in self.inputs.items():
            graph.input(TensorType(t.shape, t.dtype), name, t.strides)
        buffers = tuple(Buffer(n, t.dtype, t.shape, row_major(t.shape)) for n, t in self.outputs.items())
        pointers = [Pointer(f"{n}_ptr", Ref("input", i), t.dtype) for i, (n, t) in enumerate(self.inputs.items())]
        pointers += [Pointer(f"{b.name}_ptr", Ref("temporary", i), b.dtype) for i, b in enumerate(buffers)]
        arguments = (*pointers, *(Scalar(n, v) for n, v in self.scalars.items()))
        kernel = Kernel("k", self.source, arguments, {**self.all_constants}, self.grid, 8, guards=self.guards)
        return graph, Kernels((kernel,), buffers)


def row_major(shape: Sequence[Size]) -> tuple[Size, ...]:
    strides: list[Size] = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)


def indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.strip("\n").splitlines())


# ------------------------------------------------------------------ pieces
def turns(start: str, stop: str, body: str, block: str = "BLOCK_N", name: str = "col_at") -> str:
    return f"for {name} in tl.range({start}, {stop}, {block}, num_stages=2):\n{indented(body)}"


def whole(body: str) -> str:
    """Without the masks along the stream, and the lines that make them."""
    kept = [line for line in body.splitlines() if not line.endswith("# masked")]
    text = "\n".join(kept)
    for name in ("inside_col_2", "inside_col"):
        text = text.replace(f"{name} & ", "").replace(f", mask={name}, other=0.0", "")
    return text


WIDE = """
pid = tl.program_id(0)
rest = tl.cast(pid // tl.cdiv(M, BLOCK_M), tl.int64)
first_row = tl.cast(pid % tl.cdiv(M, BLOCK_M), tl.int64) * BLOCK_M
"""
NARROW = """
pid = tl.program_id(0)
rest = tl.cast(pid // tl.cdiv(M, BLOCK_M), tl.int64)
first_row = pid % tl.cdiv(M, BLOCK_M) * BLOCK_M
"""
LANES = """
row = tl.arange(0, BLOCK_M)[:, None]
inside_row = row < M - first_row
col = tl.arange(0, BLOCK_N)[None, :]
col_2 = tl.arange(0, BLOCK_N)[:, None]
d = tl.arange(0, BLOCK_D)[None, :]
"""


def query(at: str = "(rest * M + first_row) * D", place: str = "at + (row * D + d)") -> str:
    """The rows of a program, and where it begins: nothing seen, nothing summed up."""
    return f"""
at = {at}
q_tile = tl.load(q_ptr + {place}, mask=inside_row & (d < D), other=0.0)
top = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)
total = tl.zeros([BLOCK_M, 1], tl.float32)
acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
"""


KEY, VALUE = "k_ptr + at_2 + (col_2 * D + d), mask=inside_col_2 & (d < D)", "v_ptr + at_2 + (col_2 * D + d)"


SCALED = "tl.dot(q_tile, tl.trans(k_tile)) * 0.125"


def attend(key: str = KEY, value: str = VALUE, score: str = SCALED, alive: str = "") -> str:
    """A block of the stream: scores, what they weigh, and what was summed up before it in proportion."""
    return f"""
first_col = tl.cast(col_at, tl.int64)
inside_col = col < N - first_col  # masked
inside_col_2 = col_2 < N - first_col  # masked
at_2 = (rest * N + first_col) * D
k_tile = tl.load({key}, other=0.0)
s = {score}
s = tl.where(inside_col{alive}, s, float("-inf"))  # masked
new = tl.maximum(top, tl.max(s, 1, keep_dims=True))
use = tl.where(new == float("-inf"), 0.0, new)
ratio = tl.exp2((top - use) * 1.44269504)
p = tl.exp2((s - use) * 1.44269504)
total = total * ratio + tl.sum(p, 1, keep_dims=True)
v_tile = tl.load({value}, mask=inside_col_2 & (d < D), other=0.0)
acc = tl.dot(p.to(tl.bfloat16), v_tile, acc * ratio)
top = new
"""


BEFORE = " & (row >= col + (first_col - first_row))"
ATTEND, CAUSAL = attend(), attend(alive=BEFORE)


def result(at: str = "at + (row * D + d)", row: str = "rest * M + first_row + row") -> str:
    return f"""
tl.store(out_ptr + {at}, (acc / total).to(tl.bfloat16), mask=inside_row & (d < D))
tl.store(lse_ptr + {row}, top + tl.log(total), mask=inside_row)
"""


ROWS_OF = {"q": Tensor("bf16", (Z, M, D))}
COLS_OF = {"k": Tensor("bf16", (Z, N, D)), "v": Tensor("bf16", (Z, N, D))}
RESULTS = {"out": Tensor("bf16", (Z, M, D)), "lse": Tensor("f32", (Z, M))}
SIZES = {"M": M, "N": N, "D": D}
GRID = Z * sympy.ceiling(M / ROWS)


def attention(loops: str, bounds: str = "", begin: str = WIDE, guards: tuple[Any, ...] = (*FIT, SHORT)) -> Stream:
    body = begin + LANES + query() + bounds + loops + result()
    return Stream(body, ROWS_OF | COLS_OF, RESULTS, SIZES, GRID, guards, {"BLOCK_D": 128})


# ------------------------------------------------------------------ forward
TAIL = "\nwhole_stop = N // BLOCK_N * BLOCK_N\n"


def two_loops(body: str, stop: str = "stop") -> str:
    return turns("0", "whole_stop", whole(body)) + turns("whole_stop", stop, body)


CAUSAL_BOUNDS = """
last_row = tl.minimum(first_row + BLOCK_M, M) - 1
stop = tl.minimum(last_row + 1, N)
whole_stop = tl.minimum(first_row + 1, N) // BLOCK_N * BLOCK_N
"""
WINDOW_BOUNDS = """
last_row = tl.minimum(first_row + BLOCK_M, M) - 1
start = tl.maximum(first_row - 255, 0) // BLOCK_N * BLOCK_N
stop = tl.minimum(last_row + 1, N)
after = tl.cdiv(stop, BLOCK_N) * BLOCK_N
whole_start = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last_row - 255, 0), BLOCK_N) * BLOCK_N, start), after)
whole_stop = tl.maximum(tl.minimum(first_row + 1, N) // BLOCK_N * BLOCK_N, whole_start)
"""


def three_loops(body: str, start: str, whole_start: str, whole_stop: str, stop: str, **how: str) -> str:
    around = turns(start, whole_start, body, **how), turns(whole_stop, stop, body, **how)
    return around[0] + turns(whole_start, whole_stop, whole(body), **how) + around[1]


def window(size: str) -> tuple[str, str]:
    """(loops, bounds): of so many keys up to the row's own."""
    body = attend(alive=f"{BEFORE} & (row < col + (first_col - first_row) + {size})")
    loops = three_loops(body, "start", "whole_start", "whole_stop", "stop")
    return loops, WINDOW_BOUNDS.replace("255", f"({size} - 1)")


def divisible(*sizes: tuple[Size, int]) -> tuple[Any, ...]:
    return tuple(sympy.Eq(sympy.Mod(n, block), 0) for n, block in sizes)


def constant_head(stream: Stream, size: int = 64) -> Stream:
    """The head size is known: no mask along it."""
    body = stream.body.replace(" & (d < D)", "").replace(", mask=(d < D), other=0.0", "")
    small = {D: size}

    def sized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exchanged = lambda shape: tuple(n.subs(small) if isinstance(n, sympy.Basic) else n for n in shape)  # noqa: E731
        return {k: Tensor(t.dtype, exchanged(t.shape), t.strides and exchanged(t.strides)) for k, t in tensors.items()}

    scalars = {k: v for k, v in stream.scalars.items() if v != D}
    guards = tuple(g for g in stream.guards if D not in g.free_symbols)
    constants = {**stream.constants, "BLOCK_D": size, "D": size}
    return Stream(body, sized(stream.inputs), sized(stream.outputs), scalars, stream.grid, guards, constants)


# ------------------------------------------------------------------ backward by keys: the stream is the queries
KEYS = """
pid = tl.program_id(0)
rest = tl.cast(pid // tl.cdiv(N, BLOCK_N), tl.int64)
first_key = tl.cast(pid % tl.cdiv(N, BLOCK_N), tl.int64) * BLOCK_N
key = tl.arange(0, BLOCK_N)[:, None]
inside_key = key < N - first_key
row = tl.arange(0, BLOCK_M)[None, :]
row_2 = tl.arange(0, BLOCK_M)[:, None]
d = tl.arange(0, BLOCK_D)[None, :]
at = (rest * N + first_key) * D
k_tile = tl.load(k_ptr + at + (key * D + d), mask=inside_key & (d < D), other=0.0)
v_tile = tl.load(v_ptr + at + (key * D + d), mask=inside_key & (d < D), other=0.0)
dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
last_key = tl.minimum(first_key + BLOCK_N, N) - 1
start = first_key // BLOCK_M * BLOCK_M
whole_start = tl.minimum(tl.cdiv(last_key, BLOCK_M) * BLOCK_M, tl.cdiv(M, BLOCK_M) * BLOCK_M)
whole_start = tl.maximum(whole_start, start)
whole_stop = tl.maximum(M // BLOCK_M * BLOCK_M, whole_start)
"""
TO_KEYS = """
first_row = tl.cast(row_at, tl.int64)
inside_col = row < M - first_row  # masked
inside_col_2 = row_2 < M - first_row  # masked
at_2 = (rest * M + first_row) * D
q_tile = tl.load(q_ptr + at_2 + (row_2 * D + d), mask=inside_col_2 & (d < D), other=0.0)
s = tl.dot(k_tile, tl.trans(q_tile)) * 0.125
alive = row + (first_row - first_key) >= key  # masked
s = tl.where(inside_col & alive, s, float("-inf"))  # masked
at_3 = rest * M + first_row
lse = tl.load(lse_ptr + at_3 + row, mask=inside_col, other=0.0)
p = tl.exp2((s - lse) * 1.44269504)
g_tile = tl.load(g_ptr + at_2 + (row_2 * D + d), mask=inside_col_2 & (d < D), other=0.0)
dv = tl.dot(p.to(tl.bfloat16), g_tile, dv)
dp = tl.dot(v_tile, tl.trans(g_tile))
delta = tl.load(delta_ptr + at_3 + row, mask=inside_col, other=0.0)
ds = p * (dp - delta) * 0.125
dk = tl.dot(ds.to(tl.bfloat16), q_tile, dk)
"""
OF_KEYS = """
tl.store(dk_ptr + at + (key * D + d), dk.to(tl.bfloat16), mask=inside_key & (d < D))
tl.store(dv_ptr + at + (key * D + d), dv.to(tl.bfloat16), mask=inside_key & (d < D))
"""
KEY_LOOPS = three_loops(TO_KEYS, "start", "whole_start", "whole_stop", "M", block="BLOCK_M", name="row_at")
BACKWARD_INPUTS = COLS_OF | ROWS_OF | {"g": ROWS_OF["q"], "lse": RESULTS["lse"], "delta": RESULTS["lse"]}
BACKWARD_RESULTS = {"dk": COLS_OF["k"], "dv": COLS_OF["v"]}
BACKWARD = Stream(
    KEYS + KEY_LOOPS + OF_KEYS, BACKWARD_INPUTS, BACKWARD_RESULTS, SIZES, Z * sympy.ceiling(N / COLS), (*FIT, SHORT),
    {"BLOCK_D": 128},
)  # fmt: skip

# ------------------------------------------------------------------ heads that share keys: a loop around the stream
GROUPED = replace(
    BACKWARD,
    body=KEYS + turns("0", "HEADS", KEY_LOOPS, "1", "head").replace(", 1, num_stages=2", "") + OF_KEYS,
    inputs=COLS_OF | {"q": Tensor("bf16", (Z, HEADS, M, D)), "g": Tensor("bf16", (Z, HEADS, M, D)),
                      "lse": Tensor("f32", (Z, HEADS, M)), "delta": Tensor("f32", (Z, HEADS, M))},
    scalars={**SIZES, "HEADS": HEADS},
    guards=(*FIT, SHORT, HEADS < FEW),
).replaced("rest * M + first_row", "(rest * HEADS + head) * M + first_row")  # fmt: skip

# ------------------------------------------------------------------ a long depth: a loop inside the stream's
DEEP = """
first_col = tl.cast(col_at, tl.int64)
inside_col = col < N - first_col  # masked
inside_col_2 = col_2 < N - first_col  # masked
s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
for k_at in tl.range(0, K, BLOCK_K, num_stages=3):
    first_k = tl.cast(k_at, tl.int64)
    x = tl.load(x_ptr + first_row * K + first_k + (row * K + k), mask=inside_row & (k < K - first_k), other=0.0)
    w = tl.load(w_ptr + first_col * K + first_k + (col_2 * K + k), mask=inside_col_2 & (k < K - first_k), other=0.0)
    s = tl.dot(x, tl.trans(w), s)
s = tl.where(inside_col, s, float("-inf"))  # masked
new = tl.maximum(top, tl.max(s, 1, keep_dims=True))
total = total * tl.exp(top - new) + tl.sum(tl.exp(s - new), 1, keep_dims=True)
picked += tl.where(col + first_col == label, s, 0.0)
top = new
"""
CROSS_ENTROPY = Stream(
    """
first_row = tl.cast(tl.program_id(0), tl.int64) * BLOCK_M
row = tl.arange(0, BLOCK_M)[:, None]
inside_row = row < M - first_row
col = tl.arange(0, BLOCK_N)[None, :]
col_2 = tl.arange(0, BLOCK_N)[:, None]
k = tl.arange(0, BLOCK_K)[None, :]
label = tl.load(label_ptr + first_row + row, mask=inside_row, other=0)
top = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)
total = tl.zeros([BLOCK_M, 1], tl.float32)
picked = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
"""
    + TAIL + turns("0", "whole_stop", whole(DEEP)) + turns("whole_stop", "N", DEEP) + """
loss = top + tl.log(total) - tl.sum(picked, 1, keep_dims=True)
tl.store(loss_ptr + first_row + row, loss, mask=inside_row)
""",
    {"x": Tensor("bf16", (M, D)), "w": Tensor("bf16", (N, D)), "label": Tensor("i64", (M,))},
    {"loss": Tensor("f32", (M,))},
    {"M": M, "N": N, "K": D}, sympy.ceiling(M / ROWS), (*FIT, D < FEW, ROWS * D < 2**29), {"BLOCK_K": 64},
)  # fmt: skip

# ------------------------------------------------------------------ a stream in chunks, one a program
CHUNKED = """
pid = tl.program_id(0)
chunks = tl.cdiv(N, CHUNK)
chunk = tl.cast(pid % chunks, tl.int64)
rest = tl.cast(pid // chunks, tl.int64)
first_row = 0
start = chunk * CHUNK
stop = tl.minimum(start + CHUNK, N)
whole_stop = tl.maximum(stop // BLOCK_N * BLOCK_N, start)
"""
CHUNK_RESULT = """
at_3 = (rest * chunks + chunk) * M
tl.store(part_ptr + at_3 * D + (row * D + d), acc, mask=inside_row & (d < D))
tl.store(top_ptr + at_3 + row, top, mask=inside_row)
tl.store(total_ptr + at_3 + row, total, mask=inside_row)
"""
PARTS = sympy.ceiling(N / 1024)
CHUNKS = Stream(
    CHUNKED + LANES + query() + turns("start", "whole_stop", whole(ATTEND)) + turns("whole_stop", "stop", ATTEND)
    + CHUNK_RESULT,
    ROWS_OF | COLS_OF,
    {"part": Tensor("f32", (Z, PARTS, M, D))} | {n: Tensor("f32", (Z, PARTS, M)) for n in ("top", "total")},
    SIZES, Z * PARTS, (*FIT, SHORT, sympy.Le(M, 16)), {"BLOCK_D": 128, "BLOCK_M": 16, "CHUNK": 1024},
)  # fmt: skip
COUNTED = replace(
    CHUNKS,
    outputs={n: replace(t, shape=(Z, SPAN, *t.shape[2:])) for n, t in CHUNKS.outputs.items()},
    scalars={**SIZES, "chunks": SPAN}, grid=Z * SPAN, guards=(*CHUNKS.guards, SPAN < 2**16),
).replaced("chunks = tl.cdiv(N, CHUNK)\n", "chunk_size = tl.cdiv(tl.cdiv(N, BLOCK_N), chunks) * BLOCK_N\n").replaced(
    "CHUNK", "chunk_size"
)  # fmt: skip

# ------------------------------------------------------------------ any strides, heads that share keys
FREE = {f"{name}_{axis}": symbol(f"{name}_{axis}") for name in "qkv" for axis in ("batch", "head", "step")}
GROUP = 4


def strided(name: str, heads: Size, rows: Size) -> Tensor:
    return Tensor("bf16", (Z, heads, rows, D), (*(FREE[f"{name}_{axis}"] for axis in ("batch", "head", "step")), 1))


def shared(name: str) -> str:
    first = f"batch * {name}_batch + shared * {name}_head + first_col * {name}_step"
    return f"{name}_ptr + {first} + (col_2 * {name}_step + d)"


HEAD = """
batch = rest // HEADS
head = rest % HEADS
shared = head // GROUP
"""
STRIDED = Stream(
    WIDE + HEAD + LANES
    + query("batch * q_batch + head * q_head + first_row * q_step", "at + (row * q_step + d)") + CAUSAL_BOUNDS
    + two_loops(attend(f"{shared('k')}, mask=inside_col_2 & (d < D)", shared("v"), alive=BEFORE))
    + result("((batch * M + first_row) * HEADS + head) * D + (row * HEADS * D + d)"),
    {"q": strided("q", GROUP * HEADS, M), "k": strided("k", HEADS, N), "v": strided("v", HEADS, N)},
    {"out": Tensor("bf16", (Z, M, GROUP * HEADS, D)), "lse": Tensor("f32", (Z, GROUP * HEADS, M))},
    {**SIZES, "HEADS": GROUP * HEADS, **FREE}, Z * GROUP * HEADS * sympy.ceiling(M / ROWS),
    (*FIT, SHORT, HEADS < 2**16, *(ROWS * FREE[f"{n}_step"] < 2**29 for n in "qkv"), ROWS * GROUP * HEADS * D < 2**29),
    {"BLOCK_D": 128, "GROUP": GROUP},
)  # fmt: skip

# ------------------------------------------------------------------ keys in columns, a bias, a window that is passed
COLUMNS = attend("k_ptr + rest * D * N + first_col + (d_2 * N + col), mask=inside_col & (d_2 < D)",
                 score="tl.dot(q_tile, k_tile) * 0.125")  # fmt: skip
TURNED = attention(two_loops(COLUMNS, "N"), "d_2 = tl.arange(0, BLOCK_D)[:, None]\n" + TAIL)
TURNED = replace(
    TURNED, inputs={**TURNED.inputs, "k": Tensor("bf16", (Z, D, N))}, guards=(*TURNED.guards, 128 * N < 2**29)
)
SCORE = "tl.dot(q_tile, tl.trans(k_tile)) + tl.load(bias_ptr + first_row * N + first_col + (row * N + col), "
BIASED = attention(two_loops(attend(score=SCORE + "mask=inside_col & inside_row)", alive=BEFORE)), CAUSAL_BOUNDS)
BIASED = replace(
    BIASED, inputs={**BIASED.inputs, "bias": Tensor("f32", (M, N))}, guards=(*FIT, SHORT, ROWS * N < 2**29)
)
PASSED = attention(*window("W"), guards=(*FIT, SHORT, SPAN < FEW))
PASSED = replace(PASSED, scalars={**SIZES, "W": SPAN})
LONGEST_FIRST = WIDE.replace("pid %", "tl.cdiv(M, BLOCK_M) - 1 - pid %")

# ------------------------------------------------------------------ other ends
FROM_THE_END = """
last_row = tl.minimum(first_row + BLOCK_M, M) - 1
stop = tl.minimum(last_row + 1 + (N - M), N)
whole_stop = tl.minimum(tl.maximum(first_row + 1 + (N - M), 0), N) // BLOCK_N * BLOCK_N
"""
LATE = two_loops(attend(alive=" & (row + (N - M) >= col + (first_col - first_row))"))
BOTH_SIDES = """
last_row = tl.minimum(first_row + BLOCK_M, M) - 1
start = tl.maximum(first_row - 255, 0) // BLOCK_N * BLOCK_N
stop = tl.minimum(last_row + 256, N)
whole_start = (tl.maximum(last_row - 255, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
whole_start = tl.maximum(tl.minimum(whole_start, (stop + BLOCK_N - 1) // BLOCK_N * BLOCK_N), start)
whole_stop = tl.maximum(tl.minimum(first_row + 256, N) // BLOCK_N * BLOCK_N, whole_start)
"""
NEAR = " & (row < col + (first_col - first_row) + 256) & (row + 256 > col + (first_col - first_row))"
AROUND = three_loops(attend(alive=NEAR), "start", "whole_start", "whole_stop", "stop")
UP_TO_LENGTH = """
length = tl.load(length_ptr + rest)
stop = tl.minimum(tl.maximum(length, 0), N)
whole_stop = stop // BLOCK_N * BLOCK_N
"""
SHORTER = two_loops(ATTEND.replace("< N - first_col", "< stop - first_col"))


def lengths(dtype: str) -> Stream:
    """So many keys of each batch as memory says."""
    stream = attention(SHORTER, UP_TO_LENGTH)
    return replace(stream, inputs={**stream.inputs, "length": Tensor(dtype, (Z,))})


IN_TURNS = replace(
    COUNTED,
    body="""
pid = tl.program_id(0)
chunk = tl.cast(pid % chunks, tl.int64)
rest = tl.cast(pid // chunks, tl.int64)
first_row = 0
start = chunk * BLOCK_N
whole_stop = N // BLOCK_N * BLOCK_N
""" + LANES + query() + turns("start", "whole_stop", whole(ATTEND), "chunks * BLOCK_N")
    + turns("whole_stop + start", "N", ATTEND, "chunks * BLOCK_N") + CHUNK_RESULT,
)  # fmt: skip

# ------------------------------------------------------------------ lanes that get their dimension where they are used
FLAT = """
row = first_row + tl.arange(0, BLOCK_M)
inside_row = row < M
lane = tl.arange(0, BLOCK_N)
d = tl.arange(0, BLOCK_D)
along_d = d < D
q_tile = tl.load(q_ptr + rest * M * D + (row[:, None] * D + d[None, :]), mask=inside_row[:, None] & along_d[None, :])
top = tl.full([BLOCK_M], float("-inf"), tl.float32)
total = tl.zeros([BLOCK_M], tl.float32)
acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
whole_stop = tl.minimum(first_row + 1, N) // BLOCK_N * BLOCK_N
"""
FLAT_TURN = """
col = tl.cast(col_at, tl.int64) + lane
inside_col = col < N  # masked
places = rest * N * D + (col[:, None] * D + d[None, :])
k_tile = tl.load(k_ptr + places, mask=inside_col[:, None] & along_d[None, :], other=0.0)
s = tl.dot(q_tile, tl.trans(k_tile)) * 0.125
s = tl.where(inside_col[None, :] & (row[:, None] >= col[None, :]), s, float("-inf"))  # masked
new = tl.maximum(top, tl.max(s, 1))
ratio = tl.exp(top - new)
p = tl.exp(s - new[:, None])
total = total * ratio + tl.sum(p, 1)
v_tile = tl.load(v_ptr + places, mask=inside_col[:, None] & along_d[None, :], other=0.0)
acc = tl.dot(p.to(tl.bfloat16), v_tile, acc * ratio[:, None])
top = new
"""
FLAT_RESULT = """
out_place = rest * M * D + (row[:, None] * D + d[None, :])
tl.store(out_ptr + out_place, (acc / total[:, None]).to(tl.bfloat16), mask=inside_row[:, None] & along_d[None, :])
tl.store(lse_ptr + rest * M + row, top + tl.log(total), mask=inside_row)
"""
ONE_DIMENSION = replace(
    attention(""),
    body=WIDE + FLAT + two_loops(FLAT_TURN, "N").replace("inside_col[:, None] & along", "along", 2) + FLAT_RESULT,
)

# ------------------------------------------------------------------ all
STREAMS: dict[str, Stream] = {
    "plain": attention(two_loops(ATTEND, "N"), TAIL),
    "plain in 32 bits": attention(two_loops(ATTEND, "N"), TAIL, NARROW),
    "plain, whole blocks": attention(turns("0", "N", whole(ATTEND)), guards=(*FIT, SHORT, *divisible((N, COLS)))),
    "causal": attention(two_loops(CAUSAL), CAUSAL_BOUNDS),
    "causal in 32 bits": attention(two_loops(CAUSAL), CAUSAL_BOUNDS, NARROW),
    "window": attention(*window("256")),
    "window in 32 bits": attention(*window("256"), NARROW),
    "backward by keys": BACKWARD,
    "backward by keys, grouped heads": GROUPED,
    "cross-entropy, a long depth": CROSS_ENTROPY,
    "chunks": CHUNKS,
    "so many chunks": COUNTED,
    "chunks of blocks in turns": IN_TURNS,
    "causal from the end": attention(LATE, FROM_THE_END),
    "causal from the end in 32 bits": attention(LATE, FROM_THE_END, NARROW),
    "a window on both sides": attention(AROUND, BOTH_SIDES),
    "lengths from memory": lengths("i64"),
    "lengths from memory in 32 bits": lengths("i32"),
    "any strides, heads that share keys": STRIDED,
    "keys in columns": TURNED,
    "a bias from memory": BIASED,
    "a window that is passed": PASSED,
    "lanes without a dimension": ONE_DIMENSION,
    "the longest rows first": attention(two_loops(CAUSAL), CAUSAL_BOUNDS, LONGEST_FIRST),
}
STREAMS |= {f"{name}, head of 64": constant_head(STREAMS[name]) for name in STREAMS if "depth" not in name}


# ------------------------------------------------------------------ planted faults
@dataclass(frozen=True)
class Planted:
    """A change to the text of a stream, or to how it is launched, and what of it is not proved any more."""

    stream: str
    kind: str
    old: str = ""
    new: str = ""
    changed: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[sympy.Symbol, int] = field(default_factory=dict)  # sizes at which it goes wrong, where few do


STEPS = dict.fromkeys(FREE.values(), 64)
FAULTS = {
    # loops
    "no mask along the stream": Planted("plain", "range", "(0, whole_stop, BLOCK_N", "(0, N, BLOCK_N"),
    "blocks of another size": Planted("plain", "range", "N // BLOCK_N * BLOCK_N", "N // 32 * 32"),
    "an end that is no multiple": Planted("plain", "range", "N // BLOCK_N * BLOCK_N", "N - N % 16"),
    "one block too many": Planted("plain", "range", "(0, whole_stop, BLOCK_N", "(0, whole_stop + BLOCK_N, BLOCK_N"),
    "half a block as a step": Planted("plain", "range", "(0, whole_stop, BLOCK_N", "(0, whole_stop, BLOCK_N // 2"),
    "a begin that is no multiple": Planted("plain", "range", "(0, whole_stop, BLOCK_N",
                                           "(BLOCK_N // 2, whole_stop, BLOCK_N"),
    "an end beyond the stream": Planted("causal", "range", "tl.minimum(first_row + 1, N) //", "(first_row + 1) //"),
    "the end rounded up": Planted("causal in 32 bits", "range", "tl.minimum(first_row + 1, N) //",
                                  "(tl.minimum(first_row + 1, N) + BLOCK_N - 1) //"),
    "the larger of two ends": Planted("causal", "range", "whole_stop = tl.minimum(", "whole_stop = tl.maximum("),
    "whole blocks that begin between blocks": Planted(
        "window", "range", "tl.cdiv(tl.maximum(last_row - (256 - 1), 0), BLOCK_N) * BLOCK_N",
        "tl.maximum(last_row - (256 - 1), 0)", at={M: 356, N: 257}),
    "whole blocks from another begin": Planted("window", "range", ", start), after)", ", start + 1), after)",
                                              at={M: 256, N: 128}),
    "whole blocks behind the window": Planted("window in 32 bits", "range", "(whole_start, whole_stop, BLOCK_N",
                                              "(whole_start, after, BLOCK_N", at={M: 300, N: 300}),
    "a window that begins before the stream": Planted(
        "window", "range", "tl.maximum(first_row - (256 - 1), 0) // BLOCK_N", "(first_row // BLOCK_N - 4)",
        at={M: 100, N: 100}),
    "queries from within a block": Planted(
        "backward by keys", "range", "tl.cdiv(last_key, BLOCK_M) * BLOCK_M", "last_key", at={M: 128, N: 64}),
    "queries up to a whole block": Planted("backward by keys", "range", "M // BLOCK_M * BLOCK_M, whole_start",
                                           "tl.cdiv(M, BLOCK_M) * BLOCK_M, whole_start", at={M: 200, N: 60}),
    "chunks of no whole blocks": Planted("chunks", "range", changed={"constants": {**CHUNKS.constants, "CHUNK": 1000}},
                                          at={M: 1, N: 2000}),
    "a chunk beyond the stream": Planted("chunks", "range", "tl.minimum(start + CHUNK, N)", "start + CHUNK"),
    "one head too many": Planted("backward by keys, grouped heads", "range", "(0, HEADS)", "(0, HEADS + 1)",
                                 at={M: 200, N: 60}),
    "no mask along the depth": Planted("cross-entropy, a long depth", "range",
                                       "mask=inside_col_2 & (k < K - first_k)", "mask=inside_col_2"),
    # masks and places
    "no mask of the rows": Planted("causal", "range", "mask=inside_row & (d < D), other", "mask=d < D, other"),
    "no mask of the head": Planted("causal", "range", "mask=inside_row & (d < D), other", "mask=inside_row, other"),
    "a mask one too long": Planted("plain", "range", "col_2 < N - first_col", "col_2 <= N - first_col"),
    "the mask of the other side": Planted("keys in columns", "range", "mask=inside_col & (d_2 < D)",
                                          "mask=inside_col_2 & (d_2 < D)"),
    "lanes along the other dimension": Planted("lanes without a dimension", "range", "inside_col[:, None] & along",
                                               "inside_col[None, :] & along"),
    "a stride for another": Planted("plain", "range", VALUE, "v_ptr + at_2 + (col_2 + d * N)"),
    "the step of another tensor": Planted("any strides, heads that share keys", "range", "col_2 * v_step",
                                          "col_2 * k_step", at={**STEPS, FREE["k_step"]: 128}),
    "heads that share no keys": Planted("any strides, heads that share keys", "range", "head // GROUP", "head",
                                        at={**STEPS, FREE["k_head"]: 4096}),
    "turns of half a block": Planted("chunks of blocks in turns", "range", "start = chunk * BLOCK_N",
                                     "start = chunk * (BLOCK_N // 2)", at={M: 1, N: 64, SPAN: 2}),
    "a block before the stream": Planted("causal from the end", "range", "0), N) // BLOCK_N * BLOCK_N",
                                         "0), N) // BLOCK_N * BLOCK_N - BLOCK_N", at={M: 30, N: 20}),
    "a length beyond the stream": Planted("lengths from memory", "range", "tl.minimum(tl.maximum(length, 0), N)",
                                          "tl.maximum(length, 0)"),
    "rows for columns": Planted("a bias from memory", "range", "row * N + col", "col * N + row"),
    "the stream of the next batch": Planted("plain", "range", "(rest * N + first_col)", "((rest + 1) * N + first_col)"),
    # 32 bits
    "a batch in 32 bits": Planted("plain", "width", "rest = tl.cast(pid // tl.cdiv(M, BLOCK_M), tl.int64)",
                                  "rest = pid // tl.cdiv(M, BLOCK_M)"),
    "a block of keys in 32 bits": Planted("plain in 32 bits", "width", "(rest * N + first_col) * D",
                                          "rest * N * D + col_at * D"),
    "rows up to the last number": Planted("causal in 32 bits", "width", changed={"guards": (N < FEW, Z < FEW, SHORT)},
                                          at={M: 2**31 - 1}),
    "heads of any size": Planted("plain", "width", changed={"guards": FIT}, at={D: 2**26, M: 128}),
    # guards, programs and stores
    "no guard of whole blocks": Planted("plain, whole blocks", "range", changed={"guards": (*FIT, SHORT)}),
    "a guard of smaller blocks": Planted("plain, whole blocks", "range",
                                         changed={"guards": (*FIT, SHORT, *divisible((N, COLS // 2)))}),
    "one program too many": Planted("causal", "range", changed={"grid": GRID + 1}),
    "one place for all rows": Planted("plain", "overlap", "out_ptr + at + (", "out_ptr + rest * M * D + ("),
    "the statistics of one batch": Planted("plain", "overlap", "lse_ptr + rest * M + first_row", "lse_ptr + first_row"),
    "chunks that meet": Planted("chunks", "overlap", "(rest * chunks + chunk) * M", "(rest + chunk) * M"),
    "rows that meet": Planted("causal", "overlap", "tl.int64) * BLOCK_M", "tl.int64) * BLOCK_M // 2"),
}  # fmt: skip


def faulty(name: str) -> Stream:
    fault = FAULTS[name]
    stream = STREAMS[fault.stream]
    return replace(stream.replaced(fault.old, fault.new) if fault.old else stream, **fault.changed)
