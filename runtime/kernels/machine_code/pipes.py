"""Which pipe of a multiprocessor an instruction goes to, and how many warp instructions a pipe takes per clock.

CUDA C++ Programming Guide, throughput of native arithmetic instructions per compute capability: results per clock and
multiprocessor, here by 32 lanes and four schedulers. A scheduler issues one instruction per clock, whatever its pipe.
"""

from __future__ import annotations

from .sass import Instruction

_NAMES = {
    "special": "MUFU",
    "integer": "IADD3 IADD VIADD VIADDMNMX LOP3 LOP SHF ISETP SEL PRMT FMNMX FSETP FSEL IMNMX VIMNMX LEA IABS POPC "
    "F2FP PLOP3 SGXT BMSK FLO FCHK P2R R2P I2FP VABSDIFF BREV ISCADD VIMNMX3 FMNMX3 HMNMX2 F2IP",
    "float": "FFMA FMUL FADD IMAD HFMA2 HADD2 HMUL2 FFMA2 FADD2 FMUL2 MOV FSWZADD CS2R HSETP2 IMUL",
    "double": "DADD DMUL DFMA DSETP DMNMX",
    "convert": "F2I I2F F2F FRND",
    "memory": "LDG STG LDS STS LDGSTS ATOM ATOMG ATOMS RED REDG LDC LDSM STSM STL LDL SHFL LD ST LDGDEPBAR MATCH",
    "matrix": "HMMA IMMA DMMA QGMMA HGMMA BMMA UTCHMMA",
}
PIPE = {name: pipe for pipe, names in _NAMES.items() for name in names.split()}
UNIFORM, CONTROL = "uniform", "control"

_RATES = {
    "float": 1.0, "integer": 0.5, "special": 0.125, "convert": 0.125, "memory": 0.25, "matrix": 0.5, "double": 0.5,
    UNIFORM: 0.5,
}  # fmt: skip
RATES = {
    "cuda:75": {**_RATES, "float": 0.5, "double": 1 / 64},
    "cuda:80": {**_RATES, "float": 0.5, "double": 0.25},
    "cuda:86": {**_RATES, "double": 1 / 64},
    "cuda:89": {**_RATES, "double": 1 / 64},
    "cuda:90": _RATES,
    "cuda:100": _RATES,
}
"""Warp instructions per scheduler and clock; conversions that only the special unit does are its quarter rate."""


def pipe_of(instruction: Instruction) -> str:
    """The pipe; "control" for branches, barriers and what else is only issued."""
    if instruction.base in PIPE:
        return PIPE[instruction.base]
    is_uniform = instruction.base.startswith("U") or instruction.base in ("S2UR", "R2UR", "VOTEU", "LDCU")
    return UNIFORM if is_uniform else CONTROL


def width(instruction: Instruction) -> int:
    """Bytes per lane of a load or store."""
    sizes = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((n for modifier, n in sizes.items() if instruction.is_a(modifier)), 4)
